"""A small API server in this process: what the operator asks of a real one, over HTTP, with the same words on errors.

Objects by path, resourceVersions that grow, server-side apply that changes nothing where nothing differs (whole objects
are replaced: there is one field manager here), optimistic locking, /status, dry run, lists, watches with bookmarks,
discovery. `refuse` makes it say no, `down` makes it go away. It runs no controllers. It has a thread and a loop of its
own: kopf takes every task of its loop that is younger than itself for one of its own, and waits for it at the end.
"""

import asyncio
import copy
import itertools
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

RESOURCES = {
    "v1": {
        "pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "secrets": "Secret", "events": "Event",
        "persistentvolumeclaims": "PersistentVolumeClaim", "serviceaccounts": "ServiceAccount",
        "namespaces": "Namespace", "nodes": "Node",
    },
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "coordination.k8s.io/v1": {"leases": "Lease"},
    "events.k8s.io/v1": {"events": "Event"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "kvern.dev/v1alpha1": {"inferenceservices": "InferenceService"},
}  # fmt: skip


@dataclass
class FakeApi:
    objects: dict[str, dict] = field(default_factory=dict)  # by path
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path), as they came
    # (method, path, body) -> (status, message) to refuse with, or None
    refuse: Callable[[str, str, dict | None], tuple[int, str] | None] = lambda method, path, body: None
    down: bool = False
    url: str = ""
    _versions: itertools.count = field(default_factory=lambda: itertools.count(100))
    _watchers: list[tuple[str, str, asyncio.Queue]] = field(default_factory=list)
    _runner: web.AppRunner | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    # ------------------------------------------------------------ life

    async def start(self) -> "FakeApi":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake API server", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(), self._loop))
        return self

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self._send(None)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 10)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        await self._runner.cleanup()
        # Watches that were hushed, or whose client has gone without a word, wait for an event that does not come.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _send(self, event: dict | None, plural: str = "", namespace: str = "") -> None:
        for of, within, queue in list(self._watchers):
            if plural in ("", of) and within in ("", namespace or within):
                self._loop.call_soon_threadsafe(queue.put_nowait, event)

    # ------------------------------------------------------------ what tests do

    def put(self, path: str, obj: dict) -> dict:
        """Store an object as it is, with a new version."""
        old = self.objects.get(path)
        kept = copy.deepcopy(obj)
        metadata = kept.setdefault("metadata", {})
        metadata.setdefault("uid", (old or {}).get("metadata", {}).get("uid") or str(uuid.uuid4()))
        metadata["resourceVersion"] = str(next(self._versions))
        self.objects[path] = kept
        self._tell("MODIFIED" if old else "ADDED", path, kept)
        return kept

    def remove(self, path: str) -> None:
        obj = self.objects.pop(path)
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self._tell("DELETED", path, obj)

    def writes(self, *but: str) -> list[tuple[str, str]]:
        """Requests that were no reads, without those whose path holds one of `but`."""
        return [r for r in self.requests if r[0] != "GET" and not any(b in r[1] for b in but)]

    def of(self, plural: str) -> dict[str, dict]:
        """Name -> object of a kind."""
        return {p.rpartition("/")[2]: o for p, o in list(self.objects.items()) if p.split("/")[-2] == plural}

    def break_watches(self) -> None:
        """All watches end with "too old", as after a restart of the API server."""
        self._send({"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})

    def hush(self) -> None:
        """The watches that there are stay open and bring nothing any more, not even bookmarks."""
        self._watchers.clear()

    def _tell(self, type_: str, path: str, obj: dict) -> None:
        parts = path.split("/")
        self._send({"type": type_, "object": copy.deepcopy(obj)}, parts[-2], parts[-3])

    # ------------------------------------------------------------ HTTP

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        method, path = request.method, request.path
        self.requests.append((method, path))
        if self.down:
            request.transport.close()
            return web.Response(status=503)
        body = json.loads(await request.read() or b"null")
        refused = self.refuse(method, path, body)
        if refused is not None:
            return _status(*refused)
        if method == "GET":
            return await self._read(request, path)
        dry = request.query.get("dryRun") == "All"
        if method == "PATCH" and request.content_type == "application/merge-patch+json":
            return self._merge(path, body)
        if method == "PATCH":
            return self._apply(path, body, dry)
        if method == "POST":
            full = f"{path}/{body['metadata']['name']}"
            if full in self.objects:
                return _status(409, f'{path.rpartition("/")[2]} "{body["metadata"]["name"]}" already exists')
            return web.json_response(self.put(full, body), status=201)
        if path not in self.objects:
            return _status(404, "not found")
        if method == "PUT":
            return self._replace(path, body)
        wanted, found = (body or {}).get("preconditions", {}), self.objects[path]["metadata"]
        for name, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(name, found[name]) != found[name]:
                text = f"{word} in precondition: {wanted[name]}, {word} in object meta: {found[name]}"
                return _status(409, f"Operation cannot be fulfilled: Precondition failed: {text}")
        self.remove(path)
        return web.json_response({"kind": "Status", "status": "Success"})

    def _merge(self, path: str, body: dict) -> web.Response:
        """Annotations only, with the UID as a precondition."""
        old = self.objects.get(path)
        if old is None or body["metadata"]["uid"] != old["metadata"]["uid"]:
            return _status(409 if old else 404, "the UID in the precondition does not match")
        annotations = {**old["metadata"].get("annotations", {}), **body["metadata"]["annotations"]}
        return web.json_response(self.put(path, {**old, "metadata": {**old["metadata"], "annotations": annotations}}))

    def _replace(self, path: str, body: dict) -> web.Response:
        if body["metadata"].get("resourceVersion") not in (None, self.objects[path]["metadata"]["resourceVersion"]):
            return _status(409, "the object has been modified")
        return web.json_response(self.put(path, body))

    def _apply(self, path: str, body: dict, dry: bool) -> web.Response:
        status_only = path.endswith("/status")
        path = path.removesuffix("/status")
        old = self.objects.get(path)
        version = body["metadata"].get("resourceVersion")
        if status_only and old is None:
            return _status(404, "not found")
        if version is not None and (old is None or version != old["metadata"]["resourceVersion"]):
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        if status_only:
            new = {**old, "status": body["status"]}
        else:
            server_set = {k: old["metadata"][k] for k in ("uid", "resourceVersion") if old}
            new = {**body, "metadata": {**body["metadata"], **server_set}}
            if old and "status" in old:
                new["status"] = old["status"]
        if dry or (old is not None and new == old):
            return web.json_response(new)
        return web.json_response(self.put(path, new))

    async def _read(self, request: web.Request, path: str) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request, path)
        if path in self.objects:
            return web.json_response(self.objects[path])
        parts = path.strip("/").split("/")
        if parts[-1] in {plural for kinds in RESOURCES.values() for plural in kinds}:
            found = self._list(path, request.query.get("labelSelector", ""))
            name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
            if name and "=" not in name:
                found["items"] = [item for item in found["items"] if item["metadata"]["name"] == name]
            return web.json_response(found)
        found = _discovery(parts)
        return web.json_response(found) if found is not None else _status(404, "the server could not find it")

    def _list(self, path: str, selector: str) -> dict:
        parts = path.strip("/").split("/")
        plural, namespace = parts[-1], parts[-2] if "namespaces" in parts else ""
        items = [
            obj
            for where, obj in list(self.objects.items())
            if where.split("/")[-2] == plural
            and namespace in ("", where.split("/")[-3])
            and (not selector or selector in obj["metadata"].get("labels", {}))
        ]
        version = str(next(self._versions))
        return {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        parts = path.strip("/").split("/")
        queue: asyncio.Queue = asyncio.Queue()
        since = int(request.query.get("resourceVersion") or 0)
        for obj in self._list(path, "")["items"] if since else ():  # what has changed before the watch began
            if int(obj["metadata"]["resourceVersion"]) > since:
                queue.put_nowait({"type": "MODIFIED", "object": copy.deepcopy(obj)})
        entry = (parts[-1], parts[-2] if "namespaces" in parts else "", queue)
        self._watchers.append(entry)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        selector = request.query.get("labelSelector", "")
        try:
            while (event := await queue.get()) is not None:
                labels = event["object"].get("metadata", {}).get("labels", {})
                if selector and event["type"] != "ERROR" and selector not in labels:
                    continue
                await response.write(json.dumps(event).encode() + b"\n")
                if event["type"] == "ERROR":
                    break
        finally:
            if entry in self._watchers:
                self._watchers.remove(entry)
        return response


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": "Because", "code": code}
    return web.json_response(body, status=code)


def _discovery(parts: list[str]) -> dict | None:
    """/api, /apis and the list of a group's resources."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        groups = []
        for group_version in RESOURCES:
            group, _, version = group_version.rpartition("/")
            if group:
                this = {"groupVersion": group_version, "version": version}
                groups.append({"name": group, "versions": [this], "preferredVersion": this})
        return {"kind": "APIGroupList", "groups": groups}
    group_version = "/".join(parts[1:])
    if group_version not in RESOURCES:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "kind": kind,
            "namespaced": plural not in ("namespaces", "nodes", "customresourcedefinitions"),
            "verbs": verbs,
        }
        for plural, kind in RESOURCES[group_version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources}
