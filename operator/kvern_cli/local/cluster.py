"""The local cluster: applied objects, their configuration as files, and a process for each pod they ask for.

What controllers and kubelets do for one service: StatefulSet and Deployment -> pods, ConfigMap and Secret -> files that
change when the object does. It observes and carries out; what should exist is decided by reconcile.
"""

import asyncio
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvern_cli.local.files import write_atomically
from kvern_cli.local.gpus import GpuPool
from kvern_cli.local.launch import LOOPBACK, Launch, container_of, container_ports, launch
from kvern_cli.local.pod import LocalPod, Timing, Unschedulable
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.desired import meta
from kvern_operator.desired.cache import is_complete
from kvern_operator.observed import Object, Observed

Key = tuple[str, str]


@dataclass(frozen=True)
class Machine:
    """What this machine offers. `claims`: claim name -> folder. `commands`: program -> argv, instead of PATH."""

    gpus: tuple[int, ...] = ()
    claims: Mapping[str, Path] = field(default_factory=dict)
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)


def free_port(taken: set[int]) -> int:
    """A loopback port that nobody listens on and that was not handed out before."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            taken.add(port)
            return port


class LocalCluster:
    """One service's objects and pods. `changed` is set after each change that reconcile should look at."""

    def __init__(self, folder: Path, port: int, machine: Machine) -> None:
        self.folder, self.port, self.machine = folder, port, machine
        self.changed = asyncio.Event()
        self.objects: dict[Key, Object] = {}
        self.pods: dict[str, LocalPod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gpus = GpuPool(machine.gpus)
        self._ports: set[int] = {port}
        # trust_env: a proxy of the environment must not see loopback traffic.
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=32))

    # ------------------------------------------------------------ objects

    def apply(self, obj: Object) -> None:
        """Create or replace an object, and write what it holds to files."""
        self.objects[meta.key(obj)] = obj
        for name, text in _entries(obj).items():
            path = self._volume(obj["kind"], obj["metadata"]["name"]) / name
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)

    def delete(self, key: Key) -> None:
        """Remove an object; its pods are stopped by the next `sync`."""
        obj = self.objects.pop(key, None)
        if obj is not None:
            for name in _entries(obj):
                (self._volume(*key) / name).unlink(missing_ok=True)
            with suppress(OSError):
                self._volume(*key).rmdir()

    def _volume(self, kind: str, name: str) -> Path:
        return self.folder / "volumes" / f"{kind.lower()}-{name}"

    def observe(self, status: InferenceServiceStatus | None, gpus_per_replica: int) -> Observed:
        """Everything that exists now. Where the machine has no GPU none is handed out, so room is not known."""
        spare = self._gpus.free // gpus_per_replica if gpus_per_replica and self.machine.gpus else None
        pods = tuple(pod.observed() for pod in self.pods.values())
        return Observed(tuple(self.objects.values()), pods, status, spare)

    # ------------------------------------------------------------ pods

    def sync(self) -> None:
        """Start the pods that objects ask for, stop those that none asks for."""
        wanted: dict[str, tuple[Object, str]] = {}
        for (kind, name), obj in self.objects.items():
            if kind in ("StatefulSet", "Deployment"):
                for i in range(obj["spec"]["replicas"]):
                    wanted[f"{name}-{i}"] = (obj, meta.ENGINE if kind == "StatefulSet" else meta.ROUTER)
            elif kind == "Job" and not is_complete(obj):
                wanted[f"{name}-0"] = (obj, meta.FETCH)
        for name, pod in list(self.pods.items()):
            if pod.succeeded:
                if ("Job", pod.owner) not in self.objects:
                    del self.pods[name]
            elif name not in wanted or wanted[name][0]["spec"]["template"] != pod.template:
                pod.stop()
        for name, (obj, component) in wanted.items():
            if name not in self.pods:  # one that still stops keeps its name until it is gone
                self._start(name, obj, component)

    def _start(self, name: str, obj: Object, component: str) -> None:
        template, held = obj["spec"]["template"], _Held()

        def make_launch() -> tuple[Launch, dict[str, int]]:
            self._give_back(held)
            return self._make_launch(template, component, held)

        pod = LocalPod(
            name=name,
            uid=str(uuid.uuid4()),
            owner=obj["metadata"]["name"],
            component=component,
            template=template,
            make_launch=make_launch,
            release=lambda: self._give_back(held),
            log=self.folder / "logs" / f"{name}.log",
            token=self._admin_token,
            client=self._client,
            changed=self.changed.set,
            timing=self.machine.timing,
        )
        pod.log.unlink(missing_ok=True)
        self.pods[name] = pod
        self._tasks[name] = asyncio.create_task(self._life(pod), name=name)

    async def _life(self, pod: LocalPod) -> None:
        try:
            await pod.run()
            job = self.objects.get(("Job", pod.owner))
            if pod.succeeded and job is not None:
                self.objects["Job", pod.owner] = {**job, "status": {"succeeded": 1}}
        finally:
            if not pod.succeeded:  # one that has done its work stays, to be looked at, as long as its Job does
                self.pods.pop(pod.name, None)
            self._tasks.pop(pod.name, None)
            self.changed.set()

    def _make_launch(self, template: Object, component: str, held: "_Held") -> tuple[Launch, dict[str, int]]:
        container = container_of(template)
        wanted = int(container.get("resources", {}).get("limits", {}).get(meta.GPU, 0))
        gpus: tuple[int, ...] | None = ()
        if wanted and self.machine.gpus:
            gpus = self._gpus.take(wanted)
            if gpus is None:
                text = f"0/1 nodes are available: {wanted} nvidia.com/gpu wanted, {self._gpus.free} free"
                raise Unschedulable(f"{text} of {len(self.machine.gpus)}")
            held.gpus = gpus
        ports = {}
        for name in container_ports(container):
            public = component == meta.ROUTER and name == "http"
            ports[name] = self.port if public else free_port(self._ports)
            if not public:
                held.ports.add(ports[name])
        maps = {n: o.get("data", {}) for (k, n), o in self.objects.items() if k == "ConfigMap"}
        return launch(template, ports, self._folders(template), maps, self.machine.commands, gpus), ports

    def _folders(self, template: Object) -> dict[str, Path]:
        folders = {}
        for volume in template["spec"].get("volumes", ()):
            if "configMap" in volume:
                folders[volume["name"]] = self._volume("ConfigMap", volume["configMap"]["name"])
            elif "secret" in volume:
                folders[volume["name"]] = self._volume("Secret", volume["secret"]["secretName"])
            elif "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                if claim in self.machine.claims:
                    folders[volume["name"]] = self.machine.claims[claim]
        return folders

    def _give_back(self, held: "_Held") -> None:
        self._gpus.give_back(held.gpus)
        self._ports -= held.ports
        held.gpus, held.ports = (), set()

    def _admin_token(self) -> str:
        for (kind, name), obj in self.objects.items():
            if kind == "Secret" and name.rpartition("-")[0].endswith("-admin"):
                return str(obj["stringData"]["token"])
        return ""

    # ------------------------------------------------------------ the end

    async def stop(self, kill_now: asyncio.Event, waiting: Callable[[list[LocalPod]], None]) -> None:
        """Stop every pod, router and engines at once (each drains by itself); kill them when `kill_now` is set."""
        for pod in self.pods.values():
            pod.stop()
        killer = asyncio.create_task(self._kill_when(kill_now))
        while self._tasks:
            waiting(list(self.pods.values()))
            await asyncio.wait(list(self._tasks.values()), timeout=0.5)
        killer.cancel()
        await self._client.aclose()

    async def _kill_when(self, kill_now: asyncio.Event) -> None:
        await kill_now.wait()
        for pod in self.pods.values():
            pod.kill()


@dataclass
class _Held:
    """What a pod's present run has of the machine."""

    gpus: tuple[int, ...] = ()
    ports: set[int] = field(default_factory=set)


def _entries(obj: Object) -> dict[str, str]:
    """File name -> text, of the kinds that are mounted."""
    if obj["kind"] == "ConfigMap":
        return dict(obj.get("data", {}))
    if obj["kind"] == "Secret":
        return dict(obj.get("stringData", {}))
    return {}
