"""What a caller asks for: sampling parameters, validated on construction.

`SamplingParams` is the public type of the Python API and travels unchanged (msgspec) from API server to engine core.
The core cuts the numeric part that a worker needs out of it (`core/plan.py: RowSampling`).
"""

import math

import msgspec

MAX_N = 128
MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 4096  # in one HTTP request: prompts times n


def _check(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{field} must be {rule}, got {value!r}")


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How to choose tokens and when to stop; names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 means no limit. `seed` None draws a fresh seed for the request.
    `logprobs` is the number of alternatives reported besides the chosen token (None: no logprobs at all).
    Raises ValueError naming the field, the value and what is allowed.
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
    detokenize: bool = True  # False: token ids only, no text (and no stop strings)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        finite = math.isfinite
        _check(finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (no limit) or a positive number of tokens")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")
        _check(
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a number above 0",
        )
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        _check(len(self.stop) <= MAX_STOP, "stop", len(self.stop), f"at most {MAX_STOP} strings")
        _check(all(self.stop), "stop", self.stop, "non-empty strings")
        _check(self.detokenize or not self.stop, "stop", self.stop, "empty where detokenize is False")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"between 0 and {MAX_LOGPROBS}")
        for token, bias in (self.logit_bias or {}).items():
            _check(
                token >= 0 and -100 <= bias <= 100, "logit_bias", {token: bias}, "token id -> bias between -100 and 100"
            )
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit signed integer")
