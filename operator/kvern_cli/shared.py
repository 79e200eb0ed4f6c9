"""The GPUs of a namespace that services share (ConfigMap kvern-budget), as `kvern explain --what-if` weighs them. Pure:
objects of the API server in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIG_MAP, ENTRY = "kvern-budget", "gpus"  # as in the operator's autoscale/budgets.py


@dataclass(frozen=True)
class Sharer:
    """Another service of the namespace: GPUs that its replicas have, and how many of them its minimum keeps."""

    name: str
    gpus: int
    least: int
    priority: int


@dataclass(frozen=True)
class Shared:
    """The budget, None where `unknown` says why it is not known; the other services, and this one's priority."""

    gpus: int | None
    unknown: str = ""
    others: tuple[Sharer, ...] = ()
    priority: int = 0

    def free(self, own: int) -> int:
        """GPUs that nobody has, where this service has `own`."""
        return max((self.gpus or 0) - own - sum(o.gpus for o in self.others), 0)

    def lenders(self) -> list[Sharer]:
        """Services of lower priority that have more than their minimum keeps."""
        return [o for o in self.others if o.priority < self.priority and o.gpus > o.least]


def shared_of(config_map: Mapping[str, Any], services: Iterable[Mapping[str, Any]], name: str) -> Shared:
    """From the ConfigMap and the services of its namespace, `name` among them."""
    text = str((config_map.get("data") or {}).get(ENTRY, "")).strip()
    if not text.isdecimal():
        return Shared(None, f'ConfigMap {CONFIG_MAP}: {ENTRY}: "{text}" is not a whole number of GPUs')
    found = {sharer.name: sharer for sharer in map(_sharer, services)}
    own = found.pop(name, None)
    others = tuple(sorted((s for s in found.values() if s.gpus), key=lambda s: s.name))
    return Shared(int(text), others=others, priority=own.priority if own else 0)


def _sharer(service: Mapping[str, Any]) -> Sharer:
    spec, status = service.get("spec") or {}, service.get("status") or {}
    scaling, resources = spec.get("autoscaling") or {}, spec.get("resources") or {}
    each = int(resources.get("gpusPerPod", 1)) * int(resources.get("nodesPerReplica", 1))
    gpus = int((status.get("capacity") or {}).get("gpus", 0))
    decided = scaling.get("mode") == "Internal"  # of others the number is not the operator's to lower
    least = each * int(scaling.get("minReplicas", 1)) if decided else gpus
    return Sharer(service["metadata"]["name"], gpus, least, int(scaling.get("priority", 0)))
