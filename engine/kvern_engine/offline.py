"""What becomes of one prompt of `LLM.generate`: parsing and checking it, gathering its tokens, cutting at stop strings.

No engine here: plain values in, plain values out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.detokenizer import IncrementalDetokenizer
from kvern_engine.ipc import TokenOutput
from kvern_engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from kvern_engine.request import SamplingParams

if TYPE_CHECKING:
    from kvern_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Text, token ids, or both (then the ids are what is computed). `is_chat`: the answer is a text of its own, which
    does not go on from the prompt's."""

    text: str | None
    token_ids: list[int] | None
    is_chat: bool = False


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    # Plain numbers, the usual case, are told apart three times as fast by their types.
    return set(map(type, value)) <= {int} or all(isinstance(t, int) for t in value)


def _parse_prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(value, None)
    if isinstance(value, dict):
        if isinstance(text := value.get("prompt"), str) and "prompt_token_ids" not in value:
            return Prompt(text, None)
        ids = value.get("prompt_token_ids")
        if ids is not None and _is_ids(ids):
            return Prompt(value.get("prompt"), list(ids))
        raise ValueError(f"{where} needs 'prompt' (text) or 'prompt_token_ids' (list of int), got keys {sorted(value)}")
    if _is_ids(value):
        return Prompt(None, list(value))
    raise ValueError(f"{where} must be text, a list of token ids or a dict, got {type(value).__name__}")


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One Prompt for each of `prompts`; a single one counts as a list of one. Raises ValueError naming the index."""
    if isinstance(prompts, str | dict) or (_is_ids(prompts) and len(prompts) > 0):
        return [_parse_prompt(prompts, "prompts")]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}")
    return [_parse_prompt(value, f"prompts[{i}]") for i, value in enumerate(prompts)]


def check_prompt(index: int, ids: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    """Raises ValueError naming the prompt's index, what is wrong with it and what would be right."""
    if not ids:
        raise ValueError(f"prompts[{index}] is empty: it must hold at least one token")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"prompts[{index}] has {len(ids)} tokens: at most {max_model_len - 1} leave room for an answer within "
            f"max_model_len {max_model_len}"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"prompts[{index}] holds token id {wrong}: ids of this model go from 0 to {vocab_size - 1}")


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for token ids in sampling parameters that the model does not have."""
    named = {
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": [token for word in params.bad_words_token_ids for token in word],
    }
    for name, tokens in named.items():
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(f"{name} holds token id {max(tokens)}: ids of this model go from 0 to {vocab_size - 1}")


class _Choice:
    """One of the n answers as it grows."""

    __slots__ = ("detokenizer", "finish_reason", "logprobs", "parts", "stop_reason", "token_ids")

    def __init__(self, detokenizer: IncrementalDetokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.parts: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class Job:
    """One prompt on its way. Text is made at the end, unless stop strings or a stream need it at once."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: "Tokenizer | None",
        is_chat: bool = False,
    ) -> None:
        self.index, self.request_id = index, request_id
        self.prompt, self.prompt_token_ids, self.params = prompt, prompt_token_ids, params
        self.stopped: list[tuple[str, int]] = []  # choices at a stop string: the engine must be told
        self._tokenizer = tokenizer
        self.eos_token_ids: tuple[int, ...] = () if tokenizer is None else tokenizer.eos_token_ids
        self._before: Sequence[int] = () if is_chat else prompt_token_ids
        self._watch_text = tokenizer is not None and bool(params.stop)
        self._choices = [_Choice(self._detokenizer()) for _ in range(params.n)]
        self._left = params.n
        self._streamed = 0  # tokens of choice 0 whose text has been taken by new_text
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        p = self.params
        return IncrementalDetokenizer(
            self._tokenizer, p.stop, p.include_stop_str_in_output, p.skip_special_tokens, p.min_tokens, self._before
        )

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def absorb(self, output: TokenOutput) -> bool:
        """Take one output in; True when this was the last one of the last choice.

        Raises ValueError where the engine refused the request, RuntimeError where it failed.
        """
        choice = self._choices[output.index]
        if choice.finish_reason is not None:
            return False
        metrics = self.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
            metrics.first_scheduled_time = output.scheduled
            metrics.num_cached_tokens = output.num_cached_tokens or 0
        choice.token_ids += output.token_ids
        if output.logprobs:
            choice.logprobs += output.logprobs
        if output.prompt_logprobs:
            self._prompt_logprobs += output.prompt_logprobs
        ends = output.finish_reason == "stop" and not self.params.include_stop_str_in_output
        if self._watch_text and self._stop_string(choice, output.token_ids[:-1] if ends else output.token_ids):
            if output.finish_reason is None:
                self.stopped.append((self.request_id, output.index))
            return self._end(choice, "stop", choice.stop_reason)
        if output.finish_reason is None:
            return False
        if output.finish_reason == "error":
            raise ValueError(f"prompts[{self.index}]: {output.error}")
        return self._end(choice, output.finish_reason, output.stop_reason)

    def _stop_string(self, choice: _Choice, token_ids: list[int]) -> bool:
        """Whether a stop string ended the choice; its tokens and logprobs are cut after the match."""
        assert choice.detokenizer is not None
        choice.parts.append(choice.detokenizer.append(token_ids))
        if choice.detokenizer.stopped is None:
            return False
        used = choice.detokenizer.tokens_used
        del choice.token_ids[used:], choice.logprobs[used:]
        choice.stop_reason = choice.detokenizer.stopped
        return True

    def _shown_tokens(self, choice: _Choice) -> list[int]:
        """Those whose text is shown: not an EOS or stop token that ended the answer, unless that is asked for."""
        ended = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
        return choice.token_ids[:-1] if ended and not self.params.include_stop_str_in_output else choice.token_ids

    def _end(self, choice: _Choice, reason: str, stop_reason: int | str | None) -> bool:
        choice.finish_reason, choice.stop_reason = reason, stop_reason
        self._left -= 1
        if self._left:
            return False
        self.metrics.finished_time = time.monotonic()
        return True

    def new_text(self) -> str:
        """Text of choice 0 that is safe to show and was not taken yet (for streams)."""
        choice = self._choices[0]
        if choice.detokenizer is None:
            return ""
        if self._watch_text:
            text = "".join(choice.parts[self._streamed :])
            self._streamed = len(choice.parts)
        else:
            text = choice.detokenizer.append(self._shown_tokens(choice)[self._streamed :])
            self._streamed = len(choice.token_ids)
            choice.parts.append(text)
        if choice.finish_reason is not None and (rest := choice.detokenizer.finish()):
            choice.parts.append(rest)
            self._streamed += 1
            return text + rest
        return text

    def result(self) -> RequestOutput:
        outputs = [self._completion(i, choice) for i, choice in enumerate(self._choices)]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._logprobs_of(entry) for entry in self._prompt_logprobs)]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, prompt_logprobs, metrics=self.metrics
        )

    def _completion(self, index: int, choice: _Choice) -> CompletionOutput:
        text = "".join(choice.parts)
        if choice.detokenizer is not None:
            if not self._watch_text:
                text = choice.detokenizer.append(self._shown_tokens(choice))
            text += choice.detokenizer.finish()
        with_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index,
            text,
            choice.token_ids,
            sum(entry.logprob for entry in choice.logprobs) if with_logprobs else None,
            [self._logprobs_of(entry) for entry in choice.logprobs] if with_logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
        )

    def _logprobs_of(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The most likely tokens, and the chosen one also where it is not among them."""
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        found = {token: self._logprob(token, value, rank) for rank, (token, value) in enumerate(tops, start=1)}
        found.setdefault(entry.token_id, self._logprob(entry.token_id, entry.logprob, entry.rank))
        return found

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, self._tokenizer.token_text(token) if self._tokenizer else None)
