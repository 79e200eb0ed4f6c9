"""Metrics as Prometheus reads them: sums the slots of all API servers, adds what the engines report, and leaves the
text format, its negotiation and the filter by name to prometheus_client.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from kvern_engine.ipc import EngineStats
from kvern_engine.metrics import ONE_TWO_FIVE, PHASES, STEP_LIMITS, Floats, Metrics, PodView, Series


class Exposition:
    """A prometheus_client collector over the slots of `metrics` and what `view` says at a scrape."""

    def __init__(self, metrics: Metrics, view: Callable[[], PodView]) -> None:
        self._metrics, self._view = metrics, view
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(self)

    def render(self, names: Sequence[str] = (), accept: str = "") -> tuple[bytes, str]:
        """The text and its content type; `names` keeps only these samples."""
        encoder, content_type = choose_encoder(accept)
        registry: Any = self._registry.restricted_registry(names) if names else self._registry
        return encoder(registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at each scrape."""
        metrics, view = self._metrics, self._view()
        slots = metrics.slots.all()
        here = {str(e.engine) for e in view.engines}
        for series in metrics.series:
            sources = slots[:1] if series.replicated else slots
            if series.kind == "counter":
                yield self._collect_counter(series, sources, here)
            else:
                yield self._collect_histogram(series, sources, view.max_model_len, here)
        yield from _engine_families(view, metrics.model_name)
        yield from _pod_families(view, metrics.model_name, metrics.in_flight())

    def _collect_counter(self, series: Series, sources: list[Floats], here: set[str]) -> Metric:
        family = CounterMetricFamily(series.name, series.help, labels=series.labels)
        for labels, slot in series.start.items():
            value = sum(s[slot] for s in sources)
            if value or not (series.sparse or _elsewhere(series, labels, here)) or labels in self._metrics.always_shown:
                family.add_metric(labels, value)
        return family

    def _collect_histogram(
        self, series: Series, sources: list[Floats], max_model_len: int | None, here: set[str]
    ) -> Metric:
        family = HistogramMetricFamily(series.name, series.help, labels=series.labels)
        bounds = series.bounds
        shown = bounds
        if bounds is ONE_TWO_FIVE and max_model_len:
            shown = tuple(b for b in bounds if b <= max_model_len)
        for labels, start in series.start.items():
            counts = [sum(s[start + i] for s in sources) for i in range(len(bounds) + 1)]
            if (series.sparse or _elsewhere(series, labels, here)) and not any(counts):
                continue
            buckets, below = [], 0.0
            for bound, count in zip(bounds, counts, strict=False):
                below += count
                if bound in shown:
                    buckets.append((str(float(bound)), below))
            buckets.append(("+Inf", below + counts[-1]))
            family.add_metric(labels, buckets, sum(s[start + len(bounds) + 1] for s in sources))
        return family


def _elsewhere(series: Series, labels: tuple[str, ...], here: set[str]) -> bool:
    """Of an engine that the present layout does not have."""
    return series.labels[1:2] == ("engine",) and labels[1] not in here


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests waiting to be scheduled.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "KV blocks neither free nor evictable (0..1).", lambda s: s.kv_cache_usage),
    (
        "kvern:gpu_idle_fraction",
        "Share of the latest second of work that the device spent between steps, with none to run (0..1).",
        lambda s: s.device_idle_fraction,
    ),
    ("kvern:kv_waste_ratio", "Share of the slots in used blocks that hold no token (0..1).", lambda s: s.kv_waste),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("vllm:num_preemptions", "Requests preempted.", lambda s: s.preemptions),
    ("kvern:steps", "Steps run.", lambda s: s.steps),
    ("kvern:step_tokens", "Tokens computed by all steps.", lambda s: s.step_tokens),
)


def _reports(view: PodView) -> dict[int, EngineStats]:
    """Of the engines that there are and of those that there were, whose counters must not fall."""
    return {**view.past, **{e.engine: e.stats for e in view.engines}}


