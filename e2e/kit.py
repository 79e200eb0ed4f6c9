"""What the end-to-end tests talk to a cluster with: kubectl and helm as a person runs them, and waiting with a reason.

Nothing here knows how the cluster is run: a kubeconfig and the programs on PATH are all there is.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPERATOR_NAMESPACE = "kvern-system"
OPERATOR = "deployment/kvern-operator"
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
# Nobody listens there, on any node: refused at once, where a name would be looked up for minutes.
NO_SUCH_IMAGE = "127.0.0.1:9/no-such-engine:v9"
Object = dict[str, Any]


class CommandError(AssertionError):
    """A command failed; the text is the command and what it said."""


def run(*command: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
    """What a command prints; with check=False its error output follows. Raises CommandError."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, env=os.environ)
    if check and done.returncode != 0:
        raise CommandError(f"{' '.join(command)} (exit {done.returncode})\n{done.stdout}{done.stderr}")
    return done.stdout if check else done.stdout + done.stderr


def kubectl(*args: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
    """kubectl ARGS."""
    return run("kubectl", *args, stdin=stdin, timeout=timeout, check=check)


def kvern(*args: str, timeout: float = 60) -> str:
    """kvern ARGS, the command line of this checkout."""
    return run(sys.executable, "-m", "kvern_cli.main", *args, timeout=timeout)


def helm(*args: str, timeout: float = 300, check: bool = True, program: str = "helm") -> str:
    """helm ARGS; `program` may be helm3."""
    return run(program, *args, timeout=timeout, check=check)


def get(kind: str, name: str, namespace: str) -> Object | None:
    """An object as JSON, None where it is not there."""
    text = kubectl("-n", namespace, "get", kind, name, "-o", "json", "--ignore-not-found")
    return json.loads(text) if text.strip() else None


def items(kind: str, namespace: str, selector: str = "") -> list[Object]:
    """Objects of a kind, by label selector."""
    more = ("-l", selector) if selector else ()
    found: list[Object] = json.loads(kubectl("-n", namespace, "get", kind, "-o", "json", *more))["items"]
    return found


def eventually(what: str, check: Callable[[], Any], seconds: float, every: float = 0.5) -> Any:
    """The first true value of check(); raises AssertionError saying what did not come and what was seen last."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            last: Any = check()
            if last:
                return last
        except (CommandError, subprocess.TimeoutExpired, KeyError, IndexError, TypeError) as error:
            last = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}; last seen: {str(last)[:1500]}")
        time.sleep(every)


def manifest(name: str, uri: str = "builtin://tiny-kjv", **spec: Any) -> str:
    """An InferenceService on the CPU, small and quick to drain; `spec` adds to it."""
    base: Object = {
        "model": {"uri": uri},
        "resources": {"gpusPerPod": 0},
        "router": {"replicas": 1, "resources": {"cpu": "50m", "memory": "256Mi"}},
        "rollout": {"drainTimeoutSeconds": 5},
    }
    return json.dumps(
        {
            "apiVersion": "kvern.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": merged(base, spec),
        }
    )


def merged(base: Object, more: Object) -> Object:
    both = dict(base)
    for key, value in more.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


@dataclass
class Service:
    """An InferenceService in the cluster."""

    name: str
    namespace: str

    def apply(self, text: str) -> None:
        """Server-side, as `kubectl apply --server-side` does it."""
        kubectl("-n", self.namespace, "apply", "--server-side", "-f", "-", stdin=text)

    def object(self) -> Object:
        """As it is now; raises CommandError where it is not there."""
        found: Object = json.loads(kubectl("-n", self.namespace, "get", "infs", self.name, "-o", "json"))
        return found

    def condition(self, kind: str) -> Object:
        """A condition; {} where there is none yet or it belongs to an older generation."""
        obj = self.object()
        for one in obj.get("status", {}).get("conditions", []):
            if one["type"] == kind and one.get("observedGeneration") == obj["metadata"]["generation"]:
                return dict(one)
        return {}

    def wait_ready(self, seconds: float = 180) -> Object:
        """Until condition Ready is True; ends early nowhere: a wrong reason may still heal."""

        def check() -> Object | None:
            seen = self.condition("Ready")
            return seen if seen.get("status") == "True" else None

        try:
            found: Object = eventually(f"{self.name} Ready", check, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; Ready is {self.condition('Ready')}") from None
        return found

    def wait_reason(self, *reasons: str, condition: str = "Ready", seconds: float = 120) -> Object:
        """Until the condition's reason is one of these."""

        def check() -> Object | None:
            seen = self.condition(condition)
            return seen if seen.get("reason") in reasons else None

        try:
            found: Object = eventually(f"{condition} of {self.name} with reason {reasons}", check, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.condition(condition)}") from None
        return found

    def pods(self, component: str = "engine") -> list[Object]:
        """Its pods."""
        selector = f"kvern.dev/service={self.name},app.kubernetes.io/component={component}"
        return items("pods", self.namespace, selector)

    @property
    def url(self) -> str:
        """For OpenAI clients in the cluster, by DNS name."""
        return f"{self.object()['status']['url'].rstrip('/')}"


@dataclass
class Client:
    """A pod with the openai client, in a namespace of its own, as an application would be."""

    namespace: str
    pod: str = "client"
    started: bool = field(default=False)

    def exec(self, *command: str, timeout: float = 180, check: bool = True) -> str:
        """Run something in the pod. Its kubelet may know no pods for a moment, as after etcd was restored: then nothing
        has been run, and it is asked again."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return kubectl("-n", self.namespace, "exec", self.pod, "--", *command, timeout=timeout, check=check)
            except CommandError as error:
                if "unable to upgrade connection" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)

    def ask(self, url: str, model: str, prompt: str, *options: str, timeout: float = 180) -> Object:
        """One JSON line of client/ask.py."""
        text = self.exec("python3", "/opt/client/ask.py", url, model, prompt, *options, timeout=timeout)
        answer: Object = json.loads(text.strip().splitlines()[-1])
        return answer

    def complete(self, url: str, *options: str, timeout: float = 180) -> Object:
        """The same of tiny-kjv, which has no chat template."""
        return self.ask(url, "tiny-kjv", "In the beginning", "--completion", *options, timeout=timeout)


CLIENT_POD = """
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  # A bare pod comes back from nowhere: it lies on the node that no test drains or ends.
  nodeSelector: {node-role.kubernetes.io/control-plane: ""}
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: client
    image: kvern/client:e2e
    imagePullPolicy: IfNotPresent
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: tmp, mountPath: /tmp}]
  volumes: [{name: tmp, emptyDir: {}}]
