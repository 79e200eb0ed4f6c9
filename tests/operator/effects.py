"""A controller over the API server of fake_apiserver.py without kopf: `pump` is what the watches would do."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_apiserver import FakeApi
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.admin import Pace, Prober
from kvern_operator.api.types import KIND
from kvern_operator.apply import Executor
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.controller import FIRST_ANSWERS, Controller
from kvern_operator.desired import meta
from kvern_operator.events import Poster
from kvern_operator.kube import PLURALS, KubeClient
from kvern_operator.metrics import Metrics
from kvern_operator.mirror import Mirror
from kvern_operator.nodes import NodeReader
from kvern_operator.notices import NoticeReader
from kvern_operator.settings import Settings

KEY = ("team-a", "smol")
SERVICE_PATH = "/apis/kvern.dev/v1alpha1/namespaces/team-a/inferenceservices/smol"
UNWATCHED = ("Secret", "Event", "Lease")
SETTINGS = Settings(operator_key=b"k" * 32, namespace="kvern-system")


def path(kind: str, name: str, namespace: str = "team-a") -> str:
    version = {"Pod": "v1"}.get(kind) or meta.API_VERSIONS[kind]
    plural = {"Pod": "pods"}.get(kind) or PLURALS[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural}/{name}"


@dataclass
class Bench:
    """`work` is one pass as the queue makes it. Nothing is seen by the controller before `pump`."""

    api: FakeApi
    settings: Settings = SETTINGS
    autoscaler: Autoscaler | None = None
    changed: list = field(default_factory=list)
    forgotten: list = field(default_factory=list)
    _seen: dict = field(default_factory=dict)  # UID -> kind

    def __post_init__(self) -> None:
        self.client = KubeClient(Configuration(host=self.api.url))
        self.metrics = Metrics()
        self.client.wrote = self.metrics.wrote
        self.mirror = Mirror()
        self.prober = Prober(self.changed.append, Pace(0.05, 0.02, 0.02, 0.05, 0.5, 2))
        self.notices = NoticeReader(self.client, self.changed.append)
        self.executor = Executor(self.client, self.mirror, self.prober)
        self.controller = Controller(
            self.mirror,
            self.executor,
            self.prober,
            self.notices,
            NodeReader(self.client),
            Poster(self.client, "test"),
            self.settings,
            self.metrics,
            self.forgotten.append,
            self.autoscaler,
        )

    async def close(self) -> None:
        await self.prober.close()
        await self.client.close()

    def create(self, spec: dict | None = None, generation: int = 1, **metadata) -> dict:
        """kubectl apply: a service with the spec, its status kept."""
        old = self.api.objects.get(SERVICE_PATH, {})
        uid = metadata.pop("uid", old.get("metadata", {}).get("uid", "uid-1"))
        body = {
            "apiVersion": "kvern.dev/v1alpha1",
            "kind": KIND,
            "metadata": {"name": "smol", "namespace": "team-a", "uid": uid, "generation": generation, **metadata},
            "spec": {"model": {"uri": "builtin://smollm2-135m"}, "resources": {"gpusPerPod": 0}, **(spec or {})},
        }
        if "status" in old and uid == old["metadata"]["uid"]:
            body["status"] = old["status"]
        stored = self.api.put(SERVICE_PATH, body)
        self.pump()
        return stored

    def pump(self) -> None:
        """The watches catch up."""
        there = {obj["metadata"]["uid"]: obj for obj in self.api.objects.values() if obj["kind"] not in UNWATCHED}
        for uid in self._seen.keys() - there.keys():
            self.mirror.remove(self._seen[uid], uid)
        for obj in there.values():
            self.mirror.put(obj["kind"], obj)
        self._seen = {uid: obj["kind"] for uid, obj in there.items()}

    async def work(self) -> float | None:
        """A pass that is not the one that only asks pods for the first time."""
        while (again := await self.controller.work(KEY)) == FIRST_ANSWERS:  # noqa: ASYNC110 - as the queue does
            await asyncio.sleep(0.01)
        return again

    async def settle(self, passes: int = 6) -> None:
        """Passes with the indexes up to date until one writes nothing."""
        for _ in range(passes):
            self.pump()
            before = len(self.api.writes())
            await self.work()
            if len(self.api.writes()) == before:
                return
        raise AssertionError(f"still writing: {self.api.writes()[-10:]}")

    @property
    def status(self) -> dict:
        return self.api.objects[SERVICE_PATH]["status"]

    def condition(self, type_: str) -> tuple[str, str]:
        found = next(c for c in self.status["conditions"] if c["type"] == type_)
        return found["status"], found["reason"]

    def message(self, type_: str) -> str:
        return next(c["message"] for c in self.status["conditions"] if c["type"] == type_)

    def events(self) -> list[tuple[str, str]]:
        found = [o for o in self.api.objects.values() if o["kind"] == "Event" and "regarding" in o]
        return [(e["type"], e["reason"]) for e in sorted(found, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    # ------------------------------------------------------------ what controllers and kubelets do

    def run_pod(self, name: str, *, address: str = "", ready: bool = True, **status) -> dict:
        """A pod of a StatefulSet NAME-0 or of the router, as a kubelet reports it."""
        owner = self.api.objects.get(path("StatefulSet", name.removesuffix("-0")))
        router = owner is None
        owner = owner or self.api.objects[path("Deployment", "smol-router")]
        container = "router" if router else "engine"
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "team-a",
                "labels": owner["spec"]["template"]["metadata"]["labels"],
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True, "kind": owner["kind"]}],
            },
            "spec": {"nodeName": "node", "containers": owner["spec"]["template"]["spec"]["containers"]},
            "status": {
                "phase": "Running",
                "podIP": address or "127.86.0.1",  # where nobody listens
                "conditions": [
                    {"type": "PodScheduled", "status": "True"},
                    {"type": "Ready", "status": "True" if ready else "False"},
                ],
                "containerStatuses": [
                    {"name": container, "started": ready, "ready": ready, "restartCount": 0, "state": state}
                ],
                **status,
            },
        }
        stored = self.api.put(path("Pod", name), body)
        self.pump()
        return stored


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that happens beside the test."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)
