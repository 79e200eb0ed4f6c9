"""What pods say of themselves: engines on their admin port, where they are also told to drain or to change their
layout, routers on their own.
Effects only, nothing is decided here.

Every pod is asked by a task of its own, with short timeouts; a pass of reconcile reads the last answer and waits for
nobody. A pod that hangs holds up neither the others nor the operator.
"""

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from kvern_operator.answers import read_text
from kvern_operator.observed import Fetch
from kvern_operator.pods import read_fetch
from kvern_operator.queue import Key
from kvern_operator.relayout import UNKNOWN, SaidLayout
from kvern_operator.relayout import read_layout as read_said
from kvern_operator.waiting import wait_or_timeout

LONGEST_ANSWER = 2**20  # bytes

log = logging.getLogger("kvern.admin")


@dataclass(frozen=True)
class Report:
    """What a pod has said. `in_flight` None: it does not answer, or has not yet."""

    in_flight: int | None = None
    draining: bool = False
    feasible: tuple[tuple[int, int], ...] = ()
    device: str = ""
    fetch: Fetch | None = None  # of a download
    sends_to: frozenset[str] | None = None  # of a router: see Pod
    layout: SaidLayout = UNKNOWN
    refused: tuple[tuple[int, str], ...] = ()  # see Pod


class RefusedError(ValueError):
    """A pod will not do it; the text is its own, and asking again does not help."""


@dataclass(frozen=True)
class Target:
    """A pod to ask. One that has restarted is another target: what it said before no longer counts. `fetching`: it is a
    download, and has nothing to tell but how far it is; `routing`: a router, which tells whom it sends to."""

    uid: str
    name: str
    restarts: int
    address: str
    token: str
    fetching: bool = False
    routing: bool = False


@dataclass(frozen=True)
class Pace:
    """Seconds. A pod counts as silent after `patience` questions in a row without an answer. Pods that stay are asked
    `most` times a second, all together: of more than a thousand, each is asked less often."""

    usual: float = 5.0
    leaving: float = 0.5
    silent: float = 2.0
    layout: float = 60.0
    timeout: float = 2.0
    patience: int = 3
    most: float = 200.0

    def wait(self, pods: int, *, leaving: bool, silent: bool) -> float:
        """How long to wait before a pod is asked again, one of so many."""
        if leaving:
            return self.leaving
        return max(self.silent if silent else self.usual, pods / self.most)

    def layout_wait(self, pods: int) -> float:
        """For how long what a pod says of its layout is believed: a dozen questions about its load."""
        return max(self.layout, self.layout / self.usual * pods / self.most)


def read_load(answer: Any, before: Report) -> Report:
    """The report after GET, POST or DELETE /admin/drain. Raises ValueError where the answer is none."""
    if not isinstance(answer, dict) or not isinstance(answer.get("in_flight"), int):
        raise ValueError("no in_flight in it")
    return replace(before, in_flight=answer["in_flight"], draining=bool(answer.get("draining")))


def read_layout(answer: Any, before: Report) -> Report:
    """The report after GET /admin/layout; what cannot be read is left as it was."""
    if not isinstance(answer, dict):
        return before
    sizes = answer.get("feasible")
    try:
        feasible = tuple((int(s["size"]), int(s["kvTokens"])) for s in sizes or ())
    except (KeyError, OverflowError, TypeError, ValueError):
        feasible = before.feasible
    said = read_said(answer) or before.layout
    return replace(before, feasible=feasible, device=str(answer.get("device") or before.device), layout=said)


def read_routes(answer: Any, before: Report) -> Report:
    """The report after GET /-/replicas of a router. Raises ValueError where the answer is none."""
    try:
        names = frozenset(str(r["name"]) for r in answer["replicas"] if r["state"] != "draining")
    except (KeyError, TypeError) as error:
        raise ValueError("no replicas in it") from error
    return replace(before, sends_to=names)


