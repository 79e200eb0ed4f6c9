"""Figures from the API server's audit log. Pure: lines in, numbers out.

Who created what and when is taken from there and from nobody's clock but the API server's: the time of a service runs
from the moment its creation was received to the moment the last of its children had been answered.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Event = dict[str, Any]
READS = ("get", "list", "watch")
SERVICES = "inferenceservices"


@dataclass
class Applied:
    """One service, times in seconds since the epoch. `children` maps resource/name to when its creation had ended."""

    created: float
    children: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From its own creation to the last child's."""
        return max(self.children.values()) - self.created


def read_log(folder: Path) -> Iterator[Event]:
    """All events of a folder's audit log, the parts that were rotated away first."""
    rotated = sorted(folder.glob("audit-*.log"))
    for path in (*rotated, folder / "audit.log"):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):  # the last one may be half written
                    yield json.loads(line)


def moment(text: str) -> float:
    """A time of the audit log in seconds since the epoch."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC).timestamp()


def applied(events: Iterable[Event], operator: str, namespace: str) -> dict[str, Applied]:
    """Name -> what the operator (a user's name) created for each service of a namespace, from its creation on.

    A child belongs to the service whose name, alone or before a hyphen, its own name begins with: names of services are
    to hold no hyphen. Updates, statuses and Events are not counted: what is applied later is another pass's work."""
    found: dict[str, Applied] = {}
    later: list[tuple[str, str, float]] = []
    for event in events:
        about = event.get("objectRef") or {}
        if about.get("namespace") != namespace or about.get("subresource"):
            continue
        resource, name = about.get("resource", ""), about.get("name", "")
        if event.get("responseStatus", {}).get("code") != 201:
            continue
        if resource == SERVICES:
            found.setdefault(name, Applied(moment(event["requestReceivedTimestamp"])))
        elif event["user"]["username"] == operator and resource != "events":
            later.append((resource, name, moment(event["stageTimestamp"])))
    for resource, name, at in later:
        owner = found.get(name.partition("-")[0])
        if owner is not None:
            owner.children.setdefault(f"{resource}/{name}", at)
    return found


def writes(events: Iterable[Event], operator: str, since: float, until: float = math.inf) -> Counter[str]:
    """What the operator wrote between two moments, as `verb resource` with how often; the Lease is not counted."""
    found: Counter[str] = Counter()
    for event in events:
        about = event.get("objectRef") or {}
        if event["user"]["username"] != operator or event["verb"] in READS or about.get("resource") == "leases":
            continue
        if since <= moment(event["stageTimestamp"]) < until:
            resource = "/".join(part for part in (about.get("resource"), about.get("subresource")) if part)
            found[f"{event['verb']} {resource}"] += 1
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, `share` of 0..1. Raises ValueError where there is no value."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def summary(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """p50, p99 and the worst."""
    return {
        "p50": round(percentile(values, 0.5), digits),
        "p99": round(percentile(values, 0.99), digits),
        "max": round(max(values), digits),
    }
