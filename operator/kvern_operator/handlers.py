"""kopf's part: which kinds are listed, watched and indexed, and that an event puts a key on the queue. Nothing else.

Low-level primitives only: kopf writes no annotation, no finalizer and no event anywhere.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.api.types import API_VERSION, KIND, PLURAL
from kvern_operator.desired import meta
from kvern_operator.kube import PLURALS
from kvern_operator.mirror import Index, Live, service_of, trim_child, trim_pod, trim_service
from kvern_operator.observed import Object
from kvern_operator.queue import Key
from kvern_operator.verify import kinds
from kvern_operator.watches import Watches, open_session

SERVER_TIMEOUT = 270  # seconds, then the API server ends a watch and it goes on from where it was
SILENT = 80  # seconds without an event or bookmark after which a watch is started again (bookmarks come every minute)

# Given the indexes (services, children, pods) once they are there, still empty.
Started = Callable[[Index, Index, Index], None]
# Called with the key of a service; `gone` is the UID of a child or pod that was deleted, else "".
Seen = Callable[[Key, str], None]


def configure(settings: kopf.OperatorSettings, *, namespaced: bool) -> None:
    """kopf's settings. Watches fall silent without the timeouts; nothing of kopf's own is ever written."""
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    settings.scanning.disabled = namespaced
    settings.watching.server_timeout = SERVER_TIMEOUT
    settings.watching.client_timeout = SERVER_TIMEOUT + 30
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = SILENT
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.queueing.exit_timeout = 1.0
    for kind in ("Pod", *_children(pod_monitors=True)):
        settings.watching.label_selectors[_resource(kind)] = meta.SERVICE_LABEL  # by the API server


def register(
    configuration: Configuration,
    watches: Watches,
    sessions: list[aiohttp.ClientSession],
    started: Started,
    seen: Seen,
    *,
    namespaced: bool,
    pod_monitors: bool,
) -> kopf.OperatorRegistry:
    """A registry of its own, so that a process can hold several operators in tests. Sessions that are opened are put
    into `sessions`: kopf closes them where it ends in peace, the caller where it does not."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)  # type: ignore[arg-type]  # indexes come as keywords of their own
    async def startup(
        settings: kopf.OperatorSettings, inferenceservices: Any, children: Any, pods: Any, **_: Any
    ) -> None:
        configure(settings, namespaced=namespaced)
        started(inferenceservices, children, pods)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        session = open_session(configuration, watches)
        sessions.append(session)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    _index_resource(registry, seen)
    _index_children(registry, seen, pod_monitors)
    _index_pods(registry, seen)
    return registry


def _resource(kind: str) -> tuple[str, str, str]:
    """(group, version, plural) of a kind, as kopf's decorators take it."""
    api_version = {KIND: API_VERSION, "Pod": "v1"}.get(kind) or meta.API_VERSIONS[kind]
    group, _, version = api_version.rpartition("/")
    plural = {KIND: PLURAL, "Pod": "pods"}.get(kind) or PLURALS[kind]
    return group, version, plural


def _index_resource(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.index(*_resource(KIND), id="inferenceservices", registry=registry)
    async def inferenceservices(body: Mapping[str, Any], **_: Any) -> dict[Key, Object]:
        document = trim_service(body)
        return {(document["metadata"]["namespace"], document["metadata"]["name"]): document}

    @kopf.on.event(*_resource(KIND), registry=registry)
    async def service_event(body: Mapping[str, Any], **_: Any) -> None:
        seen((body["metadata"]["namespace"], body["metadata"]["name"]), "")


def _index_children(registry: kopf.OperatorRegistry, seen: Seen, pod_monitors: bool) -> None:
    async def children(body: Mapping[str, Any], **_: Any) -> dict[Key, Live]:
        key = service_of(body["metadata"])
        return {key: trim_child(body)} if key is not None else {}

    for kind in _children(pod_monitors):
        kopf.index(*_resource(kind), id="children", registry=registry)(children)
        kopf.on.event(*_resource(kind), registry=registry)(_event(seen))


def _index_pods(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.index(*_resource("Pod"), id="pods", registry=registry)
    async def pods(body: Mapping[str, Any], **_: Any) -> dict[Key, Object]:
        key = service_of(body["metadata"])
        return {key: trim_pod(body)} if key is not None else {}

    kopf.on.event(*_resource("Pod"), registry=registry)(_event(seen))


def _event(seen: Seen) -> Callable[..., Any]:
    async def event(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        key = service_of(body["metadata"])
        if key is not None:
            seen(key, str(body["metadata"].get("uid", "")) if type == "DELETED" else "")

    return event


def _children(pod_monitors: bool) -> Iterable[str]:
    return (kind for kind in kinds(pod_monitors) if kind not in (KIND, "Pod"))