def _engine_families(view: PodView, model: str) -> Iterator[Metric]:
    names = ("model_name", "engine")
    engines = [((model, str(e.engine)), e) for e in view.engines]
    for name, help, read in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(name, help, labels=names)
        for key, e in engines:
            gauge.add_metric(key, read(e.stats))
        yield gauge
    counted = [((model, str(engine)), stats) for engine, stats in _reports(view).items()]
    for name, help, read in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(name, help, labels=names)
        for key, stats in counted:
            counter.add_metric(key, read(stats))
        yield counter
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Requests waiting, by reason.", labels=(*names, "reason")
    )
    blocks = GaugeMetricFamily("kvern:blocks", "KV blocks.", labels=(*names, "state"))
    seconds = CounterMetricFamily(
        "kvern:step_seconds", "Seconds spent, by phase of the loop.", labels=(*names, "phase")
    )
    device = CounterMetricFamily(
        "kvern:device_seconds",
        "Seconds of work on the device: busy with steps, or idle between them.",
        labels=(*names, "state"),
    )
    age = GaugeMetricFamily("kvern:heartbeat_age_seconds", "Since the engine's last turn of its loop.", labels=names)
    up = GaugeMetricFamily("kvern:engine_up", "1 where the engine takes requests.", labels=names)
    now = time.monotonic()
    for key, e in engines:
        stats = e.stats
        waiting.add_metric((*key, "capacity"), stats.num_waiting - stats.num_waiting_deferred)
        waiting.add_metric((*key, "deferred"), stats.num_waiting_deferred)
        for state, count in (("total", e.num_blocks), ("free", stats.blocks_free), ("cached", stats.blocks_cached)):
            blocks.add_metric((*key, state), count)
        age.add_metric(key, max(0.0, now - stats.heartbeat) if stats.heartbeat else 0.0)
        up.add_metric(key, 1.0 if e.state == "ready" else 0.0)
    for key, stats in counted:
        for phase in dict.fromkeys((*PHASES, *stats.step_seconds)):
            seconds.add_metric((*key, phase), stats.step_seconds.get(phase, 0.0))
        for state in ("busy", "idle"):
            device.add_metric((*key, state), stats.device_seconds.get(state, 0.0))
    yield from (waiting, blocks, seconds, device, age, up)


def _pod_families(view: PodView, model: str, in_flight: int) -> Iterator[Metric]:
    label = sorted({*view.cache_config, "block_size", "num_gpu_blocks", *STEP_LIMITS})
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The cache's configuration.", labels=("model_name", "engine", *label)
    )
    for e in view.engines:
        config = {**view.cache_config, "block_size": str(e.block_size), "num_gpu_blocks": str(e.num_blocks)}
        config |= {name: e.steps.get(name, "") for name in STEP_LIMITS}  # what an autoscaler reckons with
        if e.num_blocks:
            info.add_metric((model, str(e.engine), *(config[k] for k in label)), 1.0)
    yield info
    lora = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters in use; the value is the time of the report.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    lora.add_metric(("0", "", ""), time.time())
    yield lora
    layout = GaugeMetricFamily("kvern:layout", "Engines, devices a layer, stages.", labels=("model_name", "dimension"))
    for dimension, size in view.layout.items():
        layout.add_metric((model, dimension), size)
    yield layout
    yield from _switch_families(view, model)
    draining = GaugeMetricFamily("kvern:draining", "1 while new requests are refused.", labels=("model_name",))
    draining.add_metric((model,), 1.0 if view.draining else 0.0)
    yield draining
    flight = GaugeMetricFamily("kvern:requests_in_flight", "Requests at all API servers.", labels=("model_name",))
    flight.add_metric((model,), in_flight)
    yield flight
    tasks = GaugeMetricFamily(
        "kvern:asyncio_tasks", "Tasks in the event loop of the API server that answers.", labels=("model_name",)
    )
    tasks.add_metric((model,), _tasks())
    yield tasks


def _switch_families(view: PodView, model: str) -> Iterator[Metric]:
    """Changes of the layout while it serves."""
    said = view.switches
    totals = CounterMetricFamily(
        "kvern:layout_switches", "Changes of the layout, by outcome.", labels=("model_name", "outcome")
    )
    for outcome in ("Switched", "RolledBack"):
        totals.add_metric((model, outcome), said.totals.get(outcome, 0) if said is not None else 0)
    yield totals
    switching = GaugeMetricFamily(
        "kvern:layout_switching", "1 while the layout is being changed.", labels=("model_name",)
    )
    switching.add_metric((model,), 1.0 if said is not None and said.phase != "Stable" else 0.0)
    yield switching
    seconds = GaugeMetricFamily(
        "kvern:layout_switch_seconds", "Of the last change of the layout, by phase.", labels=("model_name", "phase")
    )
    if said is not None and said.last:
        for phase, took in {**said.last[0].seconds, "pause": said.last[0].pause}.items():
            seconds.add_metric((model, phase), took)
    yield seconds


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # read outside of a loop
        return 0