"""


def audit_log(since: str = "") -> list[Object]:
    """Writes that the API server has seen since a moment (RFC 3339, UTC), from the log on its node."""
    node = kubectl(
        "get", "nodes", "-l", "node-role.kubernetes.io/control-plane", "-o", "jsonpath={.items[0].metadata.name}"
    )
    text = kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/logs/kubernetes/audit.log")
    events = (json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}"))
    return [event for event in events if event["stageTimestamp"] >= since]


class Watch:
    """`kubectl get KIND -w` in the background: when each state was first seen, at a hundredth of polling's cost.

    Use as a context manager; `first(check)` is the monotonic time at which an object that passes was first seen.
    """

    def __init__(self, kind: str, namespace: str) -> None:
        self.kind = kind
        self.seen: list[tuple[float, Object]] = []
        command = ["kubectl", "-n", namespace, "get", kind, "-w", "-o", "json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line)
            if line == "}\n":  # kubectl indents what is within
                self.seen.append((time.monotonic(), json.loads("".join(lines))))
                lines.clear()

    def first(self, check: Callable[[Object], Any]) -> float | None:
        """When an object that passes was first seen; None: not yet."""
        for when, obj in list(self.seen):
            try:
                if check(obj):
                    return when
            except (KeyError, IndexError, TypeError):
                continue
        return None

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join(timeout=5)


def condition_of(obj: Object, kind: str) -> str:
    """Status of a condition of any object, "" where it is not there."""
    found: str = next((c["status"] for c in obj.get("status", {}).get("conditions", []) if c["type"] == kind), "")
    return found
