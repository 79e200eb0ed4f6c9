"""A cluster in which everything takes its time, as a value: pods wait for GPUs, load, drain, end late, are evicted; the
operator is killed between two writes. For tests of rollouts; fake_cluster.py is the one where all happens at once.
"""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from fake_cluster import SETTINGS, START, as_stored

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.observed import Observed, Pod
from kvern_operator.reconcile import Plan, reconcile
from kvern_operator.replicas import LOST_AFTER
from kvern_operator.settings import Settings

BAD = "13"  # maxModelLen of a revision whose pods never become ready


@dataclass
class SlowCluster:
    """`gpus` places, one a pod. `sees_nodes`: the operator is told how many are free; else it sees pods that find none.
    `work` is a pass of the operator, all else is what controllers, kubelets and users do, a step at a time."""

    gpus: int = 4
    sees_nodes: bool = True
    now: datetime = START
    settings: Settings = SETTINGS
    objects: dict[tuple[str, str], dict] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)  # pods that hold a GPU
    status: object = None
    versions: dict[tuple[str, str], int] = field(default_factory=dict)
    _count: int = 0

    # ------------------------------------------------------------ the operator

    @property
    def free(self) -> int:
        return self.gpus - len(self.placed)

    def observed(self) -> Observed:
        stuck = any(p.reason == "Unschedulable" for p in self.pods.values())
        waiting = sum(p.component == meta.ENGINE for p in self.pods.values()) - len(self.placed)
        to_come = sum(f"{name}-0" not in self.pods for name in self.replicas)
        spare = max(self.free - waiting - to_come, 0) if self.sees_nodes else 0 if stuck else None
        return Observed(tuple(self.objects.values()), tuple(self.pods.values()), self.status, spare)

    def plan(self, svc: InferenceService) -> Plan:
        return reconcile(svc, self.observed(), self.now, self.settings)

    def work(self, svc: InferenceService, writes: int | None = None) -> Plan:
        """A pass, of which the first so many writes happen before the operator is killed."""
        plan = self.plan(svc)
        self.carry_out(plan, writes)
        return plan

    def carry_out(self, plan: Plan, writes: int | None = None) -> None:
        steps = [(self._apply, obj) for obj in plan.apply]
        steps += [(self._tell, (name, False)) for name in plan.resume] + [(self._tell, (n, True)) for n in plan.drain]
        steps += [(self._delete, key) for key in plan.delete] + [(self._write, plan.status)]
        for step, argument in steps[:writes]:
            step(argument)

    def carry_out_stale(self, plan: Plan, seen: dict[tuple[str, str], int]) -> None:
        """As another leader does that saw `seen` (versions): of what has changed since it loses the race."""
        for obj in plan.apply:
            key = meta.key(obj)
            if key[0] in ("StatefulSet", "ConfigMap") and self.versions.get(key) != seen.get(key):
                return
            self._apply(obj)
        for key in plan.delete:
            if key[0] == "StatefulSet" and self.versions.get(key) != seen.get(key):
                return
            self._delete(key)

    def _apply(self, obj: dict) -> None:
        key, old = meta.key(obj), self.objects.get(meta.key(obj))
        self._count += 1
        self.objects[key], self.versions[key] = as_stored(obj), self._count
        if old is not None and key[0] == "StatefulSet":
            assert old["spec"] == self.objects[key]["spec"], "a running replica was rewritten"

    def _tell(self, what: tuple[str, bool]) -> None:
        name, draining = what
        if name in self.pods and not self.pods[name].terminating:
            self.change(name, draining=draining, ready=not draining)

    def _delete(self, key: tuple[str, str]) -> None:
        if key in self.objects:
            del self.objects[key], self.versions[key]

    def _write(self, status: object) -> None:
        self.status = status

    # ------------------------------------------------------------ the world

    def change(self, name: str, **values: object) -> None:
        self.pods[name] = replace(self.pods[name], **values)

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def controllers(self) -> None:
        """StatefulSets make pods whose name is free, pods without one are told to end, nodes are found."""
        sets = {name: obj for (kind, name), obj in self.objects.items() if kind == "StatefulSet"}
        for name, pod in self.pods.items():
            if pod.component == meta.ENGINE and pod.owner not in sets:
                self.end(name)
        for name in sets:
            self._make(f"{name}-0", name, meta.ENGINE)
        for kind, name in list(self.objects):
            if kind == "Deployment":
                self._make(f"{name}-0", name, meta.ROUTER)
                self.change(f"{name}-0", running=True, ready=True, served=True, address="10.0.0.9:8000")
        for name in sorted(self.pods):
            pod = self.pods[name]
            if pod.component == meta.ENGINE and name not in self.placed and not pod.terminating:
                if self.free:
                    self.placed.add(name)
                    self.change(name, stage="creating", reason="")
                else:
                    self.change(name, stage="scheduling", reason="Unschedulable")

    def _make(self, name: str, owner: str, component: str) -> None:
        if name not in self.pods:
            self._count += 1
            stage = "scheduling" if component == meta.ENGINE else ""
            workload = self.objects["StatefulSet" if component == meta.ENGINE else "Deployment", owner]
            made = Pod(name, f"uid-{self._count}", owner, component, created=self.now, stage=stage)
            self.pods[name] = replace(made, revision=workload["metadata"]["labels"][meta.REVISION_LABEL])

    def load(self, name: str) -> None:
        """A pod that has a GPU becomes ready, unless it is of the bad revision."""
        pod = self.pods[name]
        if name not in self.placed or pod.terminating or pod.served:
            return
        workload = self.objects.get(("StatefulSet", pod.owner))
        if workload is None:
            return
        arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"]
        if BAD in arguments:
            self.change(name, stage="", reason="CrashLoopBackOff", exit_code=1, restarts=pod.restarts + 1)
        else:
            where = {"address": "10.0.0.1:8000", "admin_address": "10.0.0.1:8001"}
            self.change(name, stage="", running=True, ready=True, served=True, in_flight=0, **where)

    def crash(self, name: str) -> None:
        """The container ends; its kubelet starts it again, and it has to load."""
        if self.pods[name].served and not self.pods[name].terminating:
            down = {"ready": False, "running": False, "served": False, "draining": False, "in_flight": None}
            self.change(name, stage="creating", restarts=self.pods[name].restarts + 1, **down)

    def end(self, name: str) -> None:
        """A pod is told to end: deleted, evicted, or its StatefulSet is gone."""
        pod = self.pods[name]
        if not pod.terminating:
            self.change(name, terminating=True, ready=False, ends=self.now + timedelta(seconds=330))

    def gone(self, name: str) -> None:
        """A pod that ends has ended."""
        if self.pods[name].terminating:
            del self.pods[name]
            self.placed.discard(name)

    # ------------------------------------------------------------ looking

    @property
    def replicas(self) -> list[str]:
        return sorted(name for kind, name in self.objects if kind == "StatefulSet")

    def leaving(self, name: str) -> bool:
        return bool(meta.annotation(self.objects["StatefulSet", name], meta.DRAINING_SINCE))

    def available(self) -> set[str]:
        """Replicas that answer and that routers send to."""
        return {n for n in self.replicas if not self.leaving(n) and (p := self.pods.get(f"{n}-0")) and p.ready}

    def held(self) -> int:
        """Places that are taken or will be: by replicas, and by pods that outlive theirs, unless they are lost."""
        hoped_for = self.now - LOST_AFTER
        pods = {n: p for n, p in self.pods.items() if n in self.placed and (p.ends is None or p.ends > hoped_for)}
        left_over = {p.owner for p in pods.values() if p.owner not in self.replicas}
        return len(self.replicas) + len(left_over)

    def settle(self, svc: InferenceService, turns: int = 120) -> None:
        """Until nothing is left to do, while pods start, drain and end."""
        for _ in range(turns):
            plan = self.work(svc)
            self.controllers()
            for name, pod in list(self.pods.items()):
                self.load(name)
                if pod.terminating:
                    self.gone(name)
                elif pod.served and pod.in_flight:
                    self.change(name, in_flight=0)
            again = self.plan(svc)
            if plan.empty and again.empty and again.requeue_after is None and again.status == self.status:
                return
            self.tick(3)
        raise AssertionError(f"not settled after {turns} passes: {self.plan(svc)}")
