#!/usr/bin/env python3
"""A bare control plane on loopback: etcd and kube-apiserver, no kubelet, no root. For what needs a real API server and
no pods: schemas, CEL, server-side apply, watches, RBAC. Up in about five seconds.

    apiserver.py start FOLDER [--controllers]   prints the path of an administrator's kubeconfig
    apiserver.py stop FOLDER                    ends it; --delete takes the folder away too

--controllers adds kube-controller-manager: StatefulSets make pods (which nobody runs), owner references collect,
namespaces finish deleting. The programs are those of offline/binaries.sh control; without them this says so.
The tokens of the kubeconfig: "admin" may do everything; any other user comes by impersonation (kubectl --as).
"""

import argparse
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("KVERN_E2E_CACHE") or Path.home() / ".cache" / "kvern-e2e")
TOOLS = CACHE / "tools"
START_SECONDS = 180.0
STOP_SECONDS = 10.0
TOKEN = "kvern-e2e-admin"  # of a server on loopback that lives for a test
ADMIN = "admin"
# In the order in which they end: nobody is to lose what it talks to.
PROGRAMS = ("kwok", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
AUDIT_POLICY = Path(__file__).with_name("audit.yaml")

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: kvern, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: "{ca}"}}}}]
users: [{{name: "{user}", user: {{token: {token}}}}}]
contexts: [{{name: kvern, context: {{cluster: kvern, user: "{user}"}}}}]
current-context: kvern
"""


class ControlPlaneError(RuntimeError):
    """A part of the control plane is missing or did not start; the text says which and shows its last words."""


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start(
    folder: Path,
    controllers: bool = False,
    users: Mapping[str, str] | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Start a control plane whose files lie in `folder`; returns its administrator's kubeconfig. `users` are others who
    may come in (name -> groups, commas between; see kubeconfig_of), `flags` more arguments of a program by its name.
    Raises ControlPlaneError."""
    _need("etcd", "kube-apiserver", *(("kube-controller-manager",) if controllers else ()))
    flags = flags or {}
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stop(folder)  # of an earlier start
    client_port, peer_port, port = free_ports(3)
    etcd = f"http://127.0.0.1:{client_port}"
    peer = f"http://127.0.0.1:{peer_port}"
    _run(
        folder,
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={etcd}",
        f"--advertise-client-urls={etcd}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    )
    key, tokens = folder / "service-accounts.pem", folder / "tokens.csv"
    if not key.exists():
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    everyone = {ADMIN: "system:masters", **(users or {})}
    tokens.write_text("".join(f'{_token(user)},{user},{user},"{groups}"\n' for user, groups in everyone.items()))
    _run(
        folder,
        "kube-apiserver",
        f"--etcd-servers={etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--audit-policy-file={AUDIT_POLICY}",
        f"--audit-log-path={folder / 'audit.log'}",
        *flags.get("kube-apiserver", ()),
    )
    _wait_until_ready(folder, port)
    (folder / "port").write_text(str(port))
    kubeconfig = kubeconfig_of(folder, ADMIN)
    if controllers:
        _run(
            folder,
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={folder / 'certificates' / 'apiserver.crt'}",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--secure-port=0",
            *flags.get("kube-controller-manager", ()),
        )
    return kubeconfig


def kubeconfig_of(folder: Path, user: str) -> Path:
    """The path of a kubeconfig for one of the users that start() was given, written anew."""
    name = "kubeconfig" if user == ADMIN else f"kubeconfig-{user.rpartition(':')[2]}"
    path, ca = folder.absolute() / name, folder.absolute() / "certificates" / "apiserver.crt"
    port = (folder / "port").read_text()
    path.write_text(KUBECONFIG.format(port=port, ca=ca, user=user, token=_token(user)))
    return path


def run_beside(folder: Path, name: str, *arguments: str) -> None:
    """Start one of PROGRAMS for the control plane in `folder`; stop() ends it. Raises ControlPlaneError."""
    _need(name)
    _run(folder.absolute(), name, *arguments)


def _token(user: str) -> str:
    return TOKEN if user == ADMIN else f"kvern-e2e-{user.rpartition(':')[2]}"


def _need(*names: str) -> None:
    missing = [name for name in names if not (TOOLS / name).exists()]
    if missing:
        group = {"kube-scheduler": "scheduler", "kwok": "kwok"}
        groups = " ".join(dict.fromkeys(group.get(name, "control") for name in missing))
        raise ControlPlaneError(f"{', '.join(missing)} not in {TOOLS}; run e2e/cluster/offline/binaries.sh {groups}")


def stop(folder: Path) -> None:
    """End what start() and run_beside() started in `folder`, in the order that loses nothing; not there is fine."""
    for name in PROGRAMS:
        file = folder / f"{name}.pid"
        pid = int(file.read_text()) if file.exists() else None
        if pid is not None and _is(pid, name):
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while _is(pid, name) and time.monotonic() < deadline:
                time.sleep(0.05)
            if _is(pid, name):
                os.kill(pid, signal.SIGKILL)
        file.unlink(missing_ok=True)


def _is(pid: int, name: str) -> bool:
    """Whether `pid` runs and is ours: a number may have gone to somebody else."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    # No words yet: it has just been started and is still being loaded.
    return state != "Z" and (words == [b""] or words[0].endswith(f"/{name}".encode()))


def begin_again(folder: Path, name: str) -> None:
    """Start a program of `folder` that has ended, as it was started before. /proc would not say how just after a start:
    a program that is still being loaded has no words."""
    _run(folder, name, *json.loads((folder / f"{name}.arguments").read_text()))


def _run(folder: Path, name: str, *arguments: str) -> None:
    (folder / f"{name}.arguments").write_text(json.dumps(arguments))
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(TOOLS / name), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
    (folder / f"{name}.pid").write_text(str(process.pid))


def _wait_until_ready(folder: Path, port: int) -> None:
    unverified = ssl._create_unverified_context()  # the certificate is made while we wait
    request = urllib.request.Request(f"https://127.0.0.1:{port}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        for name in ("etcd", "kube-apiserver"):
            if not _is(int((folder / f"{name}.pid").read_text()), name):
                stop(folder)
                raise ControlPlaneError(f"{name} ended: {_last_lines(folder / f'{name}.log')}")
        try:
            with urllib.request.urlopen(request, timeout=2, context=unverified):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    stop(folder)
    words = _last_lines(folder / "kube-apiserver.log")
    raise ControlPlaneError(f"kube-apiserver is not ready after {START_SECONDS:.0f} s: {words}")


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])


def main() -> int:
    parser = argparse.ArgumentParser(description="A bare control plane on loopback.")
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--controllers", action="store_true", help="run kube-controller-manager too")
    parser.add_argument("--delete", action="store_true", help="stop: take the folder away too")
    given = parser.parse_args()
    if given.action == "start":
        try:
            print(start(given.folder, given.controllers))
        except ControlPlaneError as error:
            print(f"apiserver.py: {error}", file=sys.stderr)
            return 1
        return 0
    stop(given.folder)
    if given.delete:
        shutil.rmtree(given.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
