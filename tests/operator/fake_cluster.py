"""A cluster as a value: applies plans and lets pods start, load, finish and fail. For tests of reconcile only."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from kvern_operator.api.load import load_text
from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.observed import Observed, Pod
from kvern_operator.reconcile import Plan, reconcile
from kvern_operator.settings import Settings

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(operator_key=b"test")


@lru_cache(maxsize=512)
def service(spec: str = "", name: str = "smol", generation: int = 1) -> InferenceService:
    """A valid service; `spec` is YAML in flow style that follows the model: "replicas: 2, suspend: true"."""
    text = (
        "apiVersion: kvern.dev/v1alpha1\nkind: InferenceService\n"
        f"metadata: {{name: {name}, namespace: team-a, uid: u-1, generation: {generation}}}\n"
        f"spec: {{model: {{uri: 'builtin://smollm2-135m'}}, {spec}}}\n"
    )
    return load_text(text)


def as_stored(obj: dict, key: str = "") -> dict:
    """An object as the API server gives it back: quantities in canonical form, empty values left out, defaults and its
    own fields added."""
    stored = _canonical(obj)
    metadata = stored["metadata"] | {"uid": f"uid-{obj['metadata']['name']}", "resourceVersion": "7", "generation": 1}
    metadata["managedFields"] = [{"manager": "kvern", "operation": "Apply"}]
    return stored | {"metadata": metadata, "status": {"observedGeneration": 1}}


DEFAULTS = {
    "containers": {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "IfNotPresent"},
    "ports": {"protocol": "TCP"},
    "template": {"metadata": {"creationTimestamp": None}},
    "httpGet": {"scheme": "HTTP"},
    "startupProbe": {"successThreshold": 1},
}
CANONICAL = {"0.5": "500m", "1024Mi": "1Gi", "2000m": "2", 2: "2", 8: "8"}


def _canonical(value: object, key: str = "") -> object:
    if isinstance(value, dict):
        inner = {k: _canonical(v, k) for k, v in value.items() if v not in (None, "", {}, [])}
        quantities = key in ("requests", "limits")
        inner = {k: CANONICAL.get(v, v) if quantities else v for k, v in inner.items()}
        added = {k: v for k, v in DEFAULTS.get(key, {}).items() if k not in inner}
        return inner | added
    if isinstance(value, list):
        return [_canonical(item, key) for item in value]
    return value


@dataclass
class FakeCluster:
    """`step` is one pass of reconcile; `let_pods_start`, `kill` and so on are what the world does between passes."""

    now: datetime = START
    settings: Settings = SETTINGS
    objects: dict[tuple[str, str], dict] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    status: object = None
    spare: int | None = None
    deleted: list[str] = field(default_factory=list)
    told: list[tuple[str, int]] = field(default_factory=list)  # pods that were told a tensor size
    _uid: int = 0

    def observed(self) -> Observed:
        return Observed(tuple(self.objects.values()), tuple(self.pods.values()), self.status, self.spare)

    def plan(self, svc: InferenceService) -> Plan:
        return reconcile(svc, self.observed(), self.now, self.settings)

    def step(self, svc: InferenceService) -> Plan:
        plan = self.plan(svc)
        for obj in plan.apply:
            self.objects[meta.key(obj)] = as_stored(obj)
        for name in plan.drain:
            self.pods[name] = replace(self.pods[name], draining=True, ready=False)
        for name in plan.resume:
            self.pods[name] = replace(self.pods[name], draining=False, ready=True)
        for name, size in plan.switch:
            self.told.append((name, size))
            self.pods[name] = replace(self.pods[name], switching=True)
        for key in plan.delete:
            del self.objects[key]
            self.deleted.append(key[1])
        self.status = plan.status
        self.make_pods()
        return plan

    def make_pods(self) -> None:
        """What the StatefulSet, Deployment and Job controllers do, at once."""
        wanted = {}
        for (kind, name), obj in self.objects.items():
            if kind in ("StatefulSet", "Deployment"):
                component = meta.ENGINE if kind == "StatefulSet" else meta.ROUTER
                for i in range(obj["spec"]["replicas"]):
                    wanted[f"{name}-{i}"] = (name, component, obj["metadata"]["labels"][meta.REVISION_LABEL])
            elif kind == "Job":
                wanted[f"{name}-x"] = (name, meta.FETCH, "")
        self.pods = {name: pod for name, pod in self.pods.items() if name in wanted}
        for name, (owner, component, revision) in wanted.items():
            if name not in self.pods:
                self._uid += 1
                self.pods[name] = Pod(name, f"p-{self._uid}", owner, component, self.now, revision)

    def change(self, name: str, **values: object) -> None:
        self.pods[name] = replace(self.pods[name], **values)

    def let_start(self, *names: str, in_flight: int = 0) -> None:
        """Pods (all by default) become ready."""
        for name in names or tuple(self.pods):
            pod = self.pods[name]
            if not pod.draining and not pod.reason and pod.component != meta.FETCH:
                self.change(
                    name,
                    running=True,
                    ready=True,
                    served=True,
                    address="10.0.0.1:8000",
                    admin_address="10.0.0.1:8001" if pod.component == meta.ENGINE else "",
                    in_flight=in_flight if pod.in_flight is None else pod.in_flight,
                )

    def job(self, **status: object) -> str:
        """The name of the one Job; sets its status."""
        ((key, obj),) = [(key, obj) for key, obj in self.objects.items() if key[0] == "Job"]
        if status:
            self.objects[key] = {**obj, "status": status}
        return key[1]

    def end_jobs(self) -> None:
        """Every Job succeeds."""
        for key, obj in self.objects.items():
            if key[0] == "Job":
                self.objects[key] = {**obj, "status": {"succeeded": 1}}

    def tick(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def settle(self, svc: InferenceService, steps: int = 60) -> int:
        """Passes until nothing is left to do, pods starting and draining at once. Returns how many it took."""
        for i in range(steps):
            plan = self.step(svc)
            self.let_start()
            self.end_jobs()
            for name, pod in list(self.pods.items()):
                if pod.draining:
                    self.change(name, in_flight=0)
            again = self.plan(svc)
            if plan.empty and again.empty and again.requeue_after is None and again.status == self.status:
                return i
            self.tick(3)
        raise AssertionError(f"not settled after {steps} passes: {self.plan(svc)}")

    @property
    def replicas(self) -> list[str]:
        return sorted(name for kind, name in self.objects if kind == "StatefulSet")

    def ready_engines(self) -> int:
        leaving = {n for (k, n), o in self.objects.items() if meta.annotation(o, meta.DRAINING_SINCE)}
        return sum(p.ready for p in self.pods.values() if p.component == meta.ENGINE and p.owner not in leaving)
