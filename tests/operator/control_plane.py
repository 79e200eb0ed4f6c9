"""A real control plane (etcd, kube-apiserver, kube-controller-manager on loopback) with everything else played: a
scheduler and kubelet that run no container, engines that are an admin port each, and the operator as the process that
it is.

The programs are those of e2e/cluster; where they are not there `plane()` says so.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.kube import ApiError, KubeClient, path_of

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "kvern.dev_inferenceservices.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MERGE = "application/merge-patch+json"
NODE = "node-1"


def load_apiserver() -> Any:
    """e2e/cluster/apiserver.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("kvern_apiserver", ROOT / "e2e" / "cluster" / "apiserver.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Plane:
    """The control plane in a folder. Its programs can be stopped, frozen and started again where they were."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._tool = folder, load_apiserver()
        self.kubeconfig = self._tool.start(folder, controllers=True)
        document = yaml.safe_load(self.kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        self._host, self._ca, self._token = cluster["server"], cluster["certificate-authority"], user["token"]

    def client(self) -> KubeClient:
        configuration = Configuration(host=self._host)
        configuration.ssl_ca_cert = self._ca
        configuration.api_key = {"BearerToken": self._token}
        configuration.api_key_prefix = {"BearerToken": "Bearer"}
        return KubeClient(configuration)

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def signal(self, name: str, number: int) -> None:
        os.kill(self.pid(name), number)

    def end(self, *names: str) -> None:
        for name in names:
            self.signal(name, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid(name), 0)

    def begin(self, *names: str) -> None:
        for name in names:
            self._tool.begin_again(self.folder, name)

    async def answers(self) -> None:
        client = self.client()
        try:
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(ApiError):
                        await client.request("GET", "/api/v1/namespaces", timeout=2.0)
                        # Resources of others come later: until then they are 503.
                        if await client.serves("kvern.dev/v1alpha1", "inferenceservices"):
                            await client.list("/apis/kvern.dev/v1alpha1/inferenceservices")
                        return
                    await asyncio.sleep(0.1)
        finally:
            await client.close()

    def backup(self) -> Path:
        """A copy of etcd's data, as a snapshot is one: taken while it stands still."""
        copy = self.folder / "backup"
        shutil.rmtree(copy, ignore_errors=True)
        self.signal("etcd", signal.SIGSTOP)
        try:
            shutil.copytree(self.folder / "etcd", copy)
        finally:
            self.signal("etcd", signal.SIGCONT)
        return copy

    async def restore(self, copy: Path) -> None:
        """As the runbooks have it: the API server down, the data in place, both up again."""
        self.end("kube-controller-manager", "kube-apiserver", "etcd")
        shutil.rmtree(self.folder / "etcd")
        shutil.copytree(copy, self.folder / "etcd")
        self.begin("etcd", "kube-apiserver")
        await self.answers()
        self.begin("kube-controller-manager")

    def stop(self) -> None:
        self._tool.stop(self.folder)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class OperatorProcess:
    """kvern-operator, started again when it ends, as a kubelet does it."""

    plane: Plane
    name: str
    source: Path | None = None  # another version of it
    process: subprocess.Popen | None = None
    exits: list[int] = field(default_factory=list)
    kept: bool = True

    def start(self) -> None:
        key = self.plane.folder / "operator-key"
        key.write_text("k" * 64)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("KVERN_")},
            "KUBECONFIG": str(self.plane.kubeconfig),
            "KVERN_NAMESPACE": "default",
            "KVERN_POD_NAME": self.name,
            "KVERN_OPERATOR_KEY_FILE": str(key),
            "KVERN_HEALTH_PORT": str(free_port()),
            "KVERN_RESYNC_SECONDS": "10",
            "KVERN_POD_MONITORS": "false",
            "PYTHONPATH": str(self.source or ROOT / "operator"),
        }
        environment.pop("KUBERNETES_SERVICE_HOST", None)
        with (self.plane.folder / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "kvern_operator.main"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def turn(self) -> None:
        """What its kubelet does."""
        if self.process is None or self.process.poll() is None or not self.kept:
            return
        self.exits.append(self.process.returncode)
        self.start()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.kept = False
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def log(self) -> str:
        return (self.plane.folder / f"{self.name}.log").read_text()


class World:
    """Scheduler, kubelet and engines of one namespace. `seen` notes after every change of the pods what there was."""

    def __init__(self, plane: Plane, namespace: str, gpus: int = 8, linger: float = 0.3) -> None:
        self.plane, self.namespace, self.gpus, self.linger = plane, namespace, gpus, linger
        self.client = plane.client()
        self.in_flight: dict[str, int] = {}
        self.draining: dict[str, bool] = {}
        self.bad: Callable[[dict], bool] = lambda pod: False
        self.operators: list[OperatorProcess] = []
        self.most_engines = self.most_held = 0
        self.overbooked: list[str] = []
        self.least_ready: int | None = None
        self._addresses: dict[str, str] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._ending: dict[str, float] = {}
        self._task: asyncio.Task | None = None
        self.errors: list[str] = []
        self._numbers = itertools.count(1)  # of pods' addresses

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> "World":
        with contextlib.suppress(ApiError):
            await self.client.request("POST", CRDS, body=yaml.safe_load(CRD.read_text()))
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
        }
        with contextlib.suppress(ApiError):
            await self.client.request("POST", "/api/v1/nodes", body=node)
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        await self.client.request("POST", "/api/v1/namespaces", body=space)
        account = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/default"
        await self.until(lambda: self.find(account))
        await self.client.request("POST", account.rpartition("/")[0], body={"metadata": {"name": "none"}})
        await self._heartbeat()
        self._task = asyncio.create_task(self._run(), name="world")
        return self

    async def __aexit__(self, *_: object) -> None:
        for operator in self.operators:
            operator.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for server in self._servers.values():
            server.close()
        with contextlib.suppress(ApiError):
            await self._clear()
        await self.client.close()

    async def _clear(self) -> None:
        """What pods request on the one node would be missing there in the next test."""
        space = f"namespaces/{self.namespace}"
        for kind in ("kvern.dev/v1alpha1/{}/inferenceservices", "apps/v1/{}/statefulsets", "apps/v1/{}/deployments"):
            await self.client.request("DELETE", f"/apis/{kind.format(space)}", body={})
        deadline = time.monotonic() + 30
        while await self.items("/api/v1/{ns}/pods") and time.monotonic() < deadline:
            await self.client.request("DELETE", f"/api/v1/{space}/pods", body={"gracePeriodSeconds": 0})
            await asyncio.sleep(0.2)

    def operator(self, name: str = "op-1", source: Path | None = None) -> OperatorProcess:
        operator = OperatorProcess(self.plane, f"{self.namespace}-{name}", source)
        operator.start()
        self.operators.append(operator)
        return operator

    async def until(self, check: Callable[[], Any], seconds: float = 90) -> Any:
        """The first true value of check(), which may be a coroutine."""
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError, KeyError, IndexError, StopIteration):
                last = check()
                last = await last if asyncio.iscoroutine(last) else last
                if last:
                    return last
            await asyncio.sleep(0.1)
        logs = "\n".join(o.log[-3000:] for o in self.operators)
        raise AssertionError(f"did not come within {seconds} s; last: {str(last)[:600]}; {self.errors[-3:]}\n{logs}")

    # ------------------------------------------------------------ what a user does

    async def find(self, path: str) -> dict | None:
        try:
            return await self.client.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def items(self, collection: str) -> list[dict]:
        found = await self.client.request("GET", collection.format(ns=f"namespaces/{self.namespace}"))
        return found["items"]

    async def pods(self, component: str = "engine") -> list[dict]:
        found = await self.items("/api/v1/{ns}/pods")
        return [p for p in found if p["metadata"].get("labels", {}).get("app.kubernetes.io/component") == component]

    async def apply(self, name: str = "smol", **spec: Any) -> dict:
        """kubectl apply of a service that says all that it says."""
        base = {"model": {"uri": "builtin://smollm2-135m"}, "router": {"replicas": 1}}
        rollout = {"drainTimeoutSeconds": 5, **spec.pop("rollout", {})}
        body = {
            "apiVersion": "kvern.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {**base, "resources": {"gpusPerPod": 1}, "rollout": rollout, **spec},
        }
        where = path_of("InferenceService", self.namespace, name)
        query = {"fieldManager": "user", "force": "true"}
        return await self.client.request(
            "PATCH", where, query=query, body=body, content_type="application/apply-patch+yaml"
        )

    async def service(self, name: str = "smol") -> dict:
        return await self.client.request("GET", path_of("InferenceService", self.namespace, name))

    async def is_settled(self, name: str = "smol") -> bool:
        """As wanted, by the service's account and by what is there."""
        found, engines = await self.service(name), await self.pods()
        status, spec = found.get("status", {}), found["spec"]
        said = {(c["type"], c["status"]) for c in status.get("conditions", ()) if
                c["observedGeneration"] == found["metadata"]["generation"]}  # fmt: skip
        revisions = {p["metadata"]["labels"]["kvern.dev/revision"] for p in engines}
        return (
            {("Ready", "True"), ("Progressing", "False")} <= said
            and len(engines) == spec["replicas"]
            and not any(p["metadata"].get("deletionTimestamp") for p in engines)
            and revisions <= {status["revision"]["updated"]}
        )

    # ------------------------------------------------------------ scheduler and kubelet

    async def _run(self) -> None:
        beat = 0.0
        while True:
            for operator in self.operators:
                operator.turn()
            try:
                if time.monotonic() - beat > 10:
                    await self._heartbeat()
                    beat = time.monotonic()
                await self._turn()
            except ApiError as error:
                self.errors.append(str(error))
            except Exception:  # a kubelet does not end because of what it is told
                self.errors.append(traceback.format_exc())
            await asyncio.sleep(0.05)

    async def _heartbeat(self) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "Played", "lastHeartbeatTime": stamp}
        allocatable = {"nvidia.com/gpu": str(self.gpus), "cpu": "64", "memory": "256Gi", "pods": "110"}
        status = {"conditions": [ready], "allocatable": allocatable, "capacity": allocatable}
        await self.client.request("PATCH", f"/api/v1/nodes/{NODE}/status", body={"status": status}, content_type=MERGE)

    async def _turn(self) -> None:
        pods = await self.items("/api/v1/{ns}/pods")
        engines = [p for p in pods if p["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "engine"]
        held = sum(bool(p["spec"].get("nodeName")) for p in engines)
        self.most_engines, self.most_held = max(self.most_engines, len(engines)), max(self.most_held, held)
        waiting = [p["metadata"]["name"] for p in engines if not p["spec"].get("nodeName")]
        if waiting and held >= self.gpus:
            self.overbooked.append(f"{waiting} while {held} GPUs are held")
        if self.least_ready is not None:
            self.least_ready = min(self.least_ready, sum(_is_ready(p) for p in engines))
        for pod in pods:
            with contextlib.suppress(ApiError):
                await self._kubelet(pod, pod in engines, held)
        gone = self._servers.keys() - {p["metadata"]["uid"] for p in pods}
        for uid in gone:
            self._servers.pop(uid).close()

    async def _kubelet(self, pod: dict, engine: bool, held: int) -> None:
        meta, where = pod["metadata"], f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        uid, now = meta["uid"], time.monotonic()
        if meta.get("deletionTimestamp"):
            if now - self._ending.setdefault(uid, now) >= self.linger and not self.in_flight.get(meta["name"]):
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                await self.client.request("DELETE", where, body=options)
        elif not pod["spec"].get("nodeName"):
            if not engine or held < self.gpus:
                target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
                binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
                await self.client.request("POST", f"{where}/binding", body=binding)
        elif engine and self.bad(pod):
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
            ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "ValueError: no such layer"}}
            await self._report(where, pod, engine, ready=False, state=state, last=ended)
        elif pod["status"].get("phase") != "Running" or (engine and _is_ready(pod) == self.draining.get(uid, False)):
            if engine and uid not in self._servers:
                await self._open_admin_port(meta["name"], uid)
            running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            ready = not self.draining.get(uid, False)
            await self._report(where, pod, engine, ready=ready, state=running, address=self._addresses.get(uid))

    async def _report(self, where: str, pod: dict, engine: bool, *, ready: bool, state: dict, **more: Any) -> None:
        stamp, name = "2026-01-01T00:00:00Z", "engine" if engine else "router"
        container = {"name": name, "ready": ready, "started": "running" in state, "restartCount": 0, "state": state}
        container |= {"image": "x", "imageID": "x", "lastState": more.get("last") or {}}
        container["restartCount"] = 3 if more.get("last") else 0
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp},
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": stamp},
        ]
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": [container], "startTime": stamp}
        address = more.get("address") or "127.86.200.1"
        status |= {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}
        if pod["status"].get("containerStatuses") == status["containerStatuses"]:
            return
        await self.client.request("PATCH", f"{where}/status", body={"status": status}, content_type=MERGE)

    async def _open_admin_port(self, name: str, uid: str) -> None:
        """An engine, as far as the operator knows one."""
        # A number of its own, also for a pod that comes back from a backup.
        address = f"127.86.{os.getpid() % 200}.{next(self._numbers)}"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    method, path, _ = head.decode().split(" ", 2)
                    if path == "/admin/drain" and method in ("POST", "DELETE"):
                        self.draining[uid] = method == "POST"
                    said = {"draining": self.draining.get(uid, False), "in_flight": self.in_flight.get(name, 0)}
                    body = json.dumps(
                        said if "drain" in path else {"feasible": [{"size": 1, "kvTokens": 4096}]}
                    ).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.close()

        self._servers[uid] = await asyncio.start_server(serve, address, 8001)
        self._addresses[uid] = address


def _is_ready(pod: dict) -> bool:
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")
