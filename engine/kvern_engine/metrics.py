"""The Prometheus metrics of an engine pod, under vLLM's names, types and labels. Measured in the API servers.

Every API server process adds to plain float64 slots in a file of its own in the pod's socket folder (mapped memory, so
an observation costs well under a microsecond), and whichever process is scraped sums the files: each event is counted
once, and at once, whatever the number of processes. What engines report about themselves (`EngineStats`, sent to every
API server) is taken from the scraped process alone. Nothing here knows HTTP; `kvern_engine.server` calls it.

A request is one prompt with its `n` choices. It is counted once in `request_success`, with `length` if any choice ran
out of tokens; latency histograms hold requests that ended with stop or length, not aborted ones.
"""

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvern_engine.ipc import EngineStats
from kvern_engine.parallel.messages import LayoutState

if TYPE_CHECKING:
    from kvern_engine.exposition import Exposition

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
_TTFT = (*_SHORT, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ONE_TWO_FIVE = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))

Floats = MutableSequence[float]  # mapped memory: views of C doubles

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("queue_full", "draining", "loading", "dead")
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "OTHER")
STATUSES = ("2xx", "3xx", "4xx", "5xx")
STEP_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
PHASES = ("schedule", "submit", "wait", "emit")

_TOKEN_HISTOGRAMS = {
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Tokens generated for a request, over all its choices.",
    "vllm:request_max_num_generation_tokens": "Tokens of a request's longest choice.",
    "vllm:request_params_max_tokens": "The max_tokens of a request.",
}
_SECONDS_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "vllm:inter_token_latency_seconds": ("Between two outputs of one choice.", _ITL),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token of a request after its first.", _ITL),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", _E2E),
    "vllm:request_queue_time_seconds": ("From arrival to being scheduled first.", _E2E),
    "vllm:request_inference_time_seconds": ("From being scheduled first to the last token.", _E2E),
    "vllm:request_prefill_time_seconds": ("From being scheduled first to the first token.", _E2E),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _E2E),
}


class Slots:
    """A file of float64 slots, one per API server; the sum over all files is the pod's value.

    A server that comes back under its index goes on with its file, so counters never go backwards.
    """

    def __init__(self, folder: Path, index: int, num_servers: int, size: int) -> None:
        self._paths = [folder / f"metrics-{i}.f64" for i in range(num_servers)]
        self._size = size
        self._maps: dict[int, Floats] = {}
        self.own = self._map(index, create=True)
        self._index = index

    def _map(self, index: int, create: bool = False) -> Floats:
        path, length = self._paths[index], self._size * 8
        if create and (not path.exists() or path.stat().st_size != length):
            path.write_bytes(bytes(length))
        with path.open("r+b") as f:
            view: Floats = memoryview(mmap.mmap(f.fileno(), length)).cast("d")  # type: ignore[assignment]
        self._maps[index] = view
        return view

    def all(self) -> list[Floats]:
        """The slots of every API server that has started, the own ones first."""
        for i, path in enumerate(self._paths):
            if i not in self._maps and path.exists() and path.stat().st_size == self._size * 8:
                self._map(i)
        return [self.own, *(v for i, v in self._maps.items() if i != self._index)]


@dataclass(frozen=True, slots=True)
class Series:
    """Where a metric's label sets have their slots: `width` slots each, from `start[labels]`."""

    name: str
    help: str
    kind: str  # counter | histogram
    labels: tuple[str, ...]
    start: dict[tuple[str, ...], int]
    bounds: tuple[float, ...] = ()
    replicated: bool = False  # every API server saw all of it: not summed
    sparse: bool = False  # thousands of label sets: those never seen are left out


@dataclass(frozen=True)
class EngineView:
    """What an API server knows of one engine at a scrape. `state`: loading | ready | stalled | dead."""

    engine: int
    state: str
    stats: EngineStats
    num_blocks: int = 0
    block_size: int = 0
    reason: str | None = None  # why it is dead
    feasible: Mapping[int, int] = field(default_factory=dict)  # as in its CoreReady
    device: str = ""  # as in its CoreReady: "cpu", "cuda:0 NVIDIA H200"
    steps: Mapping[str, str] = field(default_factory=dict)  # the limits of its steps: max_num_seqs, ...


@dataclass(frozen=True)
class PodView:
    """What is read at a scrape: engines, lifecycle, layout, the labels of cache_config_info, longest context."""

    engines: Sequence[EngineView]
    draining: bool
    layout: dict[str, int]  # dp, tp, pp
    cache_config: dict[str, str]
    max_model_len: int | None
    switches: LayoutState | None = None  # of the layout: as the supervisor said last
    past: Mapping[int, EngineStats] = field(default_factory=dict)  # of engines that a switch has ended: counters stay


