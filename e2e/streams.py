"""The load of the tests of events: client/load.py started in the client pod, and its report cut up by event.

A wrong request belongs to the event under way, or the last one before, when it ended. The service under load runs on
the simulated device: its pace and its texts are known, whatever the machine is like.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kit
from kit import Client, Object, Service, eventually

FULL = bool(os.environ.get("KVERN_E2E_FULL"))
STREAMS = 50
MODEL = "load"
TOKENS = 650 if FULL else 200  # of a stream: a minute in full runs, else 20 seconds
PACE = {"device": "sim", "sim-speed": "0.05"}  # ten tokens a second
FAST = {"device": "sim", "sim-speed": 20}
STREAM_SECONDS = 75 if FULL else 30  # within which a stream ends that nobody disturbs


@dataclass
class Event:
    """What was done to the service. Times are seconds since 1970; `until`: the desired state was reached.

    `struck`: when something was killed. What had begun on it may fail; `blind`: and what begins within so many seconds,
    while the cluster itself still sends clients there.
    """

    name: str
    begin: float
    until: float | None = None
    struck: float | None = None
    blind: float = 0.0
    said: str = ""

    def excuses(self, row: Object) -> bool:
        """Whether a request that went wrong may have."""
        return self.struck is not None and row["outcome"] == "failed" and row["start"] < self.struck + self.blind


@dataclass
class Verdict:
    """One row of the table. Seconds; None: the desired state was not reached."""

    event: str
    streams: int  # that were open at some moment of the event
    failed: int = 0
    truncated: int = 0
    duplicated: int = 0
    differs: int = 0
    longest_pause: float = 0.0  # between tokens of a stream
    longest_wait: float = 0.0  # for the first token
    seconds: float | None = None  # to the desired state
    wrong: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """No client saw anything."""
        return not (self.failed or self.truncated or self.duplicated or self.differs)


def verdicts(rows: Iterable[Object], events: list[Event]) -> list[Verdict]:
    """A row of the table for each event, in order. Pure."""
    rows, found = list(rows), []
    for number, event in enumerate(events):
        later = events[number + 1].begin if number + 1 < len(events) else float("inf")
        until = event.until if event.until is not None else later
        open_then = [row for row in rows if row["kind"] == "long" and row["start"] < until and row["end"] > event.begin]
        one = Verdict(event.name, len(open_then))
        one.seconds = None if event.until is None else round(event.until - event.begin, 1)
        for row in rows:
            if event.begin <= row["end"] < later and row["outcome"] != "right":
                setattr(one, row["outcome"], getattr(one, row["outcome"]) + 1)
                one.wrong.append(f"{row['kind']} {row['seed']}: {row['outcome']}: {row['detail']}")
            if event.begin <= row["start"] < later:
                one.longest_wait = max(one.longest_wait, row["first"])
            spans = [seconds for at, seconds in row["pauses"] if at < later and at + seconds > event.begin]
            if not row["pauses"] and row["end"] >= event.begin and row["start"] < later:
                spans.append(row["longest"])  # too short to be listed with its moment
            one.longest_pause = max([one.longest_pause, *spans])
        found.append(one)
    return found


def table(found: Iterable[Verdict]) -> str:
    """The verdicts as a Markdown table."""
    head = (
        "event",
        "streams",
        "failed",
        "truncated",
        "duplicated",
        "other text",
        "longest pause, s",
        "longest wait for a first token, s",
        "desired state after, s",
    )
    lines = [f"| {' | '.join(head)} |", "|---|" + "---|" * (len(head) - 1)]
    for one in found:
        cells = [one.event, one.streams, one.failed, one.truncated, one.duplicated, one.differs]
        cells += [f"{one.longest_pause:.1f}", f"{one.longest_wait:.1f}"]
        cells.append("not reached" if one.seconds is None else f"{one.seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def record(found: Iterable[Verdict], **more: Any) -> None:
    """Appends the verdicts to the file of JSON lines that KVERN_E2E_EVENTS names, if it names one."""
    if name := os.environ.get("KVERN_E2E_EVENTS"):
        with Path(name).open("a") as out:
            out.writelines(json.dumps({**asdict(one), "wrong": one.wrong[:5], **more}) + "\n" for one in found)


def note(**row: Any) -> None:
    """Appends a row that is no verdict to the same file."""
    if name := os.environ.get("KVERN_E2E_EVENTS"):
        with Path(name).open("a") as out:
            out.write(json.dumps(row) + "\n")


@dataclass
class Load:
    """A run of client/load.py in the client pod, in the background: it outlives the API server's absence."""

    client: Client
    service: Service
    name: str
    streams: int = STREAMS
    tokens: int = TOKENS
    knock: float = 0.5  # seconds between short requests
    references: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def reference(self, label: str, service: Service) -> None:
        """Note the texts that an undisturbed service gives."""
        file = f"/tmp/{self.name}-{label}.json"
        command = ("python3", "/opt/client/load.py", "reference", service.url, MODEL, "--out", file)
        self.client.exec(*command, "--streams", str(self.streams), "--tokens", str(self.tokens), timeout=300)
        self.references.append(file)

    def start(self, seconds: float = 90) -> None:
        """Returns when every stream has had its first token, within so many seconds."""
        self.begin()
        self.all_run(seconds)

    def begin(self) -> None:
        """Returns at once."""
        options = [f"--reference {file}" for file in self.references]
        options += [f"--streams {self.streams}", f"--tokens {self.tokens}", f"--knock {self.knock}"]
        options.append(f"--name /tmp/{self.name}")
        command = f"python3 /opt/client/load.py run {self.service.url} {MODEL} {' '.join(options)}"
        self.client.exec("sh", "-c", f"setsid {command} >/tmp/{self.name}.log 2>&1 </dev/null &")

    def all_run(self, seconds: float) -> None:
        """Until every stream has had its first token."""
        try:
            eventually("all streams have begun", lambda: self.status()["running"] >= self.streams, seconds, every=1)
        except AssertionError as error:
            said = self.client.exec("tail", "-n", "5", f"/tmp/{self.name}.log", check=False)
            raise AssertionError(f"{error}\nthe client said: {said}") from None

    def status(self) -> Object:
        """How it goes, not older than a few seconds."""
        found: Object = json.loads(self.client.exec("cat", f"/tmp/{self.name}.status", timeout=20))
        return found

    def event(self, name: str, do: Callable[[Event], None]) -> Event:
        """Have something happen; `do` returns when the desired state is reached, or raises."""
        self.wait_for_streams()
        event = Event(name, time.time())
        self.events.append(event)
        try:
            do(event)
        except BaseException as error:
            event.said = str(error)[:500]
            raise
        event.until = time.time()
        return event

    def wait_for_streams(self) -> None:
        """Until as many are open as there should be: the next event meets all of them."""
        eventually("all streams are open", lambda: self.status()["running"] >= self.streams - 2, 60, every=1)

    def hold(self) -> None:
        """Nothing new is asked; what runs goes on."""
        self.client.exec("touch", f"/tmp/{self.name}.hold")

    def finish(self) -> Object:
        """See the streams through; the report."""
        self.client.exec("touch", f"/tmp/{self.name}.stop")
        seconds = 2 * STREAM_SECONDS + 130  # the client gives a silent stream up after 120 s
        eventually("the load has ended", lambda: self.status().get("done"), seconds, every=1)
        report: Object = json.loads(self.client.exec("cat", f"/tmp/{self.name}.json", timeout=60))
        return report

    def stop(self) -> None:
        """Whatever its state, the load ends soon."""
        self.client.exec("touch", f"/tmp/{self.name}.stop", check=False)


def spec(**more: Any) -> Object:
    """Of a service under load: two replicas and two routers, drained for as long as a stream may take."""
    return kit.merged(
        {
            "model": {"name": MODEL},
            "engine": {"maxNumSeqs": 128, "args": PACE},
            "replicas": 2,
            "router": {"replicas": 2},
            "rollout": {"drainTimeoutSeconds": 3 * STREAM_SECONDS, "maxSurge": 2},
        },
        more,
    )
