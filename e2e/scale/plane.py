"""A control plane for thousands of pods that nobody runs: etcd, API server, controllers, scheduler and kwok, each a
process of its own on loopback, in a network namespace of their own; and the operator as a process beside them.

kwok plays the kubelets: pods of its nodes are ready at once. Their addresses are of 198.18.0.0/16 (reserved for
benchmarks), all of which the namespace takes for its own, so that pods.py answers for every one of them.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from api import Access, Api, Object

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "cluster"))
import apiserver  # noqa: E402

PODS = "198.18.0.0/16"
INSIDE = "KVERN_SCALE_NETWORK"
OPERATOR = "system:serviceaccount:kvern-system:kvern-operator"
GROUPS = "system:serviceaccounts,system:serviceaccounts:kvern-system"
SERVER_FLAGS = ("--advertise-address=198.19.0.1",)  # it looks for a default route, and there is none
CONTROLLER_FLAGS = (
    "--kube-api-qps=500",
    "--kube-api-burst=1000",
    "--concurrent-statefulset-syncs=20",
    # Two cores that do all of this renew leases of fake nodes late: their pods would lose their readiness for good.
    "--node-monitor-grace-period=1h",
)
SCHEDULER_FLAGS = ("--kube-api-qps=500", "--kube-api-burst=1000")
NODES, PODS_PER_NODE = 25, 300
STOP_SECONDS = 20.0


def enter_own_network() -> None:
    """Start this program again in a network namespace of its own, as root of a user namespace where it is not root.
    Returns where it is already there."""
    if os.environ.get(INSIDE) == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "route", "add", "local", PODS, "dev", "lo"], check=True)
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--net", sys.executable, *sys.argv]
    os.execvpe("unshare", command, {**os.environ, INSIDE: "1"})


@dataclass
class Usage:
    """Of a process: processor time in seconds, resident memory in MiB now and at most since `Process.reset_peak`."""

    cpu: float
    rss: float
    peak: float


class Process:
    """A program that runs beside, its output in a file."""

    def __init__(self, name: str, folder: Path, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, cwd=folder
            )

    def usage(self) -> Usage:
        """What it has used. Raises RuntimeError with its last words where it has ended."""
        self.check()
        pid = self._process.pid
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss, peak = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        return Usage(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), rss, peak)

    def reset_peak(self) -> None:
        """Let the peak begin at what there is now."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def check(self) -> None:
        """Raises RuntimeError where it has ended."""
        if self._process.poll() is not None:
            words = " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"{self.name} ended ({self._process.returncode}): {words}")

    def stop(self) -> None:
        """End it, by force after a while."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass
class Plane:
    """What run.py needs to know: who may come in where, and where the audit log is."""

    name: str
    folder: Path
    admin: Access
    operator_kubeconfig: Path
    stop: Callable[[], None]


def start_kwok(folder: Path) -> Plane:
    """All of it. Raises apiserver.ControlPlaneError where a program is missing or does not start."""
    users = {OPERATOR: GROUPS, "kubelets": "system:masters"}
    flags = {"kube-apiserver": SERVER_FLAGS, "kube-controller-manager": CONTROLLER_FLAGS}
    kubeconfig = apiserver.start(folder, controllers=True, users=users, flags=flags)
    scheduler = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0", *SCHEDULER_FLAGS)
    apiserver.run_beside(folder, "kube-scheduler", *scheduler)
    kubelets = apiserver.kubeconfig_of(folder, "kubelets")
    kwok = (f"--config={HERE / 'kwok.yaml'}", f"--kubeconfig={kubelets}", "--manage-all-nodes", f"--cidr={PODS}")
    apiserver.run_beside(folder, "kwok", *kwok)
    config = yaml.safe_load(kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]
    admin = Access(server["server"], config["users"][0]["user"]["token"], server["certificate-authority"])
    operator = apiserver.kubeconfig_of(folder, OPERATOR)
    return Plane("kwok", folder, admin, operator, lambda: apiserver.stop(folder))


def start_replay(folder: Path) -> Plane:
    """replay.py in their place. Raises RuntimeError where it does not start."""
    server = Process("replay", folder, [sys.executable, str(HERE / "replay.py"), str(folder)])
    for _ in range(200):
        server.check()
        url = (folder / "replay.log").read_text().strip()
        if url:
            break
        time.sleep(0.1)
    kubeconfig = folder / "kubeconfig"
    context = {"cluster": "replay", "user": "operator"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "replay", "cluster": {"server": url}}],
        "users": [{"name": "operator", "user": {"token": "operator"}}],
        "contexts": [{"name": "replay", "context": context}],
        "current-context": "replay",
    }
    kubeconfig.write_text(yaml.safe_dump(config))
    return Plane("replay", folder, Access(url), kubeconfig, server.stop)


async def install(api: Api) -> None:
    """The resource's definition and the operator's roles as config/ has them, and fake nodes."""
    for name in (
        "config/namespace.yaml",
        "charts/kvern-crds/files/kvern.dev_inferenceservices.yaml",
        "config/roles.yaml",
    ):
        for obj in yaml.safe_load_all((ROOT / name).read_text()):
            await api.create(_collection(obj), obj)
    for index in range(NODES):
        await api.create("/api/v1/nodes", _node(f"fake-{index}"))
    deadline = time.monotonic() + 60
    while True:
        try:
            await api.request("GET", "/apis/kvern.dev/v1alpha1/inferenceservices")
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


def _collection(obj: Object) -> str:
    root = f"/apis/{obj['apiVersion']}" if "/" in obj["apiVersion"] else f"/api/{obj['apiVersion']}"
    namespace = obj["metadata"].get("namespace")
    return f"{root}{f'/namespaces/{namespace}' if namespace else ''}/{obj['kind'].lower()}s"


def _node(name: str) -> Object:
    resources = {"cpu": "10000", "memory": "100Ti", "pods": str(PODS_PER_NODE), "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}},
        "status": {"capacity": resources, "allocatable": resources},
    }


def start_operator(plane: Plane, port: int, source: Path, profile: Path | None = None) -> Process:
    """kvern-operator with the rights of its chart. `port` is for its metrics, `source` the folder operator/."""
    key = plane.folder / "operator-key"
    key.write_text("0123456789abcdef" * 4)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "KUBECONFIG": str(plane.operator_kubeconfig),
        "KVERN_NAMESPACE": "kvern-system",
        "KVERN_OPERATOR_KEY_FILE": str(key),
        "KVERN_POD_NAME": f"scale-{time.time_ns()}",
        "KVERN_HEALTH_PORT": str(port),
        "KVERN_POD_MONITORS": "false",
        "PYTHONPATH": str(source),
    }
    program = [str(HERE / "profiled.py"), str(profile)] if profile else ["-m", "kvern_operator.main"]
    return Process("operator", plane.folder, [sys.executable, *program], environment)


def start_engines(folder: Path) -> Process:
    """pods.py on the port of the engines' admin."""
    return Process("engines", folder, [sys.executable, str(HERE / "pods.py"), "8001"])


def stop_on_signals() -> None:
    """SIGTERM ends this program as an error does, so that nothing is left running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
