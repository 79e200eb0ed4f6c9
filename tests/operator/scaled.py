"""A service that is scaled by the operator, in compressed time: the real autoscaler, controller and status over the API
server of fake_apiserver.py; a load, engines and a kubelet that are played. `step` is five seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Any

from effects import KEY, SERVICE_PATH, SETTINGS, Bench, path
from fake_apiserver import FakeApi

from kvern_operator.admin import Report
from kvern_operator.autoscale.budgets import BudgetReader
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.scrape import Round, Target
from kvern_operator.autoscale.signals import Scrape
from kvern_operator.autoscale.terms import Step
from kvern_operator.desired.layout import parse_layout
from kvern_operator.kube import ApiError
from kvern_operator.metrics import Metrics
from kvern_operator.relayout import SaidLayout
from kvern_operator.settings import Settings

BASE = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
TOKENS = 10_000.0  # of KV cache of a replica
SCALED = Settings(operator_key=SETTINGS.operator_key, namespace=SETTINGS.namespace, autoscales=True)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(BASE + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Scaled:
    """`demand` tokens and `waiting` requests are spread over the ready engines; `held` wait at the router. A pod is
    ready `start` seconds after it was made. `silent` pods give no metrics."""

    api: FakeApi
    now: float = 1000.0
    demand: float = 0.0
    waiting: float = 0.0
    held: float = 0.0
    start: float = 20.0
    silent: set[str] = field(default_factory=set)
    nodes: int = 1000  # replicas that find a node
    failing: bool = False  # passes fail, and are to
    kv: tuple[tuple[int, int], ...] = ()  # sizes that pods say they can have, and tokens; (): they say nothing
    refusing: dict[str, str] = field(default_factory=dict)  # pods whose switches fail, and why
    most_told: int = 1000  # after so many the operator dies before it tells another one
    told: list[tuple[str, int]] = field(default_factory=list)  # switches, in order
    sizes: dict[str, int] = field(default_factory=dict)  # of pods, by UID
    lost: dict[str, tuple[int, str]] = field(default_factory=dict)  # UID -> the last switch, taken back
    asked: list[str] = field(default_factory=list)
    _born: dict[str, float] = field(default_factory=dict)
    _counted: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """An operator begins to lead: nothing is known to it but what the cluster says."""
        self.changed: list = []
        self.metrics = Metrics()
        self.bench = Bench(self.api, SCALED)
        self.autoscaler = Autoscaler(
            self.scrape,
            BudgetReader(self.bench.client, clock=lambda: self.now),
            self.metrics,
            self.changed.append,
            clock=lambda: self.now,
            wall=lambda: BASE + self.now,
        )
        self.bench.controller._autoscaler = self.autoscaler
        self.metrics.show(self.autoscaler.figures)
        if self.kv:
            prober: Any = self.bench.prober
            prober.reports, prober.switch = self._reports, self._switch

    async def close(self) -> None:
        await self.bench.close()

    # ------------------------------------------------------------ what is played

    async def scrape(self, targets: Iterable[Target]) -> Round:
        engines, routers, failures = {}, {}, {}
        targets = list(targets)
        self.asked = [t.name for t in targets]
        answering = max(sum(not t.routing for t in targets), 1)
        for target in targets:
            if target.name in self.silent:
                failures[target.uid] = "no answer in time"
            elif target.routing:
                routers[target.uid] = (self.now, self.held, 0.0)
            else:
                used, wait = min(self.demand / answering, TOKENS), self.waiting / answering
                done = self._counted[target.uid] = self._counted.get(target.uid, 0.0) + (10.0 if used else 0.0)
                engines[target.uid] = Scrape(
                    target.uid, self.now, TOKENS, used, used / 100, wait, finished=done, input_tokens=done * 50,
                    output_tokens=done * 100, step_tokens=done * 150, step=Step(1024, 8192, 1),
                    outputs=((500.0, done), (inf, done)), inputs=((100.0, done), (inf, done)),
                    itl=((0.01, done * 99), (inf, done * 99)), itl_seconds=done, itl_count=done * 99,
                )  # fmt: skip
        return Round(engines, routers, failures)

    def play(self) -> None:
        """Pods for StatefulSets, none without, ready in time; one router."""
        sets, pods = self.api.of("statefulsets"), self.api.of("pods")
        for name in pods:
            if not name.startswith("smol-router") and name.removesuffix("-0") not in sets:
                self.api.remove(path("Pod", name))
        for placed, name in enumerate(sorted(sets)):
            born = self._born.setdefault(sets[name]["metadata"]["uid"], self.now)
            fits = placed < self.nodes
            ready = fits and self.now - born >= self.start
            self._pod(f"{name}-0", born, ready, fits)
        if "smol-router" in self.api.of("deployments"):
            self._pod("smol-router-0", 0.0, True, True)
        self.bench.pump()

    def _pod(self, name: str, born: float, ready: bool, fits: bool) -> None:
        old = self.api.objects.get(path("Pod", name))
        state = "ready" if ready else "loading" if fits else "waiting"
        if old is not None and old["metadata"]["annotations"]["played"] == state:
            return
        number = len(self._born) + len(self.api.of("pods"))
        body = self.bench.run_pod(name, address=f"127.87.0.{number % 250 + 1}", ready=ready)
        ready_at = stamp(born + self.start)
        conditions = [
            {"type": "PodScheduled", "status": "True" if fits else "False", "reason": "" if fits else "Unschedulable",
             "message": "" if fits else "0/1 nodes are available", "lastTransitionTime": stamp(born)},
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": ready_at},
        ]  # fmt: skip
        (container,) = body["status"]["containerStatuses"]
        container = {**container, "state": {"running": {"startedAt": stamp(born)}}}
        status = {**body["status"], "conditions": conditions, "containerStatuses": [container]}
        if not fits:
            status = {"phase": "Pending", "conditions": conditions}
        metadata = {**body["metadata"], "creationTimestamp": stamp(born), "annotations": {"played": state}}
        self.api.put(path("Pod", name), {**body, "metadata": metadata, "status": status})

    def _engines(self) -> dict[str, str]:
        """UID -> name."""
        pods = self.api.of("pods")
        return {p["metadata"]["uid"]: name for name, p in pods.items() if not name.startswith("smol-router")}

    def _reports(self, key: object) -> dict[str, Report]:
        """What pods say on their admin port."""
        found = {}
        for uid, name in self._engines().items():
            made = self.api.objects.get(path("StatefulSet", name.removesuffix("-0")))
            if made is None:
                continue  # its pod goes as well
            booted = parse_layout(made["metadata"]["annotations"]["kvern.dev/layout"]).tensor
            size = self.sizes.setdefault(uid, booted)
            said = SaidLayout(size, size, 0, "Stable", self.kv, self.lost.get(uid))
            found[uid] = Report(in_flight=0, feasible=self.kv, layout=said)
        return found

    async def _switch(self, key: object, uid: str, size: int) -> None:
        name = self._engines()[uid]
        if len(self.told) >= self.most_told:
            return
        self.told.append((name, size))
        if name in self.refusing and size != 1:
            self.lost[uid] = (size, self.refusing[name])
        else:
            self.sizes[uid] = size

    # ------------------------------------------------------------ time

    async def step(self, steps: int = 1) -> None:
        """Five seconds: pods, a cycle, and the passes that it has made."""
        for _ in range(steps):
            self.now += 5.0
            self.play()
            try:
                await self.bench.settle(8)
                self.changed.clear()
                await self.autoscaler.cycle()
                if self.changed:
                    await self.bench.settle(8)
            except ApiError:
                assert self.failing

    async def create(self, **spec: object) -> None:
        """The service, settled, with its first replicas ready."""
        base = {"rollout": {"drainTimeoutSeconds": 0}, "router": {"replicas": 1}}
        self.bench.create({**base, **spec})
        await self.step(int(self.start // 5) + 3)

    @property
    def scaling(self) -> dict:
        return self.bench.status["autoscaling"]

    @property
    def desired(self) -> int:
        return self.bench.status["desiredReplicas"]

    @property
    def replicas(self) -> list[str]:
        return sorted(self.api.of("statefulsets"))

    def events(self) -> list[tuple[str, str]]:
        found = [o for o in self.api.objects.values() if o["kind"] == "Event" and "regarding" in o]
        found.sort(key=lambda e: int(e["metadata"]["resourceVersion"]))
        return [(e["reason"], e["note"]) for e in found]


__all__ = ["KEY", "SERVICE_PATH", "TOKENS", "Scaled", "path", "stamp"]
