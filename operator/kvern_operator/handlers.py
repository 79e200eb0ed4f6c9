"""kopf's part: which kinds are listed and watched, and that an event goes to the mirror and its key on the queue.

Low-level primitives only: kopf writes no annotation, no finalizer and no event anywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.api.types import API_VERSION, KIND, PLURAL
from kvern_operator.desired import meta
from kvern_operator.kube import PLURALS, open_session
from kvern_operator.mirror import Mirror
from kvern_operator.queue import Key
from kvern_operator.verify import kinds
from kvern_operator.watches import Watches

SERVER_TIMEOUT = 270  # seconds, then the API server ends a watch and it goes on from where it was
PAGE = 100  # objects of a list that are in memory at a time, as text, as dicts and with kopf's tasks
SILENT = 80  # seconds without an event or bookmark after which a watch is started again (bookmarks come every minute)

Seen = Callable[[Key], None]  # something of this service has changed


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
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.queueing.exit_timeout = 1.0
    # kopf keeps a task and the whole last event of an object for so long: of thousands that are listed, all of them.
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = _NoDiffs()
    for kind in kinds(pod_monitors=True):
        if kind != KIND:
            settings.watching.label_selectors[_resource(kind)] = meta.SERVICE_LABEL  # by the API server


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies every object at every event to compare it with the one before; nobody here asks what has changed."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        """Nothing of an object is compared."""
        return None

    def fetch(self, *, body: Any) -> Any:
        """Nothing was stored."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing is stored: the resource belongs to its owner."""


def register(
    configuration: Configuration,
    watches: Watches,
    sessions: list[aiohttp.ClientSession],
    mirror: Mirror,
    seen: Seen,
    *,
    namespaced: bool,
    pod_monitors: bool,
) -> kopf.OperatorRegistry:
    """A registry of its own, so that a process can hold several operators in tests. Sessions that are opened are put
    into `sessions`: kopf closes them where it ends in peace, the caller where it does not."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, namespaced=namespaced)

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        session = open_session(configuration, [watches.trace()])
        sessions.append(session)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    for kind in kinds(pod_monitors):
        kopf.on.event(*_resource(kind), registry=registry)(_event(kind, mirror, seen))
    return registry


def _resource(kind: str) -> tuple[str, str, str]:
    """(group, version, plural) of a kind, as kopf's decorators take it."""
    api_version = {KIND: API_VERSION, "Pod": "v1"}.get(kind) or meta.API_VERSIONS[kind]
    group, _, version = api_version.rpartition("/")
    plural = {KIND: PLURAL, "Pod": "pods"}.get(kind) or PLURALS[kind]
    return group, version, plural


def _event(kind: str, mirror: Mirror, seen: Seen) -> Callable[..., Any]:
    async def event(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
        if type == "DELETED":
            key = mirror.remove(kind, str(body["metadata"]["uid"]))
        else:
            key = mirror.put(kind, body)
        if key is not None:
            seen(key)

    return event
