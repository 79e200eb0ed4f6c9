#!/usr/bin/env python3
"""A control plane of one Python process, for profiles of the operator where etcd and kwok are not at hand.

It is the API server that the operator's unit tests use, with what makes it large: objects found by kind, lists in
pages, managedFields and defaults of real size, an audit log, and the controllers' and kubelets' work done at once, by
making ready pods of every StatefulSet and Deployment. Its times say nothing of a real API server's.

    replay.py FOLDER      prints its URL, writes FOLDER/audit.log, runs until it is killed
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "operator"))
from aiohttp import web
from fake_apiserver import RESOURCES, FakeApi

Object = dict[str, Any]
OPERATOR = "system:serviceaccount:kvern-system:kvern-operator"
PLURALS = {plural for kinds in RESOURCES.values() for plural in kinds}
VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Shelves(MutableMapping[str, Object]):
    """Objects by path, and by kind: a list of one kind does not look at the others."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, Object]] = {}

    @staticmethod
    def _plural(path: str) -> str:
        parts = path.split("/")
        return parts[-2] if len(parts) > 1 else ""

    def __getitem__(self, path: str) -> Object:
        return self.of[self._plural(path)][path]

    def __setitem__(self, path: str, obj: Object) -> None:
        self.of.setdefault(self._plural(path), {})[path] = obj

    def __delitem__(self, path: str) -> None:
        del self.of[self._plural(path)][path]

    def __iter__(self) -> Iterator[str]:
        return (path for shelf in self.of.values() for path in shelf)

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))


class ReplayApi(FakeApi):
    """See above. Runs in the loop that calls `listen`."""

    def __init__(self, audit: Path) -> None:
        super().__init__()
        self.objects = Shelves()
        self._audit = audit.open("a", buffering=1)
        self._pods = 0

    async def listen(self) -> str:
        self._loop = asyncio.get_running_loop()
        await self._listen()
        return self.url

    # ------------------------------------------------------------ objects of real size

    def put(self, path: str, obj: Object) -> Object:
        parts = path.strip("/").split("/")
        metadata = obj.setdefault("metadata", {})
        metadata.setdefault("creationTimestamp", now()[:19] + "Z")
        metadata.setdefault("generation", 1)
        if "namespaces" in parts[:-2]:
            metadata.setdefault("namespace", parts[parts.index("namespaces") + 1])
        metadata["managedFields"] = [_owned(obj, "kvern"), *([_owned(obj, "kubelet")] if parts[-2] == "pods" else [])]
        kept = super().put(path, obj)
        if parts[-2] in ("statefulsets", "deployments"):
            self._make_pods(path, kept)
        return kept

    def remove(self, path: str) -> None:
        owner = self.objects[path]["metadata"]["uid"]
        super().remove(path)
        if path.split("/")[-2] in ("statefulsets", "deployments"):
            for where, pod in list(self.objects.of.get("pods", {}).items()):
                if pod["metadata"]["ownerReferences"][0]["uid"] == owner:
                    super().remove(where)

    def _make_pods(self, path: str, owner: Object) -> None:
        parts = path.split("/")
        namespace, name, stateful = parts[-3], parts[-1], parts[-2] == "statefulsets"
        for index in range(owner["spec"]["replicas"]):
            pod = f"{name}-{index}" if stateful else f"{name}-6f7d8c9b5-{index:05d}"
            where = f"/api/v1/namespaces/{namespace}/pods/{pod}"
            if where not in self.objects:
                self._pods += 1
                address = f"198.18.{self._pods // 250}.{self._pods % 250 + 1}"
                self.put(where, _ready_pod(pod, namespace, owner, address, stateful))

    # ------------------------------------------------------------ HTTP

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        began = now()
        answer = await super()._serve(request)
        self.requests.clear()
        if request.method in VERBS:
            body = json.loads(await request.read() or b"{}")
            self._note(request, body.get("metadata", {}).get("name", ""), answer.status, began)
        return answer

    def _note(self, request: web.Request, created: str, status: int, began: str) -> None:
        parts = request.path.strip("/").split("/")
        rest = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts[:-1] else parts[-1:]
        names = dict(zip(("resource", "name", "subresource"), rest, strict=False))
        if request.method == "POST" and "name" not in names:
            names["name"] = created
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts[:-1] else ""
        user = OPERATOR if "kvern-operator" in request.headers.get("User-Agent", "") else "admin"
        event = {
            "verb": VERBS[request.method],
            "user": {"username": user},
            "objectRef": {"namespace": namespace, **names},
            "responseStatus": {"code": status},
            "requestReceivedTimestamp": began,
            "stageTimestamp": now(),
        }
        self._audit.write(json.dumps(event) + "\n")

    def _apply(self, path: str, body: Object, dry: bool) -> web.Response:
        new = path not in self.objects and not path.endswith("/status")
        old = self.objects.get(path, {})
        if old and not path.endswith("/status"):
            for name in ("creationTimestamp", "generation", "managedFields"):
                body["metadata"].setdefault(name, old["metadata"][name])
        answer = super()._apply(path, body, dry)
        if new and answer.status == 200:
            answer.set_status(201)
        return answer

    async def _read(self, request: web.Request, path: str) -> web.StreamResponse:
        query, plural = request.query, path.rpartition("/")[2]
        if query.get("watch") == "true" or path in self.objects or plural not in PLURALS:
            return await super()._read(request, path)
        shelf = self.objects.of.get(plural, {})
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        if name and "=" not in name:
            found = [obj for obj in [shelf.get(f"{path}/{name}")] if obj is not None]
            return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found})
        selector = query.get("labelSelector", "")
        within = f"{path}/" if "/namespaces/" in path else ""
        paths = [p for p, o in shelf.items() if p.startswith(within) and (not selector or selector in _labels(o))]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(paths)
        items = [shelf[p] for p in paths[start : start + limit]]
        if "PartialObjectMetadata" in request.headers.get("Accept", ""):
            items = [{"metadata": obj["metadata"]} for obj in items]
        more = str(start + limit) if start + limit < len(paths) else ""
        kind = next(kinds[plural] for kinds in RESOURCES.values() if plural in kinds)
        group_version = "/".join(path.strip("/").split("/namespaces/")[0].split("/")[1:3]) if "/apis/" in path else "v1"
        metadata = {"resourceVersion": str(next(self._versions)), "continue": more}
        page = {"kind": f"{kind}List", "apiVersion": group_version, "metadata": metadata, "items": items}
        return web.json_response(page)


