"""HTTP to one API server over the standard library: kept connections, TLS by kubeconfig, proxies. Knows no Kubernetes.

httpx would do as well, but takes as long to import as a whole `kvern status` takes to run.
"""

import base64
import contextlib
import http.client
import os
import ssl
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from kvern_cli.kube.credentials import Credentials
from kvern_cli.kube.errors import KubeconfigError
from kvern_cli.kube.kubeconfig import Access
from kvern_operator import __version__

TIMEOUT = 10.0  # seconds for a connection, for an answer to begin, and between its parts
LOOPBACK = ("127.", "localhost", "::1")
PROXY_VARIABLES = ("https_proxy", "http_proxy", "all_proxy")


class Answer:
    """An answer whose status is known. Read it whole (`text`), or line by line and then `close` it."""

    def __init__(
        self, wire: "Wire", connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.status = response.status
        self._wire, self._connection, self.lines = wire, connection, response

    def text(self) -> str:
        """The whole body; the connection is kept for the next request."""
        body = self.lines.read()
        if self.lines.will_close:
            self.close()
        else:
            self._wire.keep(self._connection)
        return body.decode("utf-8", "replace")

    def close(self) -> None:
        """Give up the rest and the connection."""
        self.lines.close()
        self._connection.close()


class Wire:
    """One server, one user. May be used from several threads."""

    def __init__(self, access: Access, found: Credentials) -> None:
        self._server = urlsplit(access.server)
        self._name = access.server_name
        self._proxy = _proxy_of(access.proxy, self._server)
        self._tls = tls_context(access, found) if self._server.scheme == "https" else None
        self._headers = {"Accept": "application/json", "User-Agent": f"kvern/{__version__}"}
        if found.authorization:
            self._headers["Authorization"] = found.authorization
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def get(self, path: str, params: Mapping[str, Any], read_timeout: float | None = TIMEOUT) -> Answer:
        """Send a GET. Raises OSError or http.client.HTTPException where no answer comes."""
        query = urlencode({name: value for name, value in params.items() if value is not None})
        target = f"{self._server.path.rstrip('/')}/{path.lstrip('/')}" + (f"?{query}" if query else "")
        kept = self._take()
        if kept is not None:
            # The server may have closed it meanwhile; that shows only now.
            with contextlib.suppress(http.client.RemoteDisconnected, ConnectionError):
                return self._ask(kept, target, read_timeout)
            kept.close()
        return self._ask(self._connection(), target, read_timeout)

    def _ask(self, connection: http.client.HTTPConnection, target: str, read_timeout: float | None) -> Answer:
        if self._proxy is not None and self._tls is None:
            target = f"http://{self._server.netloc}{target}"
        try:
            connection.request("GET", target, headers=self._headers)
            connection.sock.settimeout(read_timeout)
            return Answer(self, connection, connection.getresponse())
        except BaseException:
            connection.close()
            raise

    def _take(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Take a connection back for the next request."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._server.hostname or "", self._server.port or (443 if self._tls else 80)
        at = (self._proxy.hostname or "", self._proxy.port or 3128) if self._proxy else (host, port)
        if self._tls is None:
            return http.client.HTTPConnection(*at, timeout=TIMEOUT)
        connection = _Https(*at, context=self._tls, name=self._name or host)
        if self._proxy is not None:
            connection.set_tunnel(host, port, headers=_proxy_headers(self._proxy))
        return connection


class _Https(http.client.HTTPSConnection):
    """TLS under a name of its own: tls-server-name, or the server's behind a proxy."""

    def __init__(self, host: str, port: int, *, context: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=TIMEOUT, context=context)
        self._tls, self._name = context, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # through the tunnel, where there is one
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def tls_context(access: Access, found: Credentials) -> ssl.SSLContext:
    """What the kubeconfig says of certificates; the system's authorities where it names none."""
    try:
        context = ssl.create_default_context(cadata=access.ca or None)
    except ssl.SSLError:
        raise KubeconfigError(f"{access.place}: certificate-authority holds no certificate in PEM") from None
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.certificate:
        # OpenSSL takes certificates from files only; mkstemp's are readable by their owner alone.
        handle, name = tempfile.mkstemp(prefix="kvern-", suffix=".pem")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(found.certificate.rstrip("\n") + "\n" + found.key)
            context.load_cert_chain(name)
        except ssl.SSLError as error:
            text = f"user {access.user_name}: client-certificate and client-key do not fit: {error.reason}"
            raise KubeconfigError(text) from None
        finally:
            Path(name).unlink()
    return context


# ---------------------------------------------------------------- proxies


def _proxy_of(given: str, server: SplitResult) -> SplitResult | None:
    """The kubeconfig's proxy-url, else the environment's, as kubectl takes them; never for loopback."""
    host = server.hostname or ""
    if not given and not host.startswith(LOOPBACK) and any(name.lower() in PROXY_VARIABLES for name in os.environ):
        from urllib.request import getproxies, proxy_bypass

        found = getproxies()
        given = "" if proxy_bypass(host) else found.get(server.scheme) or found.get("all") or ""
    if not given:
        return None
    proxy = urlsplit(given)
    if proxy.scheme != "http" or not proxy.hostname:
        raise KubeconfigError(f"proxy {given}: only proxies of the form http://host:port are spoken to")
    return proxy


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode()}"}
