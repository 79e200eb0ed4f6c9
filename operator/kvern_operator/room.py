"""How many more replicas the nodes have room for: allocatable less what is requested, as the scheduler reckons. Pure.

It is an estimate for choosing a strategy. What it does not weigh (affinity, volumes, other schedulers, quotas) shows
afterwards as a pod that finds no node, and is then taken for no room.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import ceil
from typing import Any

from kvern_operator.api.base import parse_quantity
from kvern_operator.observed import Object

Amounts = Mapping[str, Decimal]  # cpu, memory, nvidia.com/gpu, ... -> base units


@dataclass(frozen=True)
class Node:
    """A node that runs. `taints`: those that keep pods away."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    allocatable: Amounts


@dataclass(frozen=True)
class Claim:
    """What a pod asks for. `node` "": the scheduler has not found one yet."""

    uid: str
    node: str
    requests: Amounts


@dataclass(frozen=True)
class Room:
    """The nodes and everything on them at one moment."""

    nodes: tuple[Node, ...]
    claims: tuple[Claim, ...]

    @property
    def pods(self) -> frozenset[str]:
        """UIDs of all pods that were seen."""
        return frozenset(c.uid for c in self.claims)


def read_node(obj: Object) -> Node | None:
    """A v1 Node; None where no pod can go to it now."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    if spec.get("unschedulable") or not ready:
        return None
    taints = tuple(t for t in spec.get("taints") or () if t.get("effect") in ("NoSchedule", "NoExecute"))
    labels = obj["metadata"].get("labels") or {}
    return Node(obj["metadata"]["name"], labels, taints, _amounts(status.get("allocatable")))


def read_claim(obj: Object) -> Claim | None:
    """A v1 Pod; None where it holds nothing any more. One that ends holds what it has until it is gone."""
    if (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    spec = obj.get("spec") or {}
    return Claim(str(obj["metadata"].get("uid", "")), str(spec.get("nodeName") or ""), requests_of(spec))


def requests_of(spec: Mapping[str, Any]) -> Amounts:
    """What a pod spec asks a node for: all containers together, or the greediest init container where that is more."""
    total = _sum(_of_container(c) for c in spec.get("containers") or ())
    for container in spec.get("initContainers") or ():
        own = _of_container(container)
        if container.get("restartPolicy") == "Always":  # a sidecar
            total = _sum((total, own))
        total = {name: max(total.get(name, Decimal(0)), own.get(name, Decimal(0))) for name in {*total, *own}}
    return _sum((total, _amounts(spec.get("overhead"))))


def _of_container(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    return {**_amounts(resources.get("limits")), **_amounts(resources.get("requests"))}


def _amounts(values: Any) -> Amounts:
    found = {}
    for name, value in (values or {}).items():
        try:
            found[name] = parse_quantity(value)
        except ValueError:
            continue
    return found


def _sum(parts: Iterable[Amounts]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, Decimal(0)) + value
    return total


def spare_replicas(room: Room, pod: Mapping[str, Any], pods_each: int, unseen: int = 0) -> int | None:
    """How many more replicas of `pods_each` pods with this spec would find nodes. `unseen`: pods of the service that
    were made after the room was looked at. None: they ask for nothing, so that there is nothing to run out of."""
    wanted = {name: value for name, value in requests_of(pod).items() if value > 0}
    if not wanted:
        return None
    free = {node.name: _free(node, room.claims) for node in room.nodes if _takes(node, pod)}
    fitting = sum(_fitting(left, wanted) for left in free.values())
    # Who waits for a node comes first, where there is one for him.
    scarce = [name for name in wanted if "/" in name] or list(wanted)
    for claim in room.claims:
        competes = not claim.node and any(claim.requests.get(name) for name in scarce)
        if competes and any(_fitting(left, claim.requests) for left in free.values()):
            fitting -= max(ceil(claim.requests.get(name, Decimal(0)) / wanted[name]) for name in scarce)
    return max(fitting - unseen, 0) // pods_each


def _free(node: Node, claims: Iterable[Claim]) -> Amounts:
    here = [c for c in claims if c.node == node.name]
    used = _sum(c.requests for c in here)
    left = {name: value - used.get(name, Decimal(0)) for name, value in node.allocatable.items()}
    if "pods" in left:
        left["pods"] = node.allocatable["pods"] - len(here)
    return left


def _fitting(left: Amounts, wanted: Amounts) -> int:
    """How many pods of these requests go into what is left."""
    each = {name: value for name, value in wanted.items() if value > 0}
    if "pods" in left:
        each["pods"] = Decimal(1)
    return max(min((int(left.get(name, Decimal(0)) // value) for name, value in each.items()), default=0), 0)


def _takes(node: Node, pod: Mapping[str, Any]) -> bool:
    selector, tolerations = pod.get("nodeSelector") or {}, pod.get("tolerations") or ()
    if any(node.labels.get(name) != value for name, value in selector.items()):
        return False
    return all(any(_tolerates(t, taint) for t in tolerations) for taint in node.taints)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")
