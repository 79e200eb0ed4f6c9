"""`kvern status` and `kvern down`: what the running `kvern up`s wrote, in the words and columns of kubectl."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from kvern_cli.local.state import LocalState, read_all, read_state
from kvern_operator.api.base import parse_time

COLUMNS = ("NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "URL", "AGE")
LONGEST_STOP = 400.0  # seconds that `down` waits: a drain and a little


def status(args: argparse.Namespace) -> int:
    """Print one service or all; 1 where the named one is not known."""
    found = _chosen(args)
    if args.name is not None and not found:
        print(f"kvern status: {_unknown(args.name)}", file=sys.stderr)
        return 1
    if args.name is None:
        found = [state for state in found if state.running]
        if not found and args.output in (None, "wide"):
            print("nothing runs on this machine; start a service with: kvern up FILE")
            return 0
    if args.output in ("yaml", "json"):
        _print_objects(found, args.output, single=args.name is not None)
        return 0
    print("\n".join(table([COLUMNS, *(_columns(state) for state in found)])))
    if args.name is not None or args.output == "wide":
        for state in found:
            print()
            print("\n".join(_details(state)))
    return 0


def _chosen(args: argparse.Namespace) -> list[LocalState]:
    return [
        state for state in read_all() if args.name in (None, state.name) and args.namespace in (None, state.namespace)
    ]


def _unknown(name: str) -> str:
    running = sorted(state.name for state in read_all() if state.running)
    hint = f"running: {', '.join(running)}" if running else "nothing runs; start it with: kvern up FILE"
    return f"no service {name} on this machine ({hint})"


def _print_objects(found: Sequence[LocalState], output: str, *, single: bool) -> None:
    services = [state.document["service"] for state in found]
    document: Any = (
        services[0] if single and len(services) == 1 else {"apiVersion": "v1", "kind": "List", "items": services}
    )
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        import yaml

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120), end="")


# ---------------------------------------------------------------- words


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as kubectl aligns them."""
    listed = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]


def age(since: str, now: datetime | None = None) -> str:
    """kubectl's short ages: 42s, 5m10s, 3h4m, 2d."""
    seconds = max(0, int(((now or datetime.now(UTC)) - parse_time(since)).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60}s" if seconds < 600 else f"{seconds // 60}m"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60}m"
    return f"{seconds // 86400}d"


def _columns(state: LocalState) -> list[str]:
    service = state.document["service"]
    found = service["status"]
    ready: dict[str, str] = next((c for c in found["conditions"] if c["type"] == "Ready"), {})
    shown = [
        service["metadata"]["name"],
        found.get("model", ""),
        found.get("parallelism", {}).get("current", "<none>"),
        found.get("readyReplicas", 0) if state.running else 0,
        found.get("desiredReplicas", 0),
        found.get("capacity", {}).get("gpus", 0),
        ready.get("reason", "<none>") if state.running else "NotRunning",
        found.get("url", "") if state.running else "<none>",
        age(state.document["created"]),
    ]
    return [str(cell) for cell in shown]


def _details(state: LocalState) -> Iterable[str]:
    document = state.document
    found, metadata = document["service"]["status"], document["service"]["metadata"]
    yield f"Name:         {metadata['name']}"
    yield f"Namespace:    {metadata['namespace']}"
    yield f"File:         {document['file']}"
    yield f"Generation:   {metadata['generation']} (observed {found['observedGeneration']})"
    yield f"Revision:     {found.get('revision', {}).get('current', '<none>')}"
    if not state.running:
        yield f"Stopped:      {document.get('stopped', 'without a word; see its logs')} ({state.folder / 'logs'})"
        return
    yield f"Process:      kvern up, pid {state.pid}"
    decision = found.get("autoscaling", {}).get("lastDecision")
    if decision:
        step = f"{decision['from']} -> {decision['to']} replicas"
        yield f"Last decision: {step} at {decision['time']}: {decision['reason']}"
    tokens = found.get("capacity", {}).get("kvTokensPerReplica")
    if tokens:
        yield f"KV cache:     {tokens:,} tokens a replica"
    yield ""
    yield "Conditions:"
    rows = [("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE")]
    rows += [
        (c["type"], c["status"], c["reason"], age(c["lastTransitionTime"]), c.get("message", ""))
        for c in found["conditions"]
    ]
    yield from (f"  {line}" for line in table(rows))
    yield ""
    yield "Pods:"
    pods = [("NAME", "READY", "RESTARTS", "IN FLIGHT", "ADDRESS", "PID", "STATE", "LOG")]
    for pod in document["pods"]:
        load = "-" if pod["inFlight"] is None else str(pod["inFlight"])
        yes = "1/1" if pod["ready"] else "0/1"
        pods.append(
            (
                pod["name"],
                yes,
                str(pod["restarts"]),
                load,
                pod["address"] or "-",
                str(pod["pid"] or "-"),
                pod["doing"],
                pod["log"],
            )
        )
    yield from (f"  {line}" for line in table(pods))


# ---------------------------------------------------------------- down


def down(args: argparse.Namespace) -> int:
    """Stop a service: SIGTERM to its `kvern up`, which drains. Waits until it has ended."""
    running = [state for state in _chosen(args) if state.running]
    if not running:
        print(f"kvern down: {_unknown(args.name)}" if args.name else "kvern down: nothing runs", file=sys.stderr)
        return 1
    if len(running) > 1:
        names = ", ".join(f"{s.namespace}/{s.name}" for s in running)
        print(f"kvern down: which of {names}? Name one (and --namespace)", file=sys.stderr)
        return 2
    (state,) = running
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + LONGEST_STOP
    while time.monotonic() < deadline:
        now = read_state(state.folder)
        if now is None or not now.running:
            print(f"{state.name} has stopped")
            return 0
        time.sleep(0.1)
    print(f"kvern down: {state.name} still drains (pid {state.pid})", file=sys.stderr)
    return 1
