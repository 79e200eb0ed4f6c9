"""What `LLM.generate` and `LLM.chat` return; names and fields as users of vLLM know them. Plain data."""

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Times in seconds of `time.monotonic()`; `num_cached_tokens` prompt tokens came from the prefix cache."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0


@dataclass
class CompletionOutput:
    """One of the `n` answers. `logprobs[i]` maps token ids to Logprob at position i (asked for with `logprobs`).

    `finish_reason` is stop | length | abort; `stop_reason` the stop string or stop token id that ended it, None at EOS.
    `text` is empty where SamplingParams(detokenize=False).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers, sorted by `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None
