"""`kvern status`, `explain` and `down`: thin; the words come from tables.py and explain.py."""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from kvern_cli import place
from kvern_cli.local.state import LocalState, read_all, read_state
from kvern_cli.render import Block, Table, fancy, plain, show
from kvern_cli.tables import COLUMNS, service_blocks, service_row, services_table

LONGEST_STOP = 400.0  # seconds that `down` waits: a drain and a little
WATCH_SECONDS = 1.0

View = Callable[[], tuple[list[Block], str]]  # what to show, and of which place


def status(args: argparse.Namespace) -> int:
    """Print one service or all; 1 where the named one is not known."""
    if args.watch and args.output in ("yaml", "json"):
        print(f"kvern status: -w shows a table; leave -o {args.output} out", file=sys.stderr)
        return 2
    local = place.local_states(args)
    view = _cluster_view(args) if place.looks_at_cluster(args, local) else _local_view(args)
    if args.output in ("yaml", "json"):
        _print_objects(_objects(args, local), args.output)
        return 0
    if args.watch:
        return _watch(view)
    blocks, said = view()
    if not blocks:
        print(said)
        return 0
    place.say_place(said)
    show(blocks)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Say in sentences how a service stands, and why; with --what-if what the model expects. 2 where that is wrong."""
    from kvern_cli.decisions import decision_blocks
    from kvern_cli.explain import blocks
    from kvern_cli.explain import explain as explained
    from kvern_cli.whatif import WhatIfError, parse, what_if

    try:
        asked = parse(args.what_if) if args.what_if is not None else None
        picture = place.picture_of(args)
        found = what_if(picture, asked) if asked else [*blocks(explained(picture)), *decision_blocks(picture)]
    except WhatIfError as error:
        print(f"kvern explain: {error}", file=sys.stderr)
        return 2
    place.say_place(picture.place)
    show(found)
    return 0


# ---------------------------------------------------------------- two places


def _cluster_view(args: argparse.Namespace) -> View:
    from kvern_cli.kube.gather import gather, list_services

    where = place.cluster_target(args)

    def one() -> tuple[list[Block], str]:
        return service_blocks(gather(where, args.name)), where.place

    def every() -> tuple[list[Block], str]:
        services = list_services(where.kube, None if args.all_namespaces else where.namespace)
        said = f"{where.kube.access.place}, all namespaces" if args.all_namespaces else where.place
        if not services:
            return [], f"{said}: no inferenceservices; apply one, such as examples/smollm2.yaml"
        wide = args.output == "wide"
        return [services_table(services, datetime.now(UTC), namespaces=args.all_namespaces, wide=wide)], said

    return one if args.name else every


def _local_view(args: argparse.Namespace) -> View:
    def one() -> tuple[list[Block], str]:
        picture = place.picture_of_local(place.one_local(args, place.local_states(args)))
        return service_blocks(picture), "this machine"

    def every() -> tuple[list[Block], str]:
        found = [state for state in place.local_states(args) if state.running]
        if not found:
            return [], "nothing runs on this machine; start a service with: kvern up FILE"
        rows = tuple(tuple(_local_row(state)) for state in found)
        more: list[Block] = []
        if args.output == "wide":
            for state in found:
                more += service_blocks(place.picture_of_local(state))[1:]
        return [Table(COLUMNS, rows), *more], "this machine"

    return one if args.name else every


def _local_row(state: LocalState) -> Any:
    document = state.document
    return service_row(document["service"], datetime.now(UTC), running=state.running, created=document["created"])


def _objects(args: argparse.Namespace, local: list[LocalState]) -> Any:
    """The resource itself, or a List of them."""
    if place.looks_at_cluster(args, local):
        from kvern_cli.kube.gather import get_service, list_services

        where = place.cluster_target(args)
        if args.name:
            return get_service(where.kube, where.namespace, args.name)
        return _list(list_services(where.kube, None if args.all_namespaces else where.namespace))
    if args.name:
        return place.one_local(args, local).document["service"]
    return _list([state.document["service"] for state in local if state.running])


def _list(items: Sequence[Any]) -> Any:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def _print_objects(document: Any, output: str) -> None:
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        import yaml

        print(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120), end="")


# ---------------------------------------------------------------- watching


def _watch(view: View) -> int:
    """Until Ctrl-C: a table that changes on a terminal; elsewhere the whole again whenever something has changed."""
    blocks, said = view()  # what is wrong at the start ends it
    place.say_place(said)
    with _Interrupts() as interrupts:
        if sys.stdout.isatty():
            _watch_terminal(view, blocks, interrupts)
        seen: list[str] = []
        while True:
            lines = plain(blocks)
            if _timeless(lines) != seen:
                seen = _timeless(lines)
                print("\n".join(lines), flush=True)
            interrupts.sleep(WATCH_SECONDS)
            blocks = _again(view) or blocks


def _watch_terminal(view: View, blocks: list[Block], interrupts: "_Interrupts") -> None:
    from rich.live import Live

    with Live(fancy(blocks), auto_refresh=False) as live:
        while True:
            interrupts.sleep(WATCH_SECONDS)
            blocks = _again(view) or blocks
            live.update(fancy(blocks), refresh=True)


class _Interrupts:
    """Ctrl-C raises KeyboardInterrupt wherever the program happens to be, and where that is a destructor or a weak
    reference's callback Python drops it. So it is noted as well, and raised again before the next sleep."""

    def __init__(self) -> None:
        self._noted = False
        self._before: Any = None

    def __enter__(self) -> "_Interrupts":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self._noted = True
        raise KeyboardInterrupt

    def sleep(self, seconds: float) -> None:
        """Raises KeyboardInterrupt where Ctrl-C came before or meanwhile."""
        if not self._noted:
            time.sleep(seconds)
        if self._noted:
            raise KeyboardInterrupt


def _again(view: View) -> list[Block] | None:
    """A later look; None where the cluster does not answer just now (it is tried again)."""
    from kvern_cli.kube.errors import KubeError

    try:
        return view()[0]
    except KubeError as error:
        if error.kind != "unreachable":
            raise
        return None


def _timeless(lines: list[str]) -> list[str]:
    """Without ages, which change all the time."""
    import re

    return [re.sub(r"\b(\d+[smhd])+\b *", "", line) for line in lines]


# ---------------------------------------------------------------- down


def down(args: argparse.Namespace) -> int:
    """Stop a service: SIGTERM to its `kvern up`, which drains. Waits until it has ended."""
    running = [state for state in place.local_states(args) if state.running]
    if not running:
        text = place.unknown_locally(args.name, read_all()) if args.name else "nothing runs"
        print(f"kvern down: {text}", file=sys.stderr)
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
