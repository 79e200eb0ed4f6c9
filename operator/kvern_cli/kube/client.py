"""GET, LIST and log streams of the Kubernetes API over httpx, with errors in words. Never writes to the cluster."""

import json
import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from kvern_cli.kube.credentials import Credentials, credentials
from kvern_cli.kube.errors import KubeError
from kvern_cli.kube.kubeconfig import Access, load_access
from kvern_operator import __version__

TIMEOUT = 10.0  # seconds for an answer to begin, and between its parts
PAGE = 500  # objects of one answer
LOOPBACK = ("127.", "localhost", "::1")


class Kube:
    """One cluster, one user. May be used from several threads."""

    def __init__(self, access: Access, found: Credentials, renew: Callable[[], Credentials] | None = None) -> None:
        self.access = access
        self._renew, self._renewing = renew, threading.Lock()
        self._found = found
        self._http = self._client(found)

    def _client(self, found: Credentials) -> httpx.Client:
        access = self.access
        host = httpx.URL(access.server).host
        headers = {"Accept": "application/json", "User-Agent": f"kvern/{__version__}"}
        if found.authorization:
            headers["Authorization"] = found.authorization
        return httpx.Client(
            base_url=access.server,
            headers=headers,
            verify=_tls(access, found) if access.server.startswith("https:") else False,
            proxy=access.proxy or None,
            trust_env=not host.startswith(LOOPBACK),
            timeout=TIMEOUT,
        )

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()

    def get(self, path: str, what: str = "", **params: Any) -> dict[str, Any]:
        """One object or list. `what` says in errors what was wanted: "read service x". Raises KubeError."""
        response = self._send(lambda http: http.get(path, params=_given(params), extensions=self._extensions()))
        self._check(response, what)
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise KubeError("refused", f"{self.access.server} does not answer as a Kubernetes API server does")
        return document

    def list(self, path: str, what: str = "", **params: Any) -> list[dict[str, Any]]:
        """All objects of a list, page by page. Raises KubeError."""
        items: list[dict[str, Any]] = []
        token = None
        while True:
            try:
                page = self.get(path, what, **params, limit=PAGE, **{"continue": token})
            except KubeError as error:
                if error.kind != "gone" or token is None:
                    raise
                return self.get(path, what, **params).get("items") or []  # the pages have run out: all at once
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return items

    def lines(self, path: str, what: str = "", *, follow: bool = False, **params: Any) -> Iterator[str]:
        """The lines of a log as they come. With `follow` it ends when the container does. Raises KubeError."""
        timeout = httpx.Timeout(TIMEOUT, read=None if follow else 60.0)
        extra = {"follow": "true"} if follow else {}
        query = _given({**params, **extra})

        def send(http: httpx.Client) -> httpx.Response:
            request = http.build_request("GET", path, params=query, timeout=timeout, extensions=self._extensions())
            return http.send(request, stream=True)

        response = self._send(send)
        try:
            if response.status_code >= 400:
                response.read()
            self._check(response, what)
            yield from response.iter_lines()
        except httpx.HTTPError as error:
            raise KubeError("unreachable", f"the log broke off: {_cause(error)}") from None
        finally:
            response.close()

    # ------------------------------------------------------------ one exchange

    def _extensions(self) -> dict[str, Any]:
        return {"sni_hostname": self.access.server_name} if self.access.server_name else {}

    def _send(self, send: Callable[[httpx.Client], httpx.Response]) -> httpx.Response:
        """An exchange; once more with renewed credentials where they are not (or no longer) accepted."""
        used = self._found
        try:
            response = send(self._http)
            if response.status_code == 401 and self._renew is not None and used.renewable:
                response.close()
                self._take_new(used)
                response = send(self._http)
        except httpx.HTTPError as error:
            raise KubeError("unreachable", self._unreachable(error)) from None
        return response

    def _take_new(self, used: Credentials) -> None:
        with self._renewing:
            if self._found is used and self._renew is not None:
                self._found = self._renew()
                self._http = self._client(self._found)

    def _unreachable(self, error: httpx.HTTPError) -> str:
        access = self.access
        text = f"cannot reach the cluster at {access.server} ({access.place}): {_cause(error)}"
        if "certificate" in str(error).lower():
            return f"{text}; certificate-authority-data of the kubeconfig must be this server's"
        flag = f" --context {access.context}" if access.context else ""
        return f"{text}; try: kubectl{flag} cluster-info"

    def _check(self, response: httpx.Response, what: str) -> None:
        if response.status_code < 400:
            return
        raise api_error(response.status_code, response.text, what, self.access)


def connect(kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None) -> Kube:
    """The client that the options lead to; nothing is sent yet. Raises KubeconfigError."""
    access = load_access(kubeconfig, context, namespace)
    return Kube(access, credentials(access, kubeconfig), lambda: credentials(access, kubeconfig))


def api_error(status: int, body: str, what: str, access: Access) -> KubeError:
    """An error answer in words."""
    try:
        answer = json.loads(body)
        message, named = str(answer.get("message") or ""), bool((answer.get("details") or {}).get("name"))
    except (ValueError, AttributeError):
        message, named = " ".join(body.split())[:200], False
    wanted = what or "read from the API server"
    if status == 401:
        who = f"user {access.user_name}" if access.user_name else "a request without credentials"
        return KubeError("unauthorized", f"the cluster ({access.place}) does not accept {who}: log in again")
    if status == 403:
        return KubeError("forbidden", f"not allowed to {wanted}: {message}")
    if status == 404 and named:
        return KubeError("missing", message)
    if status == 404:
        return KubeError("no-kind", f"cannot {wanted}: {message or 'the server knows no such resource'}")
    if status == 410:
        return KubeError("gone", message)
    if status == 429 or status >= 500:  # it passes: whoever watches asks again
        return KubeError("unreachable", f"cannot {wanted} just now: {message or f'status {status}'}")
    return KubeError("refused", f"cannot {wanted}: {message or f'status {status}'}")


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _cause(error: BaseException) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {TIMEOUT:g} s"
    text = str(error).strip()
    # "[Errno 111] Connection refused" and "[SSL: ...] certificate verify failed: ... (_ssl.c:1007)"
    text = text.partition("] ")[2] if text.startswith("[") else text
    return text.partition(" (_ssl.c")[0] or type(error).__name__


def _tls(access: Access, found: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=access.ca or None)
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
        finally:
            Path(name).unlink()
    return context
