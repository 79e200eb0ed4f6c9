"""Kubeconfig files, exec plugins and certificates: the ways to a cluster, and what is said where there is none."""

import base64
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from fake_api import SERVICES, FakeApi, serving

from kvern_cli.kube.client import connect
from kvern_cli.kube.credentials import credentials
from kvern_cli.kube.errors import KubeconfigError, KubeError
from kvern_cli.kube.kubeconfig import config_files, has_cluster, load_access


def write(path: Path, *, user: dict | None = None, cluster: dict | None = None, **more) -> Path:
    """A kubeconfig with one context "kind", in namespace team-a."""
    document = {
        "current-context": "kind",
        "contexts": [{"name": "kind", "context": {"cluster": "c", "user": "ada", "namespace": "team-a"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1", **(cluster or {})}}],
        "users": [{"name": "ada", "user": user or {}}],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_context_namespace_and_files(tmp_path):
    file = write(tmp_path / "config", cluster={"certificate-authority": "pki/ca.pem", "server": "https://x:6443/"})
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki/ca.pem").write_text("PEM")
    access = load_access(str(file))
    assert (access.context, access.namespace, access.server, access.ca) == ("kind", "team-a", "https://x:6443", "PEM")
    assert load_access(str(file), namespace="other").namespace == "other"


def test_several_files_are_merged_as_kubectl_merges_them(tmp_path):
    one = write(tmp_path / "one", **{"current-context": ""})
    two = write(tmp_path / "two/config", user={"token": "never"}, cluster={"server": "http://never"})
    extra = yaml.safe_load(two.read_text())
    extra["contexts"].append({"name": "far", "context": {"cluster": "d", "user": "bob"}})
    extra["clusters"].append({"name": "d", "cluster": {"server": "http://far:1"}})
    extra["users"].append({"name": "bob", "user": {"tokenFile": "token"}})
    two.write_text(yaml.safe_dump(extra))
    (tmp_path / "two/token").write_text("t-1\n")
    environ = {"KUBECONFIG": f"{one}:{tmp_path / 'missing'}:{two}"}
    near = load_access(environ=environ)
    assert (near.context, near.server, near.user) == ("kind", "http://127.0.0.1:1", {})
    far = load_access(context="far", environ=environ)
    assert (far.namespace, credentials(far).authorization) == ("default", "Bearer t-1")
    assert config_files("x", environ) == [Path("x")] and config_files(None, {})[0].name == "config"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"current-context": ""}, r"no current context; choose one with --context \(there are: kind\)"),
        ({"current-context": "kin"}, r'there is no context "kin" \(did you mean kind\?\)'),
        ({"clusters": []}, r'there is no context kind: cluster "c" \(there are none\)'),
        ({"cluster": {"server": "x:6443"}}, r'cluster c: server is "x:6443"; it must be an https:// address'),
        (
            {"cluster": {"certificate-authority": "no.pem"}},
            r"certificate-authority: .*/no.pem cannot be read: .*No such file",
        ),
        ({"cluster": {"certificate-authority-data": "%"}}, r"certificate-authority-data is not base64 of a PEM text"),
    ],
)
def test_what_is_wrong_in_a_kubeconfig_is_named(tmp_path, change, words):
    file = write(tmp_path / "config", **change)
    with pytest.raises(KubeconfigError, match=words):
        load_access(str(file))


def test_no_kubeconfig_at_all(tmp_path):
    with pytest.raises(KubeconfigError, match=r"no kubeconfig found \(looked for /none\); name one with --kubeconfig"):
        load_access(environ={"KUBECONFIG": "/none"})
    with pytest.raises(KubeconfigError, match=r"--kubeconfig /none: there is no such file"):
        load_access("/none")
    (tmp_path / "config").write_text("just text")
    with pytest.raises(KubeconfigError, match="is not a kubeconfig: it holds no mapping"):
        load_access(str(tmp_path / "config"))
    (tmp_path / "config").write_text("a: [")
    with pytest.raises(KubeconfigError, match="cannot be read as a kubeconfig"):
        load_access(str(tmp_path / "config"))
    assert not has_cluster(environ={"KUBECONFIG": "/none"}) and has_cluster(str(tmp_path / "config"), {})


