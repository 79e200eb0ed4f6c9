"""`kvern logs NAME`: the logs of a service's pods in one stream, each line with the pod that said it.

Lines that are there are merged by time. With --follow every pod is read by a thread of its own, pods that come later
and containers that start again are taken up, and lines are printed as they arrive.
"""

import argparse
import contextlib
import heapq
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern_cli import place
from kvern_cli.picture import COMPONENT_LABEL, ENGINE, REPLICA_LABEL, ROUTER, SERVICE_LABEL

if TYPE_CHECKING:
    from kvern_cli.kube.gather import Target

COLOURS = ("36", "33", "35", "32", "34", "96", "93", "95")  # of prefixes, on a terminal
LOOK_SECONDS = 2.0  # between looks for new pods, and before a container that ended is asked for again
LOCAL_SECONDS = 0.2  # between looks at local files


@dataclass(frozen=True)
class Source:
    """One log: a pod's container. `state` is what keeps it from having one, "" where nothing does."""

    pod: str
    container: str
    state: str = ""


def logs(args: argparse.Namespace) -> int:
    """Print logs; 1 where there are none to print. Raises NotFound, KubeError, KubeconfigError."""
    local = place.local_states(args)
    if place.looks_at_cluster(args, local):
        return _cluster_logs(args, place.cluster_target(args))
    state = place.one_local(args, local)
    return _local_logs(args, state.document["pods"], state.folder)


# ---------------------------------------------------------------- choosing (pure)


def wanted_pods(
    pods: Iterable[Mapping[str, Any]], component: str | None, replica: str | None, name: str
) -> list[Source]:
    """The logs that are meant, engines first. `replica`: 0, or the name of its StatefulSet, or of a pod."""
    found = []
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        part, owner = labels.get(COMPONENT_LABEL, ""), labels.get(REPLICA_LABEL, "")
        if part not in ((component,) if component else (ENGINE, ROUTER)):
            continue
        if replica is not None and not is_replica(replica, name, owner, pod["metadata"]["name"]):
            continue
        found.append((part != ENGINE, pod["metadata"]["name"], part, pod))
    return [
        Source(pod_name, _container(pod, part), _state(pod, part)) for _, pod_name, part, pod in sorted(found, key=_key)
    ]


def _key(entry: tuple[bool, str, str, Any]) -> tuple[bool, list[tuple[int, str]]]:
    from kvern_cli.picture import natural

    return entry[0], natural(entry[1])


def is_replica(wanted: str, service: str, owner: str, pod: str) -> bool:
    """Whether --replica means this pod."""
    return wanted in (owner, pod) or (wanted.isdigit() and owner == f"{service}-r{wanted}")


def _container(pod: Mapping[str, Any], component: str) -> str:
    names = [c["name"] for c in (pod.get("spec") or {}).get("containers") or ()]
    return component if component in names or not names else names[0]


