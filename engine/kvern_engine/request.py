"""What a caller asks for: sampling parameters, validated on construction.

`SamplingParams` is the public type of the Python API and travels unchanged (msgspec) from API server to engine core.
The core cuts the numeric part that a worker needs out of it (`core/plan.py: RowSampling`).
"""

import difflib
import math
import numbers
from typing import Any

import msgspec

MAX_N = 128
MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 4096  # in one HTTP request: prompts times n
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 64  # tokens
MAX_ALLOWED = 1 << 14
# Prompt tokens times reported alternatives of one request: each costs some sixty bytes of JSON, and more on the way.
MAX_PROMPT_LOGPROBS = 1 << 20
# Below this a temperature only overflows the logits: greedy is what it asks for (vLLM does the same).
GREEDY_BELOW = 1e-5

# Fields of vLLM's class that mean something else here, or nothing: what to do instead.
_REFUSED = {
    "best_of": "ask for n answers and choose among them",
    "use_beam_search": "beam search is not served; use n with a temperature",
    "beam_width": "beam search is not served; use n with a temperature",
    "length_penalty": "beam search is not served; use n with a temperature",
    "logits_processors": "callers' code is never run in an engine; use logit_bias, allowed_token_ids or bad_words",
    "structured_outputs": "structured output is not served yet",
    "guided_decoding": "structured output is not served yet",
    "thinking_token_budget": "reasoning is not told from answers yet; use max_tokens",
    "repetition_detection": "use repetition_penalty, frequency_penalty or max_tokens",
    "logprob_token_ids": f"ask for up to {MAX_LOGPROBS} logprobs, or bias the choice with allowed_token_ids",
    "prompt_logprob_token_ids": f"ask for up to {MAX_LOGPROBS} prompt_logprobs",
    "prompt_logprob_start": "prompt_logprobs come for the whole prompt",
    "flat_logprobs": "logprobs come as one dict a position",
    "output_kind": "LLM.generate gives whole answers, LLM.stream the new text",
    "stream_interval": "LLM.stream gives what is new after every step",
    "extra_args": "there are no plug-ins that could read them",
    "trace_decode_token_ids": "append the tokens to the prompt and ask for prompt_logprobs",
}
_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _check(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{field} must be {rule}, got {value!r}")


class _CheckedNames(msgspec.StructMeta):
    """Keyword arguments that the class does not have are refused with what to use instead."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError:
            unknown = [name for name in given if name not in cls.__struct_fields__]
            if not unknown:
                raise
        for name in unknown:
            if name not in _REFUSED:
                near = difflib.get_close_matches(name, cls.__struct_fields__, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"SamplingParams has no field {name!r}{hint}")
            if given[name] not in (None, False, (), [], {}):
                raise ValueError(f"{name} is not supported: {_REFUSED[name]}")
            del given[name]
        return super().__call__(*args, **given)


class SamplingParams(msgspec.Struct, metaclass=_CheckedNames, kw_only=True, frozen=True, omit_defaults=True):
    """How to choose tokens and when to stop; names and defaults are vLLM's.

    `temperature` 0 (or below 1e-5) is greedy. `top_k` 0 or -1 means no limit. `seed` None or -1 draws a fresh seed for
    the request. `logprobs` is the number of alternatives reported besides the chosen token (None: no logprobs at all),
    `prompt_logprobs` the same for each token of the prompt but the first, which is then computed and never taken from
    the prefix cache.

    `allowed_token_ids` are the only tokens that may be chosen. `bad_words` are texts whose last token is banned where
    the generated tokens before it are the others; `LLM` and the server turn them into `bad_words_token_ids`, which may
    also be given. Where these and `min_tokens` would leave no token at all, what is allowed wins.

    `truncate_prompt_tokens` keeps only the last tokens of a prompt, -1 as many as leave room for `max_tokens`.
    `skip_reading_prefix_cache` computes the whole prompt. `spaces_between_special_tokens` is accepted for vLLM's sake:
    tokens' texts are put together as they are, so there is nothing to leave out.

    Raises ValueError naming the field, the value and what is allowed, TypeError for a field that does not exist.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True  # False: token ids only, no text (and no stop strings)
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        self._normalize()
        finite = math.isfinite
        _check(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        _check(finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (no limit) or a positive number of tokens")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")
        repetition = self.repetition_penalty
        _check(finite(repetition) and repetition > 0, "repetition_penalty", repetition, "a number above 0")
        most, least = self.max_tokens, self.min_tokens
        _check(most is None or most >= 1, "max_tokens", most, "at least 1")
        _check(least >= 0, "min_tokens", least, "at least 0")
        _check(most is None or least <= most, "min_tokens", least, f"at most max_tokens ({most})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"between 0 and {MAX_LOGPROBS}")
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit signed integer")
        cut = self.truncate_prompt_tokens
        _check(cut is None or cut == -1 or cut >= 1, "truncate_prompt_tokens", cut, "-1 or at least 1")
        if self.stop or self.bad_words:
            self._check_texts()
        if self.stop_token_ids or self.logit_bias or self.allowed_token_ids is not None or self.bad_words_token_ids:
            self._check_tokens()

    def _normalize(self) -> None:
        """Numbers as Python's own, sequences as tuples; what means the same in two ways, in one."""

        def put(name: str, value: Any) -> None:
            msgspec.structs.force_setattr(self, name, value)

        for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in _OPTIONAL_INTEGERS):
                _check(isinstance(value, numbers.Integral), name, value, "an integer")
                put(name, int(value))
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float:
                _check(isinstance(value, numbers.Real), name, value, "a number")
                put(name, float(value))
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if value != ():
                put(name, (value,) if isinstance(value, str) else tuple(value or ()))
        if self.stop_token_ids != ():
            put("stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids or ())))
        if self.bad_words_token_ids != ():
            put("bad_words_token_ids", tuple(tuple(word) for word in self.bad_words_token_ids or ()))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        if self.seed == -1:
            put("seed", None)
        if 0 < self.temperature < GREEDY_BELOW:
            put("temperature", 0.0)

    def _check_texts(self) -> None:
        for name, most in (("stop", MAX_STOP), ("bad_words", MAX_BAD_WORDS)):
            texts = getattr(self, name)
            _check(len(texts) <= most, name, len(texts), f"at most {most} strings")
            _check(all(isinstance(text, str) and text for text in texts), name, texts, "non-empty strings")
        _check(self.detokenize or not self.stop, "stop", self.stop, "empty where detokenize is False")

    def _check_tokens(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            _check(
                _is_token(token) and -100 <= bias <= 100,
                "logit_bias",
                {token: bias},
                "token id -> bias between -100 and 100",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            wrong = next((token for token in getattr(self, name) or () if not _is_token(token)), None)
            _check(wrong is None, name, wrong, "token ids (integers from 0)")
        allowed = self.allowed_token_ids
        if allowed is not None:
            _check(0 < len(allowed) <= MAX_ALLOWED, "allowed_token_ids", len(allowed), f"1 to {MAX_ALLOWED} token ids")
        words = self.bad_words_token_ids
        # With and without a space before it, a bad word is two lists of tokens.
        most = 2 * MAX_BAD_WORDS
        _check(len(words) <= most, "bad_words_token_ids", len(words), f"at most {most} lists of token ids")
        for word in words:
            _check(bool(word) and all(map(_is_token, word)), "bad_words_token_ids", word, "non-empty lists of tokens")
            _check(len(word) <= MAX_BAD_WORD, "bad_words_token_ids", word[:4], f"at most {MAX_BAD_WORD} tokens each")


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0
