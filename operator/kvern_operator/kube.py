"""The API server as the operator uses it: JSON in, JSON out, errors with their words. A thin layer over aiohttp.

Paths of objects, server-side apply, and nothing of what is written. The official client gives configuration, TLS and
tokens that are renewed; its requests and typed models are not used, since everything here is a plain dict.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from yarl import URL

from kvern_operator import __version__
from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.desired import meta
from kvern_operator.observed import Object

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
AGENT = f"kvern-operator/{__version__}"
AT_ONCE = 32  # writes and searches under way; more of them wait here, and nothing else waits for them

PLURALS = {
    "Secret": "secrets",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Service": "services",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "PodMonitor": "podmonitors",
    "Job": "jobs",
    "StatefulSet": "statefulsets",
    "Deployment": "deployments",
    KIND: "inferenceservices",
}


class ApiError(Exception):
    """The API server refused, failed or did not answer (status 0). str() is its own message."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        self.status, self.message, self.reason = status, message, reason
        super().__init__(message)

    @property
    def refused(self) -> bool:
        """The request is wrong or forbidden: the same one again will not do."""
        return self.status in (400, 403, 405, 413, 415, 422)


class NotLeadingError(Exception):
    """A write was held back because this process may not lead any more."""


def collection(api_version: str, plural: str, namespace: str | None = None) -> str:
    """The path of a kind's objects, in one namespace or in all."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def path_of(kind: str, namespace: str, name: str) -> str:
    """The path of one child or of the resource itself."""
    version = API_VERSION if kind == KIND else meta.API_VERSIONS[kind]
    return f"{collection(version, PLURALS[kind], namespace)}/{name}"


async def load_configuration() -> Configuration:
    """The service account where there is one, else the kubeconfig. Raises ConfigException."""
    configuration = Configuration()
    try:
        kube_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except kube_config.ConfigException:
        await kube_config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


def open_session(configuration: Configuration, traces: Iterable[aiohttp.TraceConfig] = ()) -> aiohttp.ClientSession:
    """A session with the configuration's TLS and its token, asked for anew at each request: tokens expire."""

    async def authorize(request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    tls = RESTClientObject(configuration).ssl_context
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        middlewares=(authorize,),
        trace_configs=list(traces),
        trust_env=False,
        read_bufsize=2**20,
    )


def _failure(status: int, text: str) -> ApiError:
    """An error from the body of an answer: a Status object as a rule, some proxy's page where there is one between."""
    try:
        body = json.loads(text)
        return ApiError(status, str(body.get("message") or text[:500]), str(body.get("reason", "")))
    except (ValueError, AttributeError):
        return ApiError(status, f"HTTP {status}: {' '.join(text.split())[:300]}")


class KubeClient:
    """One connection pool. `may_write` is asked before every write but those of the Lease and of dry runs."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(AT_ONCE)  # never of the Lease: a slow API server is not to cost it
        self.may_write: Callable[[], bool] = lambda: True
        self.wrote: Callable[[str, str], None] = lambda verb, path: None

    async def close(self) -> None:
        """Give the connections back."""
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout: float = 15.0,
    ) -> Any:
        """The JSON of an answer. Raises ApiError, also (status 0) where none came within `timeout` seconds."""
        if self._session is None:
            self._session = open_session(self.configuration)
        url = URL(f"{self.configuration.host}{path}{f'?{urlencode(query)}' if query else ''}", encoded=True)
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": AGENT}
        sent = None if body is None else json.dumps(body)
        try:
            async with asyncio.timeout(timeout):
                async with self._session.request(method, url, data=sent, headers=headers) as answer:
                    data = await answer.read()
        except TimeoutError:
            raise ApiError(0, f"the API server did not answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"the API server cannot be reached: {error}") from None
        text = data.decode("utf-8", "replace")
        if not 200 <= answer.status <= 299:
            raise _failure(answer.status, text)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise ApiError(0, f"the API server's answer is not JSON: {text[:200]}") from None

    async def _write(self, method: str, path: str, **arguments: Any) -> Any:
        async with self._turns:
            if not self.may_write():  # when its turn has come, not before
                raise NotLeadingError(f"{method} {path} is held back: the lease has run out")
            answer = await self.request(method, path, **arguments)
        self.wrote(method, path)
        return answer

    async def apply(self, obj: Object, *, dry_run: bool = False, status: bool = False) -> Object:
        """Server-side apply as `kvern`, taking over fields that others hold. Returns the object as it then is."""
        metadata = obj["metadata"]
        path = path_of(obj["kind"], metadata["namespace"], metadata["name"]) + ("/status" if status else "")
        query = {"fieldManager": meta.MANAGER, "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
            checked: Object = await self.request("PATCH", path, query=query, body=obj, content_type=APPLY)
            return checked
        applied: Object = await self._write("PATCH", path, query=query, body=obj, content_type=APPLY)
        return applied

    async def find(self, kind: str, namespace: str, name: str) -> Object | None:
        """One child, whoever made it; None where there is none. Needs no right but to list."""
        path = path_of(kind, namespace, name).rpartition("/")[0]
        async with self._turns:
            found = await self.request("GET", path, query={"fieldSelector": f"metadata.name={name}"})
        return next(iter(found.get("items") or ()), None)

    async def create(self, obj: Object, kind_path: str) -> None:
        """POST one object."""
        await self._write("POST", kind_path, query={"fieldManager": meta.MANAGER}, body=obj)

    async def annotate_pod(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        """Set annotations of the pod that has this UID."""
        path = f"{collection('v1', 'pods', namespace)}/{name}"
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        await self._write("PATCH", path, query={"fieldManager": meta.MANAGER}, body=body, content_type=MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "", version: str = "") -> None:
        """Delete a child, if it still is the one with this UID; its own children go in the background. Raises ApiError
        409 where it is not at this version (resourceVersion) any more."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        conditions = {name: value for name, value in (("uid", uid), ("resourceVersion", version)) if value}
        if conditions:
            options["preconditions"] = conditions
        try:
            await self._write("DELETE", path_of(kind, namespace, name), body=options)
        except ApiError as error:
            gone = error.status == 404 or (error.status == 409 and "UID in precondition" in error.message)
            if not gone and not (error.status == 409 and not version):
                raise

    async def list(self, path: str, query: Mapping[str, str] | None = None, accept: str = JSON) -> Iterable[Object]:
        """All items of a collection, read in pages. Never from a cache: what is not in it does not exist."""
        return [item async for page in self.pages(path, query, accept) for item in page]

    async def pages(
        self, path: str, query: Mapping[str, str] | None = None, accept: str = JSON
    ) -> AsyncIterator[Sequence[Object]]:
        """The same page by page, for who keeps little of what may be much."""
        token, wanted = "", {"limit": "500", **(query or {})}
        while True:
            more = {"continue": token} if token else {}
            page = await self.request("GET", path, query={**wanted, **more}, accept=accept)
            yield page.get("items") or []
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    async def serves(self, group_version: str, plural: str) -> bool:
        """Whether the API server knows a resource. Raises ApiError where it does not say."""
        try:
            found = await self.request("GET", f"/apis/{group_version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(r.get("name") == plural for r in found.get("resources") or [])
