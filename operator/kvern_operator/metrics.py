"""The operator's own series, on the health port. A registry an operator: a process can hold several in tests."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern_operator.autoscale.loop import Figures
from kvern_operator.queue import Key

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RESULTS = ("ok", "refused", "conflict", "api_error", "namespace_ending", "not_leading", "error")
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class _Gauges(Collector):
    """Read from the truth at each scrape, so that they cannot drift from it."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        self._gauges = gauges

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, read())


class _Services(Collector):
    """What the autoscaler wants and sees, by service."""

    def __init__(self, figures: Callable[[], Mapping[Key, Figures]]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        texts = {
            "desired": "Replicas that are wanted",
            "ready": "Replicas that answer",
            "demand": "Tokens of KV cache that the load takes",
            "capacity": "Tokens of KV cache at which the ready replicas count as full",
        }
        figures = self._figures()
        for name, text in texts.items():
            family = GaugeMetricFamily(f"kvern_operator_autoscale_{name}", text, labels=["namespace", "name"])
            for key, found in figures.items():
                value = getattr(found, name)
                if value is not None:
                    family.add_metric(list(key), value)
            yield family


class Metrics:
    """Counters are counted where things end. `gauge` adds one that is read at each scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._registry.register(_Gauges(self._gauges))
        self._reconciles = Counter(
            "kvern_operator_reconciles", "Passes over a service by how they ended", ["result"], registry=self._registry
        )
        for result in RESULTS:
            self._reconciles.labels(result)
        self._seconds = Histogram(
            "kvern_operator_reconcile_seconds", "Duration of a pass", buckets=BUCKETS, registry=self._registry
        )
        self._writes = Counter(
            "kvern_operator_api_writes",
            "Writes to the API server, without the Lease",
            ["verb", "resource"],
            registry=self._registry,
        )

        self._decisions = Counter(
            "kvern_operator_autoscale_decisions",
            "Decisions about replicas, one a service and cycle, by kind and by the term or limit that decided",
            ["kind", "cause"],
            registry=self._registry,
        )
        self._answers = Counter(
            "kvern_operator_autoscale_scrapes", "Pods whose metrics were read", ["result"], registry=self._registry
        )
        for result in ("ok", "failed"):
            self._answers.labels(result)
        self._round = Histogram(
            "kvern_operator_autoscale_scrape_seconds",
            "Duration of asking all pods once",
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._ready_after = Histogram(
            "kvern_operator_autoscale_ready_seconds",
            "From the decision for another replica to the moment that it answered",
            buckets=(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600),
            registry=self._registry,
        )

    def show(self, figures: Callable[[], Mapping[Key, Figures]]) -> None:
        """The autoscaler's gauges, a series a service."""
        self._registry.register(_Services(figures))

    def decided(self, kind: str, cause: str) -> None:
        """A decision about one service's replicas."""
        self._decisions.labels(kind, cause).inc()

    def scraped(self, answers: int, failures: int, seconds: float) -> None:
        """All pods have been asked once."""
        self._answers.labels("ok").inc(answers)
        self._answers.labels("failed").inc(failures)
        self._round.observe(seconds)

    def became_ready(self, seconds: float) -> None:
        """A replica answers that was decided for so long ago."""
        self._ready_after.observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that `read` gives at each scrape."""
        self._gauges[name] = (text, read)

    def reconciled(self, result: str, seconds: float) -> None:
        """A pass has ended."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def wrote(self, method: str, path: str) -> None:
        """A write has succeeded. `path` as of an object or a collection of a namespace."""
        parts = path.strip("/").split("/")
        # /apis/GROUP/VERSION/namespaces/NS/RESOURCE[/NAME[/SUBRESOURCE]]; the core group has one part less.
        rest = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else parts[-1:]
        resource = rest[0] + (f"/{rest[2]}" if len(rest) > 2 else "")
        self._writes.labels(method.lower(), resource).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
