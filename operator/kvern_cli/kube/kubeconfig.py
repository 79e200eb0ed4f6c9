"""Kubeconfig files -> which cluster to talk to and as whom. Files are merged as kubectl merges them.

Reads files and the environment, runs nothing: exec plugins are the business of credentials.py.
"""

import base64
import binascii
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvern_cli.kube.errors import KubeconfigError

DEFAULT_FILE = Path("~/.kube/config")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Entries of clusters and users that name files; a relative name is relative to the kubeconfig that holds it.
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class Access:
    """A cluster and a user, merged and resolved. PEM texts; `user` is the user's entry for credentials.py."""

    context: str  # "" in a pod
    server: str
    namespace: str
    user_name: str = ""
    ca: str = ""
    insecure: bool = False
    server_name: str = ""  # instead of the server's host, in TLS
    proxy: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # of the kubeconfig that holds the user: where an exec plugin with a path is found

    @property
    def place(self) -> str:
        """For people: which cluster this is."""
        return f"context {self.context}" if self.context else "the cluster of this pod"


def has_cluster(kubeconfig: str | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a cluster to talk to at all: a kubeconfig file, or the account of a pod."""
    return any(path.is_file() for path in config_files(kubeconfig, environ)) or _in_pod(environ)


def config_files(kubeconfig: str | None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The files to read, in order: --kubeconfig alone, else $KUBECONFIG (several with ':'), else ~/.kube/config."""
    if kubeconfig is not None:
        return [Path(kubeconfig).expanduser()]
    listed = [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return listed or [DEFAULT_FILE.expanduser()]


def load_access(
    kubeconfig: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Access:
    """The access that options, environment and files lead to. Raises KubeconfigError."""
    files = config_files(kubeconfig, environ)
    found = [path for path in files if path.is_file()]
    if kubeconfig is not None and not found:
        raise KubeconfigError(f"--kubeconfig {kubeconfig}: there is no such file")
    if not found and context is None and _in_pod(environ):
        return _pod_access(namespace, environ)
    if not found:
        looked = ", ".join(map(str, files))
        raise KubeconfigError(f"no kubeconfig found (looked for {looked}); name one with --kubeconfig or $KUBECONFIG")
    return _access(_merged(found), context, namespace)


# ---------------------------------------------------------------- a pod's own account


def _in_pod(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST")) and (SERVICE_ACCOUNT / "token").is_file()


def _pod_access(namespace: str | None, environ: Mapping[str, str]) -> Access:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    own = SERVICE_ACCOUNT / "namespace"
    return Access(
        context="",
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace or (own.read_text().strip() if own.is_file() else "default"),
        user_name="the pod's service account",
        ca=_read(SERVICE_ACCOUNT / "ca.crt", "the pod's certificate authority"),
        user={"tokenFile": str(SERVICE_ACCOUNT / "token")},
    )


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class _Merged:
    current: str
    contexts: Mapping[str, Mapping[str, Any]]
    clusters: Mapping[str, Mapping[str, Any]]
    users: Mapping[str, Mapping[str, Any]]
    files: tuple[Path, ...]
    folders: Mapping[str, Path]  # of users


def _merged(paths: Iterable[Path]) -> _Merged:
    """As kubectl does: the first file that sets a value, or names an entry, wins."""
    current, files = "", []
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {"contexts": {}, "clusters": {}, "users": {}}
    folders: dict[str, Path] = {}
    for path in paths:
        document = _parse(path)
        files.append(path)
        current = current or document.get("current-context") or ""
        for kind, entries in kinds.items():
            for entry in document.get(kind) or ():
                name, body = entry.get("name"), entry.get(kind[:-1]) or {}
                if name is None or name in entries:
                    continue
                entries[name] = _with_paths(body, path.parent)
                if kind == "users":
                    folders[name] = path.parent
    return _Merged(current, kinds["contexts"], kinds["clusters"], kinds["users"], tuple(files), folders)


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KubeconfigError(f"{path}: cannot be read as a kubeconfig: {_first_line(error)}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise KubeconfigError(f"{path}: is not a kubeconfig: it holds no mapping with contexts, clusters and users")
    return document


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _with_paths(body: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    return {k: str(folder / Path(v).expanduser()) if k in FILES and v else v for k, v in body.items()}


def _access(merged: _Merged, context: str | None, namespace: str | None) -> Access:
    where = ", ".join(map(str, merged.files))
    name = context or merged.current
    if not name:
        known = _listed(merged.contexts)
        raise KubeconfigError(f"{where}: no current context; choose one with --context ({known})")
    chosen = _entry(merged.contexts, name, "context", where)
    cluster = _entry(merged.clusters, chosen.get("cluster") or "", f"context {name}: cluster", where)
    user_name = chosen.get("user") or ""
    user = _entry(merged.users, user_name, f"context {name}: user", where) if user_name else {}
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        text = f'cluster {chosen.get("cluster")}: server is "{server}"; it must be an https:// address'
        raise KubeconfigError(f"{where}: {text}")
    return Access(
        context=name,
        server=server,
        namespace=namespace or chosen.get("namespace") or "default",
        user_name=user_name,
        ca=pem(cluster, "certificate-authority"),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name") or "",
        proxy=cluster.get("proxy-url") or "",
        cluster=cluster,
        user=user,
        folder=merged.folders.get(user_name, Path()),
    )


def _entry(entries: Mapping[str, Mapping[str, Any]], name: str, what: str, where: str) -> Mapping[str, Any]:
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else _listed(entries)
    raise KubeconfigError(f'{where}: there is no {what} "{name}" ({hint})')


def _listed(entries: Iterable[str]) -> str:
    names = sorted(entries)
    return "there are: " + ", ".join(names) if names else "there are none"


# ---------------------------------------------------------------- contents


def pem(entry: Mapping[str, Any], key: str) -> str:
    """The PEM text of `key` in a cluster or user: from `key`-data, else from the file that `key` names; "" if none."""
    data = entry.get(f"{key}-data")
    if data:
        try:
            return base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise KubeconfigError(f"kubeconfig: {key}-data is not base64 of a PEM text: {error}") from None
    return _read(Path(entry[key]), key) if entry.get(key) else ""


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KubeconfigError(f"{what}: {path} cannot be read: {_first_line(error)}") from None