def _state(pod: Mapping[str, Any], component: str) -> str:
    """Why there is no log yet."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        if container.get("name") == _container(pod, component):
            waiting = (container.get("state") or {}).get("waiting")
            if waiting and not container.get("lastState"):
                return str(waiting.get("reason") or "waiting")
            return ""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Unschedulable")
    phase = str(status.get("phase") or "Pending")
    return "" if phase in ("Running", "Succeeded", "Failed") else phase


def split_time(line: str) -> tuple[str, str]:
    """A log line as the API server gives it with timestamps=true -> (time, line)."""
    stamp, space, rest = line.partition(" ")
    if space and len(stamp) >= 20 and stamp[4:5] == "-" and stamp[10:11] == "T":
        return stamp, rest
    return "", line


def merged(streams: Iterable[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, str, str]]:
    """(pod, time, line) of several logs, by time; lines without one stay behind the line before them."""

    def timed(order: int, pod: str, lines: Sequence[str]) -> Iterator[tuple[str, int, str, str]]:
        last = ""
        for line in lines:
            stamp, text = split_time(line)
            last = max(last, stamp)
            yield last, order, pod, text

    found = [timed(i, pod, lines) for i, (pod, lines) in enumerate(streams)]
    for stamp, _, pod, text in heapq.merge(*found, key=lambda entry: entry[:2]):
        yield pod, stamp, text


class Printer:
    """Prints lines with their pod before them. Pods keep their colour."""

    def __init__(self, *, prefix: bool, timestamps: bool, colour: bool, out: Callable[[str], None]) -> None:
        self._prefix, self._timestamps, self._colour, self._out = prefix, timestamps, colour, out
        self._colours: dict[str, str] = {}
        self._width = 0

    def expect(self, pods: Iterable[str]) -> None:
        """Align to the longest of these names."""
        self._width = max([self._width, *(len(pod) for pod in pods)])

    def line(self, pod: str, stamp: str, text: str) -> None:
        """One line."""
        head = ""
        if self._prefix:
            head = f"{pod.ljust(self._width)} | "
            if self._colour:
                code = self._colours.setdefault(pod, COLOURS[len(self._colours) % len(COLOURS)])
                head = f"\x1b[{code}m{head}\x1b[0m"
        self._out(head + (f"{stamp} " if self._timestamps and stamp else "") + text)


def _printer(args: argparse.Namespace, pods: Sequence[str], *, more: bool) -> Printer:
    prefix = args.prefix if args.prefix is not None else len(pods) > 1 or more
    printer = Printer(
        prefix=prefix,
        timestamps=args.timestamps,
        colour=sys.stdout.isatty(),
        out=lambda text: print(text, flush=True),
    )
    printer.expect(pods)
    return printer


def _say(text: str) -> None:
    print(f"kvern logs: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- a cluster


def _cluster_logs(args: argparse.Namespace, where: "Target") -> int:
    from kvern_cli.kube.gather import get_service

    sources = _sources(args, where)
    if not sources:
        get_service(where.kube, where.namespace, args.name)  # says what is wrong where it does not exist
        if not args.follow:
            _say(f"{args.name} has no such pods ({_meant(args)}); why: kvern explain{_flag(args)} {args.name}")
            return 1
    place.say_place(where.place)
    if args.follow:
        return _follow(args, where, sources)
    return _print_all(args, where, sources)


def _meant(args: argparse.Namespace) -> str:
    parts = [args.component or "engines and routers"]
    return ", ".join(parts + ([f"replica {args.replica}"] if args.replica is not None else []))


def _flag(args: argparse.Namespace) -> str:
    return f" -n {args.namespace}" if args.namespace else ""


def _sources(args: argparse.Namespace, where: "Target") -> list[Source]:
    path = f"api/v1/namespaces/{where.namespace}/pods"
    selector = f"{SERVICE_LABEL}={args.name}"
    pods = where.kube.list(path, f"list pods in namespace {where.namespace}", labelSelector=selector)
    return wanted_pods(pods, args.component, args.replica, args.name)


def _read(where: "Target", source: Source, **params: Any) -> Iterator[str]:
    path = f"api/v1/namespaces/{where.namespace}/pods/{source.pod}/log"
    follow = bool(params.pop("follow", False))
    what = f"read the log of pod {source.pod}"
    return where.kube.lines(path, what, follow=follow, container=source.container, timestamps="true", **params)


def _print_all(args: argparse.Namespace, where: "Target", sources: list[Source]) -> int:
    from kvern_cli.kube.errors import KubeError

    streams, failed = [], 0
    params = {"tailLines": None if args.tail < 0 else args.tail, "sinceSeconds": args.since}
    for source in sources:
        if source.state and not args.previous:
            _say(f"{source.pod} has no log yet: {source.state}")
            continue
        try:
            lines = list(_read(where, source, previous="true" if args.previous else None, **params))
            streams.append((source.pod, lines))
        except KubeError as error:
            if args.previous and "previous terminated container" in str(error):
                _say(f"{source.pod} has not been started again, so there is no earlier log")
            else:
                failed += 1
                _say(f"{source.pod}: {error}")
    printer = _printer(args, [source.pod for source in sources], more=False)
    for pod, stamp, text in merged(streams):
        printer.line(pod, stamp, text)
    return 1 if failed or not streams else 0


def _follow(args: argparse.Namespace, where: "Target", sources: list[Source]) -> int:
    """Until Ctrl-C."""
    following = _Following(args, where, sources)
    while True:
        following.look()
        following.print_for(LOOK_SECONDS)


class _Following:
    """A reader a pod, each in a thread, and one printer. `look` starts what is missing: a reader ends with its
    container, and is started again where the pod goes on with another one."""

    def __init__(self, args: argparse.Namespace, where: "Target", sources: list[Source]) -> None:
        self._args, self._where, self._sources = args, where, sources
        self._lines: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
        self._printer = _printer(args, [s.pod for s in sources], more=args.replica is None)
        self._readers: dict[str, threading.Thread] = {}
        self._told: set[tuple[str, str]] = set()
        self._last: dict[str, str] = {}  # the time of the last line, by pod
        self._looked = False

    def look(self) -> None:
        """Read every pod that has a log and that nobody reads."""
        if self._looked:
            self._sources = _again(self._args, self._where, self._sources)
        self._printer.expect(source.pod for source in self._sources)
        for source in self._sources:
            reader = self._readers.get(source.pod)
            if reader is not None and reader.is_alive():
                continue
            if source.state:
                self._tell(source)
                continue
            target = threading.Thread(target=self._read, args=(source, self._from(source)), daemon=True)
            self._readers[source.pod] = target
            target.start()
        self._looked = True

    def print_for(self, seconds: float) -> None:
        """Print what comes."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._printer.line(*self._lines.get(timeout=rest))

    def _tell(self, source: Source) -> None:
        if (source.pod, source.state) not in self._told:
            self._told.add((source.pod, source.state))
            _say(f"{source.pod} has no log yet: {source.state}")

    def _from(self, source: Source) -> dict[str, Any]:
        """Where to begin: behind what was read, with the wanted tail, or (pods that came later) at the start."""
        if source.pod in self._last:
            return {"sinceTime": self._last[source.pod]}
        tail = None if self._looked or self._args.tail < 0 else self._args.tail
        return {"tailLines": tail, "sinceSeconds": self._args.since}

    def _read(self, source: Source, begin: dict[str, Any]) -> None:
        """Lines of one container, until it ends. sinceTime counts in whole seconds: what was seen is left out."""
        from kvern_cli.kube.errors import KubeError

        seen = self._last.get(source.pod, "")
        # What keeps it from reading is seen at the next look: the pod or its container is gone, or the server is.
        with contextlib.suppress(KubeError):
            for line in _read(self._where, source, follow=True, **begin):
                stamp, text = split_time(line)
                if seen and stamp and stamp <= seen:
                    continue
                self._last[source.pod] = max(stamp, self._last.get(source.pod, ""))
                self._lines.put((source.pod, stamp, text))