def test_in_a_pod_its_own_account_is_used(tmp_path, monkeypatch):
    for name, text in (("token", "t-2"), ("ca.crt", "PEM"), ("namespace", "inside")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("kvern_cli.kube.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    environ = {"KUBECONFIG": "/none", "KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert has_cluster(environ=environ)
    access = load_access(environ=environ)
    assert (access.server, access.namespace, access.ca) == ("https://[fd00::1]:6443", "inside", "PEM")
    assert credentials(access).authorization == "Bearer t-2" and access.place == "the cluster of this pod"


# ---------------------------------------------------------------- users


def of_user(tmp_path: Path, user: dict, **more):
    file = write(tmp_path / "config", user=user, **more)
    return credentials(load_access(str(file)), str(file))


def test_tokens_passwords_and_certificates(tmp_path):
    assert of_user(tmp_path, {"token": "t"}).authorization == "Bearer t"
    assert of_user(tmp_path, {"username": "a", "password": "b"}).authorization == f"Basic {b64('a:b')}"
    both = of_user(tmp_path, {"client-certificate-data": b64("CERT"), "client-key-data": b64("KEY")})
    assert (both.certificate, both.key, both.authorization) == ("CERT", "KEY", "")
    with pytest.raises(KubeconfigError, match="user ada: client-key is missing beside its counterpart"):
        of_user(tmp_path, {"client-certificate-data": b64("CERT")})
    with pytest.raises(KubeconfigError, match=r"tokenFile .*/none cannot be read: No such file"):
        of_user(tmp_path, {"tokenFile": "none"})


PLUGIN = """#!{python}
import json, os, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
with open({seen!r}, "a") as file:
    file.write(json.dumps([info, sys.argv[1:], os.environ.get("EXTRA")]) + "\\n")
{body}
"""
GOOD = 'print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": "t-3"}}))'


def plugin(tmp_path: Path, body: str = GOOD, **more) -> dict:
    """A user with a plugin beside the kubeconfig."""
    file = tmp_path / "login"
    file.write_text(PLUGIN.format(python=sys.executable, seen=str(tmp_path / "seen"), body=body))
    file.chmod(0o700)
    found = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login", "interactiveMode": "Never", **more}
    return {"exec": found}


def test_an_exec_plugin_gets_what_it_needs_and_gives_a_token(tmp_path):
    env = [{"name": "EXTRA", "value": "x"}]
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}}]
    user = plugin(tmp_path, args=["get-token"], env=env, provideClusterInfo=True)
    found = of_user(tmp_path, user, cluster={"extensions": extensions, "certificate-authority-data": b64("PEM")})
    assert found.authorization == "Bearer t-3" and found.renewable
    info, args, extra = json.loads((tmp_path / "seen").read_text())
    assert (args, extra, info["kind"]) == (["get-token"], "x", "ExecCredential")
    cluster = {"server": "http://127.0.0.1:1", "certificate-authority-data": b64("PEM"), "config": {"audience": "me"}}
    assert info["spec"] == {"interactive": False, "cluster": cluster}