def _steps(fetch: Fetch | None) -> tuple[int, int, str] | None:
    """A download in whole percents: what is worth a look."""
    return (fetch.done * 100 // max(fetch.total, 1), fetch.total, fetch.text) if fetch else None


def _error_of(text: str) -> str:
    """What an error's JSON body says, or the body itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return text[:300]


class Prober:
    """Asks the pods of all services. `changed(key)` is called when a report changes in a way that matters."""

    def __init__(self, changed: Callable[[Key], None], pace: Pace | None = None, at_once: int = 64) -> None:
        self._changed, self._pace = changed, pace or Pace()
        self._limit = asyncio.Semaphore(at_once)
        self._session: aiohttp.ClientSession | None = None
        self._asked: dict[Key, dict[str, _Asked]] = {}
        self.pods = 0  # how many are asked

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [asked.stop() for per_key in self._asked.values() for asked in per_key.values()]
        self._asked.clear()
        self.pods = 0
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def watch(self, key: Key, targets: Iterable[Target], leaving: Iterable[str] = ()) -> None:
        """Ask these pods of a service and no others; those whose UID is in `leaving` often."""
        wanted, hurried = {t.uid: t for t in targets}, frozenset(leaving)
        per_key = self._asked.setdefault(key, {})
        before = len(per_key)
        for uid in [uid for uid, asked in per_key.items() if wanted.get(uid) != asked.target]:
            per_key.pop(uid).stop()
        for uid, target in wanted.items():
            if uid not in per_key:
                per_key[uid] = _Asked(self, key, target)
            per_key[uid].hurry(uid in hurried)
        self.pods += len(per_key) - before
        if not per_key:
            del self._asked[key]

    def reports(self, key: Key) -> Mapping[str, Report]:
        """UID -> what the pod has said last."""
        return {uid: asked.report for uid, asked in self._asked.get(key, {}).items()}

    def untried(self, key: Key) -> bool:
        """Whether there is a pod of the service that has neither answered nor failed to."""
        return any(not asked.tried for asked in self._asked.get(key, {}).values())

    async def tell(self, key: Key, uid: str, *, draining: bool) -> None:
        """Ask a pod to drain, or not to any more. What came of it shows in `reports`; an error is logged."""
        asked = self._asked.get(key, {}).get(uid)
        if asked is None:
            return
        try:
            await asked.load("POST" if draining else "DELETE")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            verb = "drain" if draining else "take requests again"
            log.warning("%s could not be told to %s: %s", asked.target.name, verb, str(error) or "no answer in time")

    async def switch(self, key: Key, uid: str, tensor: int) -> None:
        """Ask a pod to change its tensor size while it serves. What came of it shows in `reports`."""
        asked = self._asked.get(key, {}).get(uid)
        if asked is None:
            return
        try:
            await asked.switch(tensor)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = str(error) or "no answer in time"
            log.warning("%s could not be told to change to tensor size %d: %s", asked.target.name, tensor, why)

    async def call(self, method: str, target: Target, path: str, body: object = None) -> Any:
        """One question, one JSON answer. Raises what aiohttp raises, TimeoutError and ValueError (RefusedError: a 400
        that says why)."""
        if self._session is None:
            # A proxy of the environment must not see the token.
            self._session = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))
        headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
        timeout = aiohttp.ClientTimeout(total=self._pace.timeout)
        url = f"http://{target.address}{path}"
        call = self._session.request(method, url, json=body, headers=headers, timeout=timeout)
        async with self._limit, call as answer:
            if answer.status not in (200, 202, 400):
                raise ValueError(f"HTTP {answer.status}")
            text = await read_text(answer, LONGEST_ANSWER)
            if answer.status == 400:
                raise RefusedError(_error_of(text))
            return json.loads(text)

    @property
    def pace(self) -> Pace:
        """How often it asks."""
        return self._pace

    def report_changed(self, key: Key) -> None:
        """Passed on to whoever reconciles."""
        self._changed(key)


class _Asked:
    """One pod, its task and its last report."""

    def __init__(self, prober: Prober, key: Key, target: Target) -> None:
        self.target, self.report = target, Report()
        self._prober, self._key, self._failures = prober, key, 0
        self._leaving, self._hurried, self.tried = False, asyncio.Event(), False
        self._layout_due = 0.0
        self._task = asyncio.create_task(self._run(), name=f"ask {target.name}")

    def hurry(self, leaving: bool) -> None:
        """Ask often while it leaves."""
        if leaving and not self._leaving:
            self._hurried.set()
        self._leaving = leaving

    def stop(self) -> "asyncio.Task[None]":
        self._task.cancel()
        return self._task

    async def load(self, method: str = "GET") -> None:
        """Ask for its load, or tell it to drain or not. Raises what `call` raises."""
        answer = await self._prober.call(method, self.target, "/admin/drain")
        self._failures = 0
        self._take(read_load(answer, self.report))

    async def switch(self, tensor: int) -> None:
        """Tell it to change its tensor size. Raises what `call` raises."""
        body = {"tensor": tensor, "generation": self.report.layout.generation_for(tensor)}
        self._layout_due = 0.0  # whatever the answer is: looked at again at once
        try:
            answer = await self._prober.call("POST", self.target, "/admin/layout", body)
        except RefusedError as error:
            kept = tuple(pair for pair in self.report.refused if pair[0] != tensor)
            self._take(replace(self.report, refused=(*kept, (tensor, str(error)))))
            raise
        finally:
            self._hurried.set()
        self._take(read_layout(answer, self.report))

    async def _ask_layout(self) -> None:
        pace, clock = self._prober.pace, asyncio.get_running_loop().time
        self._take(read_layout(await self._prober.call("GET", self.target, "/admin/layout"), self.report))
        if self.report.layout.switching:
            return
        known = bool(self.report.feasible)
        self._layout_due = clock() + (pace.layout_wait(self._prober.pods) if known else pace.usual)

    async def _ask_fetch(self) -> None:
        fetch = read_fetch(await self._prober.call("GET", self.target, "/admin/fetch"))
        if fetch is None:
            raise ValueError("no figures of a download in it")
        self._failures = 0
        self._take(replace(self.report, fetch=fetch))

    async def _ask_router(self) -> None:
        self._take(read_routes(await self._prober.call("GET", self.target, "/-/replicas"), self.report))
        self._failures = 0

    def _take(self, report: Report) -> None:
        before, self.report = self.report, report
        known = (before.in_flight is None) != (report.in_flight is None)
        moved = self._leaving and before.in_flight != report.in_flight
        said = (before.draining, before.feasible, before.device) != (report.draining, report.feasible, report.device)
        further = _steps(before.fetch) != _steps(report.fetch)
        relaid = (before.layout, before.refused) != (report.layout, report.refused)
        if known or moved or said or relaid or further or before.sends_to != report.sends_to:
            self._prober.report_changed(self._key)

    async def _run(self) -> None:
        pace, loop = self._prober.pace, asyncio.get_running_loop()
        while True:
            try:
                if self.target.fetching:
                    await self._ask_fetch()
                elif self.target.routing:
                    await self._ask_router()
                else:
                    if loop.time() >= self._layout_due:
                        await self._ask_layout()
                    await self.load()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                self._failures += 1
                log.debug("%s does not answer: %s", self.target.name, str(error) or "no answer in time")
                if self._failures >= pace.patience:
                    self._take(replace(self.report, in_flight=None, sends_to=None))
            self.tried = True
            hurried = self._leaving or self.report.layout.switching
            wait = pace.wait(self._prober.pods, leaving=hurried, silent=self._failures > 0)
            self._hurried.clear()
            await wait_or_timeout(self._hurried, wait * random.uniform(0.9, 1.1))
