"""The router's own series, all there from the first scrape.

Counters are counted where things end; gauges are read from the truth at each scrape, so that they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

USUAL_STATUSES = (200, 400, 401, 404, 413, 429, 499, 500, 502, 503)
ADDED_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Loads(Protocol):
    """Where the gauges come from (fleet.py)."""

    def inflight(self) -> Sequence[tuple[str, int]]: ...
    def held(self) -> tuple[int, int]: ...


class _Gauges(Collector):
    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        requests, tokens = self._loads.held()
        yield GaugeMetricFamily("kvern_router_held_requests", "Requests held until a replica is ready", requests)
        yield GaugeMetricFamily(
            "kvern_router_held_input_tokens", "Input tokens of held requests, estimated as bytes / 4", tokens
        )
        family = GaugeMetricFamily(
            "kvern_router_replica_inflight", "Requests sent to a replica and not yet finished", labels=["replica"]
        )
        for name, count in self._loads.inflight():
            family.add_metric([name], count)
        yield family


class RouterMetrics:
    """One registry a router (so that a process can hold several in tests)."""

    def __init__(self, loads: Loads) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            "kvern_router_requests",
            "Requests by final status; 499: the client went away, 502 also: a stream whose replica was lost under it",
            ["status"],
            registry=self._registry,
        )
        self._requests = requests
        self._by_status = {status: requests.labels(str(status)) for status in USUAL_STATUSES}
        self.retries = Counter(
            "kvern_router_retries",
            "Attempts after the first, none of them after a byte went out",
            registry=self._registry,
        )
        limited = Counter(
            "kvern_router_limited",
            "Requests refused with 429 because their tenant had used up its requests or tokens a minute",
            ["limit"],
            registry=self._registry,
        )
        self.limited = {which: limited.labels(which) for which in ("requests", "tokens")}
        self.added = Histogram(
            "kvern_router_added_seconds",
            "Time the router added: from the request's last byte to sending it on, and from the answer's first byte to "
            "passing it on, without the time held; of requests that went through at the first attempt",
            buckets=ADDED_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Gauges(loads))

    def finished(self, status: int) -> None:
        """Count a request; once, however it ended."""
        child = self._by_status.get(status)
        if child is None:
            child = self._by_status[status] = self._requests.labels(str(status))
        child.inc()

    def exposition(self, query: bytes) -> bytes:
        """The text of /metrics; `name[]=` in the query filters, as prometheus-client's own server does."""
        names = parse_qs(query.decode("latin-1")).get("name[]")
        if names:
            return generate_latest(self._registry.restricted_registry(names))
        return generate_latest(self._registry)
