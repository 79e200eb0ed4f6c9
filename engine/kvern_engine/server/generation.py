"""One HTTP request on its way through the engines: its prompts, their choices, the text they have so far.

`Session` submits the prompts, turns outputs into `Piece`s of text, and gives everything back in one idempotent
`release`. What the pieces look like on the wire is decided by `chat.py` and `completions.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.detokenizer import IncrementalDetokenizer
from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.request import SamplingParams
from kvern_engine.server.engine_client import EngineClient, EngineDeadError, EngineRequest, Mailbox
from kvern_engine.server.errors import ApiError, engine_died, unavailable
from kvern_engine.server.logprobs import Aligner
from kvern_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TakePromptLogprobs = Callable[[int, Sequence[TokenLogprobs]], Iterator[None]]


@dataclass(slots=True)
class Piece:
    """New text of one choice; `index` counts over all prompts of the request. `finish_reason` is set exactly once."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None = None
    first: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Choice:
    """The text of one choice as its tokens come."""

    __slots__ = (
        "_aligner",
        "_detokenizer",
        "_include_stop",
        "_logprobs",
        "_started",
        "_text",
        "_tokens",
        "finish_reason",
        "index",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        keep_tokens: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
            before,
        )
        self._include_stop = params.include_stop_str_in_output
        self._aligner = Aligner(tokenizer, params.skip_special_tokens) if params.logprobs is not None else None
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._tokens: list[int] | None = [] if keep_tokens else None
        self._started = False

    def feed(self, output: TokenOutput) -> None:
        """Take tokens in, up to the end."""
        tokens = output.token_ids
        known = self.num_tokens
        self.num_tokens += len(tokens)
        # The token that ends an answer (EOS, a stop token) is counted, but is not part of the text.
        ends = output.finish_reason == "stop" and not self._include_stop
        detokenizer, shown = self._detokenizer, tokens[:-1] if ends else tokens
        text = detokenizer.append(shown)
        if output.finish_reason is not None and detokenizer.stopped is None:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", detokenizer.stopped
            self.num_tokens = detokenizer.tokens_used
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self._tokens is not None:
            self._tokens += tokens[: self.num_tokens - known]
        if self._aligner is not None:
            self._align(self._aligner, (output.logprobs or [])[: len(shown)], text)
        self._text += text

    def _align(self, aligner: Aligner, entries: Sequence[TokenLogprobs], text: str) -> None:
        aligner.add(entries)
        self._logprobs += aligner.sent(text, self._detokenizer.taken_off)
        if self.finish_reason is not None:
            cut = self._detokenizer.stopped is not None and not self._include_stop
            self._logprobs += aligner.rest(cut)

    def take(self) -> Piece | None:
        """What is new since the last call; None where nothing can be sent."""
        if not (self._text or self._logprobs or self.finish_reason):
            return None
        logprobs = self._logprobs if self._aligner is not None else None
        piece = Piece(self.index, self._text, logprobs, not self._started, self.finish_reason, self.stop_reason)
        self._text, self._logprobs, self._started = "", [], True
        if self._tokens is not None:
            piece.token_ids, self._tokens = self._tokens, []
        return piece


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Session:
    """All prompts of one HTTP request in the engines. Read `next` until `done`, then `release` in any case.

    `take_prompt_logprobs(prompt, entries)` gets those of a prompt before the first piece of its choices, and yields now
    and then to let others run. `keep_tokens`: pieces carry token ids. `continues`: the text goes on from the prompt's.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        prompts: Sequence[AddRequest],
        take_prompt_logprobs: TakePromptLogprobs,
        keep_tokens: bool = False,
        continues: bool = False,
    ) -> None:
        self._client = client
        self._take_prompt_logprobs = take_prompt_logprobs
        self.mailbox = Mailbox()
        self._prompts = prompts
        self._requests: list[EngineRequest] = []
        n = prompts[0].params.n
        self.choices = [
            [
                Choice(tokenizer, prompt.params, p * n + i, keep_tokens, prompt.prompt_token_ids if continues else ())
                for i in range(n)
            ]
            for p, prompt in enumerate(prompts)
        ]
        self._left = [n] * len(prompts)
        self._open = len(prompts)
        self._cached = 0

    def submit(self) -> None:
        """Send everything to the engines. Raises ApiError 503 where none is ready."""
        try:
            for tag, prompt in enumerate(self._prompts):
                self._requests.append(self._client.submit(prompt, self.mailbox, tag))
        except EngineDeadError as e:
            raise unavailable(f"No engine can take the request: {e}.", "engine_dead", 1) from None

    @property
    def done(self) -> bool:
        return self._open == 0

    async def next(self) -> list[Piece]:
        """What is new, at most one piece a choice; may be empty. Raises ApiError where an engine failed, and what the
        mailbox was closed with."""
        touched: dict[int, Choice] = {}
        for request, output in await self.mailbox.get():
            choice = self.choices[request.tag][output.index]
            stopped_here = choice.finish_reason is not None  # at a stop string, which the engine knows nothing of
            if output.finish_reason == "error" or (output.finish_reason == "abort" and not stopped_here):
                raise self._failure(request, output)
            if output.num_cached_tokens:
                self._cached += output.num_cached_tokens
            if output.prompt_logprobs is not None:
                for _ in self._take_prompt_logprobs(request.tag, output.prompt_logprobs):
                    await asyncio.sleep(0)
            if stopped_here:
                continue
            choice.feed(output)
            touched[choice.index] = choice
            if choice.finish_reason is not None:
                self._choice_ended(request, output)
        return [piece for choice in touched.values() if (piece := choice.take()) is not None]

    def _choice_ended(self, request: EngineRequest, output: TokenOutput) -> None:
        self._left[request.tag] -= 1
        if self._left[request.tag] == 0:
            self._open -= 1
            ended = {c.finish_reason for c in self.choices[request.tag]}
            self._client.release(request, "length" if "length" in ended else "stop")
        elif output.finish_reason is None:
            self._client.end_choice(request, output.index)

    def _failure(self, request: EngineRequest, output: TokenOutput) -> ApiError:
        for other in self._requests:
            self._client.release(other, "error")
        reason = output.error or "the engine ended the request"
        if request.engine_died:
            return engine_died(reason)
        if output.finish_reason == "abort":
            return unavailable(f"The request was aborted: {reason}.", "aborted", 1)
        if not any(c.num_tokens for choices in self.choices for c in choices):
            # The scheduler refuses what it can never run, before anything was computed.
            return ApiError(reason, code="request_too_large")
        return ApiError(reason, status=500, code="engine_error")

    def release(self, reason: str = "abort") -> None:
        """Give back what is still running, whatever ended the request. Idempotent."""
        for request in self._requests:
            self._client.release(request, reason)

    def usage(self) -> Usage:
        prompt = sum(len(p.prompt_token_ids) for p in self._prompts)
        return Usage(prompt, sum(c.num_tokens for cs in self.choices for c in cs), self._cached)
