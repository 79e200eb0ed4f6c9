"""A user of a kubeconfig -> what to send: a header, a client certificate. Runs exec plugins; standard library only."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_cli.kube.errors import KubeconfigError
from kvern_cli.kube.kubeconfig import Access, pem

PLUGIN_SECONDS = 120  # a login in a browser may be behind it


@dataclass(frozen=True)
class Credentials:
    """`renewable`: asking again may give others, as after a token has run out."""

    authorization: str = ""
    certificate: str = ""  # PEM
    key: str = ""  # PEM
    renewable: bool = False


def credentials(access: Access, kubeconfig: str | None = None) -> Credentials:
    """The credentials of the access's user. Raises KubeconfigError. Precedence is kubectl's."""
    user = access.user
    certificate, key = pem(user, "client-certificate"), pem(user, "client-key")
    if bool(certificate) != bool(key):
        missing = "client-key" if certificate else "client-certificate"
        raise KubeconfigError(f"user {access.user_name}: {missing} is missing beside its counterpart")
    if user.get("tokenFile"):
        return Credentials(f"Bearer {_token(Path(user['tokenFile']))}", certificate, key, renewable=True)
    if user.get("token"):
        return Credentials(f"Bearer {user['token']}", certificate, key)
    if user.get("username"):
        pair = f"{user['username']}:{user.get('password') or ''}".encode()
        return Credentials(f"Basic {base64.b64encode(pair).decode()}", certificate, key)
    if user.get("exec"):
        return _from_plugin(access, certificate, key)
    if user.get("auth-provider"):
        return Credentials(_from_provider(access, kubeconfig), certificate, key, renewable=True)
    return Credentials("", certificate, key)


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise KubeconfigError(f"tokenFile {path} cannot be read: {error.strerror}") from None


# ---------------------------------------------------------------- exec plugins (client.authentication.k8s.io)


def _from_plugin(access: Access, certificate: str, key: str) -> Credentials:
    plugin = access.user["exec"]
    status = _run_plugin(access, plugin)
    certificate, key = status.get("clientCertificateData") or certificate, status.get("clientKeyData") or key
    token = status.get("token")
    if not token and not certificate:
        raise KubeconfigError(f"{_named(access, plugin)} gave neither a token nor a certificate")
    return Credentials(f"Bearer {token}" if token else "", certificate, key, renewable=True)


def _named(access: Access, plugin: Mapping[str, Any]) -> str:
    return f"user {access.user_name}: the credential plugin {plugin.get('command')}"


def _run_plugin(access: Access, plugin: Mapping[str, Any]) -> Mapping[str, Any]:
    interactive = plugin.get("interactiveMode") != "Never" and sys.stdin.isatty()
    if plugin.get("interactiveMode") == "Always" and not interactive:
        raise KubeconfigError(f"{_named(access, plugin)} wants a terminal (interactiveMode Always)")
    environ = {**os.environ, **{e["name"]: e["value"] for e in plugin.get("env") or ()}}
    environ["KUBERNETES_EXEC_INFO"] = json.dumps(_exec_info(access, plugin, interactive))
    try:
        done = subprocess.run(
            [_command(access, plugin), *(plugin.get("args") or ())],
            env=environ,
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if interactive else subprocess.PIPE,
            text=True,
            timeout=PLUGIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KubeconfigError(f"{_named(access, plugin)} did not end within {PLUGIN_SECONDS} s") from None
    except OSError as error:
        raise KubeconfigError(f"{_named(access, plugin)} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or "").strip().rpartition("\n")[2]
        raise KubeconfigError(
            f"{_named(access, plugin)} ended with status {done.returncode}" + (f": {said}" * bool(said))
        )
    return _credential(access, plugin, done.stdout)


def _command(access: Access, plugin: Mapping[str, Any]) -> str:
    """The plugin's program: a name on PATH, or a path that is relative to the kubeconfig."""
    command = str(plugin.get("command") or "")
    found = str(access.folder / command) if "/" in command else shutil.which(command)
    if not command or found is None or not Path(found).is_file():
        hint = " ".join(str(plugin.get("installHint") or "").split())
        raise KubeconfigError(f"{_named(access, plugin)} is not installed" + (f". {hint}" if hint else ""))
    return found


def _exec_info(access: Access, plugin: Mapping[str, Any], interactive: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        cluster: dict[str, Any] = {"server": access.server}
        if access.server_name:
            cluster["tls-server-name"] = access.server_name
        if access.insecure:
            cluster["insecure-skip-tls-verify"] = True
        if access.ca:
            cluster["certificate-authority-data"] = base64.b64encode(access.ca.encode()).decode()
        if access.proxy:
            cluster["proxy-url"] = access.proxy
        for extension in access.cluster.get("extensions") or ():
            if extension.get("name") == "client.authentication.k8s.io/exec":
                cluster["config"] = extension.get("extension")
        spec["cluster"] = cluster
    return {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": spec}


def _credential(access: Access, plugin: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
        status = document["status"]
        if document["kind"] != "ExecCredential" or not isinstance(status, dict):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise KubeconfigError(f"{_named(access, plugin)} printed no ExecCredential") from None
    if document.get("apiVersion") != plugin.get("apiVersion"):
        got, wanted = document.get("apiVersion"), plugin.get("apiVersion")
        raise KubeconfigError(f"{_named(access, plugin)} answered in {got}, the kubeconfig wants {wanted}")
    return status


# ---------------------------------------------------------------- auth-provider, which exec plugins replaced


def _from_provider(access: Access, kubeconfig: str | None) -> str:
    """The header that the official client makes: it knows how to renew these tokens, and is imported for them only."""
    name = access.user["auth-provider"].get("name")
    try:
        from kubernetes.config import ConfigException, new_client_from_config
    except ModuleNotFoundError:
        raise KubeconfigError(
            f"user {access.user_name}: auth-provider {name} needs the package kubernetes: pip install 'kvern[operator]'"
        ) from None
    try:
        client = new_client_from_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, context=access.context
        )
    except ConfigException as error:
        raise KubeconfigError(f"user {access.user_name}: auth-provider {name}: {error}") from None
    header = client.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    if not header:
        raise KubeconfigError(f"user {access.user_name}: auth-provider {name} gave no token; log in again")
    return str(header)
