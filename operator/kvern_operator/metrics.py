"""The operator's own series, on the health port. A registry an operator: a process can hold several in tests."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