def _labels(obj: Object) -> Object:
    found: Object = obj["metadata"].get("labels") or {}
    return found


def _owned(obj: Object, manager: str) -> Object:
    """managedFields as server-side apply writes them: every field by its name."""

    def fields(value: Any) -> Object:
        if isinstance(value, dict):
            return {f"f:{k}": fields(v) for k, v in value.items()}
        if isinstance(value, list):
            found: Object = {}
            for item in value:
                named = isinstance(item, dict) and "name" in item
                found["k:" + json.dumps({"name": item["name"]}) if named else "v:" + json.dumps(item)] = fields(item)
            return found
        return {}

    owned = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    named = {k: v for k, v in obj["metadata"].items() if k in ("labels", "annotations", "ownerReferences")}
    return {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": "v1",
        "time": obj["metadata"]["creationTimestamp"],
        "fieldsType": "FieldsV1",
        "fieldsV1": fields({"metadata": named, **owned}),
    }


def _ready_pod(name: str, namespace: str, owner: Object, address: str, stateful: bool) -> Object:
    """The pod that a controller makes of a template, as a kubelet reports it once it is ready."""
    template, stamp = json.loads(json.dumps(owner["spec"]["template"])), now()[:19] + "Z"
    reference = {"apiVersion": "apps/v1", "kind": "StatefulSet" if stateful else "ReplicaSet", "name": name}
    reference |= {"uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
    labels = template["metadata"]["labels"]
    labels |= {"apps.kubernetes.io/pod-index": "0"} if stateful else {"pod-template-hash": "6f7d8c9b5"}
    spec = {
        "dnsPolicy": "ClusterFirst",
        "nodeName": f"fake-{len(name) % 25}",
        "preemptionPolicy": "PreemptLowerPriority",
        "priority": 0,
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
        "serviceAccount": template["spec"]["serviceAccountName"],
        "tolerations": [
            {"key": f"node.kubernetes.io/{k}", "effect": "NoExecute", "operator": "Exists", "tolerationSeconds": 300}
            for k in ("not-ready", "unreachable")
        ],
        **template["spec"],
    }
    conditions = ("PodScheduled", "Initialized", "Ready", "ContainersReady", "PodReadyToStartContainers")
    status = {
        "conditions": [
            {
                "type": type_,
                "status": "True",
                "lastTransitionTime": stamp,
                "lastProbeTime": None,
                "observedGeneration": 1,
            }
            for type_ in conditions
        ],
        "containerStatuses": [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": f"sha256:{uuid.uuid4().hex}",
                "containerID": f"containerd://{uuid.uuid4().hex}{uuid.uuid4().hex}",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": stamp}},
                "lastState": {},
                "volumeMounts": c.get("volumeMounts", []),
            }
            for c in spec["containers"]
        ],
        "hostIP": "198.19.0.1",
        "hostIPs": [{"ip": "198.19.0.1"}],
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "qosClass": "Burstable",
        "startTime": stamp,
    }
    metadata = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


async def main(folder: Path) -> None:
    api = ReplayApi(folder / "audit.log")
    print(await api.listen(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