@dataclass(slots=True)
class RequestTimes:
    """The life of one request, in `time.monotonic()` seconds and tokens; filled in as its outputs come."""

    arrival: float
    prompt_tokens: int
    max_tokens: int
    n: int
    scheduled: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    longest: int = 0


class Metrics:
    """All metrics of one API server process. The observing methods are called from its event loop only."""

    def __init__(
        self,
        folder: Path,
        *,
        model_name: str,
        num_engines: int,
        handlers: Sequence[str],
        index: int = 0,
        num_servers: int = 1,
        view: Callable[[], PodView],
    ) -> None:
        self._view = view
        self.model_name = model_name
        self._size = 0
        self.series: list[Series] = []
        engines = [(model_name, str(e)) for e in range(num_engines)]
        self._define_requests(engines)
        self._define_http(handlers)
        self._in_flight, self._ready = self._take(1), self._take(1)
        self.slots = Slots(folder, index, num_servers, self._size)
        self._own = self.slots.own
        self._own[self._in_flight] = self._own[self._ready] = 0.0  # a process that comes back has nothing in flight
        self._num_servers = num_servers

    # Definition

    def _take(self, count: int) -> int:
        start, self._size = self._size, self._size + count
        return start

    def _counter(
        self, name: str, help: str, labels: Sequence[str], values: Iterable[tuple[str, ...]], sparse: bool = False
    ) -> Series:
        series = Series(name, help, "counter", tuple(labels), {v: self._take(1) for v in values}, sparse=sparse)
        self.series.append(series)
        return series

    def _histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        values: Iterable[tuple[str, ...]],
        bounds: Sequence[float],
        replicated: bool = False,
        sparse: bool = False,
    ) -> Series:
        # One slot a bucket, one above the last bound, one for the sum.
        start = {v: self._take(len(bounds) + 2) for v in values}
        series = Series(name, help, "histogram", tuple(labels), start, tuple(bounds), replicated, sparse)
        self.series.append(series)
        return series

    def _define_requests(self, engines: list[tuple[str, str]]) -> None:
        names = ("model_name", "engine")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens processed.", names, engines)
        self._cached = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", names, engines
        )
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.", names, engines)
        ends = [(*e, reason) for e in engines for reason in FINISH_REASONS]
        self._success = self._counter(
            "vllm:request_success", "Requests that ended, by reason.", (*names, "finished_reason"), ends
        )
        for part, help in (("drafts", "Drafts"), ("draft_tokens", "Drafted tokens"), ("accepted_tokens", "Accepted")):
            self._counter(f"vllm:spec_decode_num_{part}", f"{help} of speculative decoding.", names, engines)
        self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            (*names, "position"),
            [(*e, "0") for e in engines],
        )
        rejections = [(self.model_name, r) for r in REJECTIONS]
        self._rejected = self._counter(
            "vllm:admission_rejections", "Requests refused at the door.", ("model_name", "reason"), rejections
        )
        self._tokens = {
            name: self._histogram(name, help, names, engines, ONE_TWO_FIVE) for name, help in _TOKEN_HISTOGRAMS.items()
        }
        self._seconds = {
            name: self._histogram(name, help, names, engines, bounds)
            for name, (help, bounds) in _SECONDS_HISTOGRAMS.items()
        }
        self._itl = self._seconds["vllm:inter_token_latency_seconds"]
        self._params_n = self._histogram("vllm:request_params_n", "The n of a request.", names, engines, _N)
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed by a step.", names, engines, _STEP, replicated=True
        )

    def _define_http(self, handlers: Sequence[str]) -> None:
        self._handlers = frozenset(handlers)
        every = [*handlers, "none"]
        self._http = self._counter(
            "http_requests",
            "HTTP requests, by status class.",
            ("status", "method", "handler"),
            [(s, m, h) for s in STATUSES for m in METHODS for h in every],
            sparse=True,
        )
        # Those of the busiest paths are there from the start, so that a rate sees their first increase.
        self.always_shown: set[tuple[str, ...]] = {
            (s, "POST", h) for s in ("2xx", "4xx", "5xx") for h in handlers if h.endswith("completions")
        }
        self._http_duration = self._histogram(
            "http_request_duration_seconds",
            "Time of an HTTP request, streams to their end.",
            ("method", "handler"),
            [(m, h) for m in METHODS for h in every],
            _HTTP,
            sparse=True,
        )

    # Observation

    def _add(self, series: Series, labels: tuple[str, ...], amount: float) -> None:
        self._own[series.start[labels]] += amount

    def _observe(self, series: Series, labels: tuple[str, ...], value: float, count: int = 1) -> None:
        start, own = series.start[labels], self._own
        own[start + bisect_left(series.bounds, value)] += count
        own[start + len(series.bounds) + 1] += value * count

    def labels(self, engine: int) -> tuple[str, str]:
        return (self.model_name, str(engine))

    def prompt_done(self, key: tuple[str, str], prompt_tokens: int, cached_tokens: int, ttft: float) -> None:
        """A request's first token is here; `ttft` in seconds from its arrival."""
        self._add(self._prompt, key, prompt_tokens)
        self._add(self._cached, key, cached_tokens)
        self._observe(self._seconds["vllm:time_to_first_token_seconds"], key, ttft)

    def tokens_generated(self, key: tuple[str, str], count: int, gaps: Sequence[float]) -> None:
        """One message of one engine: how many tokens, and the seconds since the last one of each continued choice."""
        self._own[self._generated.start[key]] += count
        if gaps:
            own, bounds, start = self._own, self._itl.bounds, self._itl.start[key]
            for gap in gaps:
                own[start + bisect_left(bounds, gap)] += 1
            own[start + len(bounds) + 1] += sum(gaps)

    def request_done(self, key: tuple[str, str], reason: str, done: RequestTimes) -> None:
        """A request has ended, once; `reason` is one of FINISH_REASONS."""
        self._add(self._success, (*key, reason), 1)
        if reason not in ("stop", "length"):
            return
        tokens, seconds = self._tokens, self._seconds
        self._observe(tokens["vllm:request_prompt_tokens"], key, done.prompt_tokens)
        self._observe(tokens["vllm:request_generation_tokens"], key, done.tokens)
        self._observe(tokens["vllm:request_max_num_generation_tokens"], key, done.longest)
        self._observe(tokens["vllm:request_params_max_tokens"], key, done.max_tokens)
        self._observe(self._params_n, key, done.n)
        self._observe(seconds["vllm:e2e_request_latency_seconds"], key, done.last - done.arrival)
        self._observe(seconds["vllm:request_queue_time_seconds"], key, max(0.0, done.scheduled - done.arrival))
        self._observe(seconds["vllm:request_inference_time_seconds"], key, max(0.0, done.last - done.scheduled))
        self._observe(seconds["vllm:request_prefill_time_seconds"], key, max(0.0, done.first - done.scheduled))
        self._observe(seconds["vllm:request_decode_time_seconds"], key, done.last - done.first)
        if done.longest > 1:
            mean = (done.last - done.first) / (done.longest - 1)
            self._observe(seconds["vllm:request_time_per_output_token_seconds"], key, mean)

    def rejected(self, reason: str) -> None:
        """A request was refused at the door; `reason` is one of REJECTIONS."""
        self._add(self._rejected, (self.model_name, reason), 1)

    def iterations(self, engine: int, tokens: Sequence[int]) -> None:
        for count in tokens:
            self._observe(self._iteration, self.labels(engine), count)

    def http_request(self, method: str, handler: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "OTHER"
        handler = handler if handler in self._handlers else "none"
        status_class = f"{min(max(status // 100, 2), 5)}xx"
        self._add(self._http, (status_class, method, handler), 1)
        self._observe(self._http_duration, (method, handler), seconds)

    def change_in_flight(self, change: int) -> None:
        self._own[self._in_flight] += change

    def own_in_flight(self) -> int:
        """Requests in flight at this API server."""
        return int(self._own[self._in_flight])

    def in_flight(self) -> int:
        """Requests in flight at all API servers of the pod."""
        return int(sum(view[self._in_flight] for view in self.slots.all()))

    def say_ready(self) -> None:
        """This API server takes requests."""
        self._own[self._ready] = 1.0

    def all_ready(self) -> bool:
        """Every API server of the pod has said so: a connection may reach any of them."""
        return sum(view[self._ready] for view in self.slots.all()) == self._num_servers

    # Exposition

    @cached_property
    def _exposition(self) -> "Exposition":
        # prometheus_client takes a tenth of a second to import: not before somebody asks.
        from kvern_engine.exposition import Exposition

        return Exposition(self, self._view)

    def render(self, names: Sequence[str] = (), accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; `names` filters by sample name, as prometheus_client's `name[]` does."""
        return self._exposition.render(names, accept)
