"""Messages between API servers, engine cores and the supervisor: msgspec over ZeroMQ on unix sockets, never pickle.

N API servers talk to M engine cores. Each core binds one PULL socket for requests; each API server binds one PULL
socket for outputs; everybody connects PUSH sockets to the peers. Request ids are globally unique and chosen by the API
server; every message names its engine or its client. The messages between core and worker are in `core/plan.py`.
"""

import msgspec

from kvern_engine.core.plan import TokenLogprobs, WorkerProgress
from kvern_engine.request import SamplingParams


class AddRequest(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A request, tokenized and validated. `client` is the API server that gets the outputs.

    `arrival` is `time.monotonic()` at the API server (one clock for all processes of a pod). Lower `priority` runs
    first. `cache_salt` separates prefix caches between tenants. `eos_token_ids` are EOS ids that the tokenizer names,
    beside those of the model's configuration, which the core knows.
    """

    request_id: str
    client: int
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    eos_token_ids: tuple[int, ...] = ()


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The caller is gone or has seen a stop string: end these requests, and of others only some choices.

    Unknown ids, and choices that have ended, are ignored.
    """

    request_ids: list[str]
    choices: list[tuple[str, int]] = []  # request id, index


class TokenOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """New tokens of choice `index` of a request. `finish_reason` (stop|length|abort|error) ends that choice.

    `stop_reason` is the stop token id that ended it, None for EOS. `error` explains finish_reason "error".
    `num_cached_tokens` counts prompt tokens found in the prefix cache and is set on the first output of choice 0.
    Times are `time.monotonic()`: `scheduled` when the request first left the queue, set on its first output.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    scheduled: float | None = None
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True):
    """The state of one engine; counters are totals. `kv_cache_usage` (0..1): blocks not free and not evictable."""

    engine: int
    num_running: int = 0
    num_waiting: int = 0  # choices, as in num_running
    num_waiting_deferred: int = 0  # those of them that will fork from a sibling whose prompt is not computed
    kv_cache_usage: float = 0.0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # free for allocation, but still holding a reusable prefix
    kv_waste: float = 0.0  # share of the slots in used blocks that hold no token
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0  # tokens computed by all steps
    heartbeat: float = 0.0  # time.monotonic() of the core's last turn of its loop
    step_seconds: dict[str, float] = {}  # phase -> seconds since start: schedule, submit, wait, emit
    iteration_tokens: list[int] = []  # tokens of each step since the last report
    device_seconds: dict[str, float] = {}  # busy (with steps), idle (between steps, while there was work) since start
    device_idle_fraction: float = 0.0  # of the latest second of work


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One step's outputs for one API server.

    `stats` comes every report interval, when the engine begins to work and when it has nothing left to do, to every
    API server.
    """

    engine: int
    outputs: list[TokenOutput]
    stats: EngineStats | None = None


class CoreReady(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A core can take requests. Sent to the supervisor and to every API server."""

    engine: int
    num_blocks: int
    block_size: int
    max_model_len: int
    info: dict[str, str | int | float] = {}  # weights, dtype, device, load seconds: for logs and cache_config_info
    feasible: dict[int, int] = {}  # tensor parallel size -> tokens of KV cache that the whole pod would then hold


class EngineDead(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The supervisor saw a core or worker die: its requests get an error at once."""

    engine: int
    reason: str
    last: bool  # no engine of the pod lives: /health is 503 from now on


ToCore = AddRequest | Abort
ToServer = Outputs | CoreReady | EngineDead
ToSupervisor = CoreReady | EngineDead | WorkerProgress  # from the cores: ready, or why they give up