def _again(args: argparse.Namespace, where: "Target", before: list[Source]) -> list[Source]:
    from kvern_cli.kube.errors import KubeError

    try:
        return _sources(args, where)
    except KubeError as error:
        if error.kind != "unreachable":
            raise
        return before


# ---------------------------------------------------------------- this machine


def _local_logs(args: argparse.Namespace, pods: Sequence[Mapping[str, Any]], folder: Path) -> int:
    name = args.name
    chosen = [
        pod
        for pod in sorted(pods, key=lambda p: (p["component"] != ENGINE, p["name"]))
        if args.component in (None, pod["component"])
        and (args.replica is None or is_replica(args.replica, name, pod["replica"], pod["name"]))
    ]
    if not chosen:
        _say(f"{name} has no such pods ({_meant(args)}) on this machine; its logs are in {folder / 'logs'}")
        return 1
    if args.since or args.timestamps or args.previous:
        _say("on this machine there are no times beside the lines, and a file holds all runs of its pod")
    place.say_place("this machine")
    printer = _printer(args, [pod["name"] for pod in chosen], more=False)
    offsets: dict[str, int] = {}
    for pod in chosen:
        text = _text(Path(pod["log"]))
        text = text[: text.rfind(b"\n") + 1] if args.follow else text
        offsets[pod["name"]] = len(text)
        lines = text.decode("utf-8", "replace").splitlines()
        for line in lines if args.tail < 0 else lines[len(lines) - min(args.tail, len(lines)) :]:
            printer.line(pod["name"], "", line)
    while args.follow:
        time.sleep(LOCAL_SECONDS)
        for pod in chosen:
            text = _text(Path(pod["log"]), offsets[pod["name"]])
            whole = text[: text.rfind(b"\n") + 1]
            offsets[pod["name"]] += len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                printer.line(pod["name"], "", line)
    return 0


def _text(path: Path, offset: int = 0) -> bytes:
    """A log file from a place on; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""