@pytest.mark.parametrize(
    ("body", "more", "words"),
    [
        (
            "print('warn', file=sys.stderr); print('no login', file=sys.stderr); sys.exit(3)",
            {},
            "ended with status 3: no login$",
        ),
        ("print('hello')", {}, "printed no ExecCredential"),
        (GOOD.replace('info["apiVersion"]', "'v0'"), {}, "answered in v0, the kubeconfig wants client.auth.*/v1"),
        (GOOD.replace('"token": "t-3"', ""), {}, "gave neither a token nor a certificate"),
        (
            GOOD,
            {"command": "no-such-login", "installHint": "Get it\n at example.org"},
            "is not installed. Get it at example.org",
        ),
        (GOOD, {"interactiveMode": "Always"}, r"wants a terminal \(interactiveMode Always\)"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_named(tmp_path, body, more, words):
    with pytest.raises(KubeconfigError, match=f"^user ada: the credential plugin .*{words}"):
        of_user(tmp_path, plugin(tmp_path, body, **more))


def test_an_old_auth_provider_is_left_to_the_official_client(tmp_path):
    claims = b64(json.dumps({"exp": 4_000_000_000})).rstrip("=")
    token = f"e30.{claims}.c2ln"
    config = {"id-token": token, "client-id": "x", "idp-issuer-url": "https://issuer.invalid"}
    assert of_user(tmp_path, {"auth-provider": {"name": "oidc", "config": config}}).authorization == f"Bearer {token}"


# ---------------------------------------------------------------- the wire


def test_a_token_that_ran_out_is_asked_for_again(tmp_path):
    counting = (
        "n = os.path.getsize(sys.argv[0] + '.n')\n"
        "open(sys.argv[0] + '.n', 'a').write('x')\n"
        'print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": f"t-{n}"}}))'
    )
    user = plugin(tmp_path, counting)
    (tmp_path / "login.n").write_text("")
    api = FakeApi()
    api.put_list(SERVICES, [])
    api.token = "t-1"
    with serving(api) as server:
        file = write(tmp_path / "config", user=user, cluster={"server": server})
        assert connect(str(file)).list(SERVICES) == []
        api.token = "t-9"
        with pytest.raises(KubeError, match=r"the cluster \(context kind\) does not accept user ada: log in again"):
            connect(str(file)).list(SERVICES)


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    """A certificate authority, a server's certificate for kvern.test and 127.0.0.1, a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("pki")
    (folder / "san").write_text("subjectAltName=DNS:kvern.test\n")

    def run(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test-ca")
    for name, extra in (("server", ("-extfile", "san")), ("client", ())):
        run("req", *key[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *ca, *extra)
    return folder


def test_certificates_both_ways_and_another_server_name(pki, tmp_path):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki / "server.pem", pki / "server.key")
    tls.load_verify_locations(pki / "ca.pem")
    tls.verify_mode = ssl.CERT_REQUIRED
    api = FakeApi()
    api.put_list(SERVICES, [])
    certificate = {"client-certificate": str(pki / "client.pem"), "client-key": str(pki / "client.key")}
    with serving(api, tls) as server:
        good = {"server": server, "certificate-authority": str(pki / "ca.pem"), "tls-server-name": "kvern.test"}
        file = write(tmp_path / "config", user=certificate, cluster=good)
        assert connect(str(file)).list(SERVICES) == []
        assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("kvern-*.pem"))
        for change in ({"tls-server-name": "other.test"}, {"certificate-authority": None}):
            file = write(tmp_path / "config", user=certificate, cluster={**good, **change})
            with pytest.raises(
                KubeError,
                match=r"cannot reach the cluster at https://.*its certificate is not accepted: .*must be this",
            ):
                connect(str(file)).list(SERVICES)
        lax = {"server": server, "insecure-skip-tls-verify": True}
        assert connect(str(write(tmp_path / "config", user=certificate, cluster=lax))).list(SERVICES) == []


@contextmanager
def tunnels(seen: list[str]) -> Iterator[str]:
    """A proxy that knows CONNECT: one thread a direction. `seen` gets the first lines and the authorization."""

    def copy(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        with client, client.makefile("rb") as head:
            first = head.readline().decode().split()
            rest = [line.decode().strip() for line in iter(head.readline, b"\r\n")]
            seen.append(first[1])
            seen.extend(line for line in rest if line.startswith("Proxy-Authorization"))
            port = first[1].rpartition(":")[2]
            with socket.create_connection(("127.0.0.1", int(port))) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                other = threading.Thread(target=copy, args=(server, client), daemon=True)
                other.start()
                copy(client, server)
                other.join(5)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("given", ["kubeconfig", "environment"])
def test_through_a_proxy(pki, tmp_path, monkeypatch, given):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki / "server.pem", pki / "server.key")
    api, seen = FakeApi(), []
    api.put_list(SERVICES, [])
    with serving(api, tls) as server, tunnels(seen) as proxy:
        port = server.rpartition(":")[2]
        cluster = {"server": f"https://kvern.test:{port}", "certificate-authority": str(pki / "ca.pem")}
        if given == "kubeconfig":
            cluster["proxy-url"] = f"http://me:secret@{proxy}"
        else:
            monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{proxy}")
        kube = connect(str(write(tmp_path / "config", cluster=cluster)))
        assert kube.list(SERVICES) == [] and kube.list(SERVICES) == []
        kube.close()
    assert seen == [f"kvern.test:{port}", f"Proxy-Authorization: Basic {b64('me:secret')}"]  # one connection for both


def test_a_proxy_of_another_kind_is_refused(tmp_path):
    cluster = {"server": "https://kvern.test:1", "proxy-url": "socks5://x:1"}
    with pytest.raises(KubeconfigError, match=r"proxy socks5://x:1: only proxies of the form http://host:port"):
        connect(str(write(tmp_path / "config", cluster=cluster)))


def test_a_kept_connection_that_the_server_closed_is_replaced(tmp_path):
    api = FakeApi()
    api.put_list(SERVICES, [])
    with serving(api) as server:
        kube = connect(str(write(tmp_path / "config", cluster={"server": f"{server}/prefix"})))
        api.objects[f"/prefix{SERVICES}"] = []
        assert kube.list(SERVICES.lstrip("/")) == []
        (kept,) = kube._wire._idle
        kept.sock.shutdown(socket.SHUT_RDWR)
        assert kube.list(SERVICES) == [] and api.asked == [f"/prefix{SERVICES}"] * 2


def test_certificates_that_are_none_are_named(tmp_path):
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority-data": b64("no PEM")}
    with pytest.raises(KubeconfigError, match="context kind: certificate-authority holds no certificate in PEM"):
        connect(str(write(tmp_path / "config", cluster=cluster)))
    user = {"client-certificate-data": b64("no PEM"), "client-key-data": b64("none either")}
    with pytest.raises(KubeconfigError, match="user ada: client-certificate and client-key do not fit"):
        connect(str(write(tmp_path / "config", user=user, cluster={"server": "https://127.0.0.1:1"})))
