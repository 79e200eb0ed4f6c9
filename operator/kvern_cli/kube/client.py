"""GET, LIST and log streams of the Kubernetes API, with errors in words. Never writes to the cluster."""

import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvern_cli.kube.credentials import Credentials, credentials
from kvern_cli.kube.errors import KubeError
from kvern_cli.kube.kubeconfig import Access, load_access
from kvern_cli.kube.wire import TIMEOUT, Answer, Wire

PAGE = 500  # objects of one answer
LOG_TIMEOUT = 60.0  # seconds between parts of a log that is not followed
BROKEN = (OSError, http.client.HTTPException)


class Kube:
    """One cluster, one user. May be used from several threads."""

    def __init__(self, access: Access, found: Credentials, renew: Callable[[], Credentials] | None = None) -> None:
        self.access = access
        self._renew, self._renewing = renew, threading.Lock()
        self._found, self._wire = found, Wire(access, found)

    def close(self) -> None:
        """Close idle connections."""
        self._wire.close()

    def get(self, path: str, what: str = "", **params: Any) -> dict[str, Any]:
        """One object or list. `what` says in errors what was wanted: "read service x". Raises KubeError."""
        answer = self._send(path, params)
        text = self._whole(answer)
        self._check(answer.status, text, what)
        try:
            document = json.loads(text)
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
        extra = {"follow": "true"} if follow else {}
        answer = self._send(path, {**params, **extra}, None if follow else LOG_TIMEOUT)
        if answer.status >= 400:
            self._check(answer.status, self._whole(answer), what)
        try:
            for line in answer.lines:
                yield line.decode("utf-8", "replace").rstrip("\n")
        except BROKEN as error:
            raise KubeError("unreachable", f"the log broke off: {cause(error)}") from None
        finally:
            answer.close()

    # ------------------------------------------------------------ one exchange

    def _send(self, path: str, params: dict[str, Any], read_timeout: float | None = TIMEOUT) -> Answer:
        """An exchange; once more with renewed credentials where they are not (or no longer) accepted."""
        used = self._found
        try:
            answer = self._wire.get(path, params, read_timeout)
            if answer.status == 401 and self._renew is not None and used.renewable:
                answer.close()
                self._take_new(used)
                answer = self._wire.get(path, params, read_timeout)
        except BROKEN as error:
            raise KubeError("unreachable", self._unreachable(error)) from None
        return answer

    def _take_new(self, used: Credentials) -> None:
        with self._renewing:
            if self._found is used and self._renew is not None:
                self._found = self._renew()
                self._wire = Wire(self.access, self._found)

    def _whole(self, answer: Answer) -> str:
        try:
            return answer.text()
        except BROKEN as error:
            answer.close()
            raise KubeError("unreachable", self._unreachable(error)) from None

    def _unreachable(self, error: BaseException) -> str:
        access = self.access
        text = f"cannot reach the cluster at {access.server} ({access.place}): {cause(error)}"
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{text}; certificate-authority-data of the kubeconfig must be this server's"
        flag = f" --context {access.context}" if access.context else ""
        return f"{text}; try: kubectl{flag} cluster-info"

    def _check(self, status: int, text: str, what: str) -> None:
        if status >= 400:
            raise api_error(status, text, what, self.access)


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


def cause(error: BaseException) -> str:
    """Why there is no answer, without numbers and brackets."""
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message.rstrip('.')}"
    text = (error.strerror if isinstance(error, OSError) else "") or str(error)
    text = text.partition("] ")[2] if text.startswith("[") else text  # [SSL: ...] what (_ssl.c:1007)
    return text.partition(" (_ssl.c")[0].strip() or type(error).__name__
