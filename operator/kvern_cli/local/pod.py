"""One pod as a local process: started, probed, restarted with back-off, drained, stopped.

The part of the kubelet that the templates need: startup, readiness and liveness probes over HTTP, CrashLoopBackOff, a
grace period between SIGTERM and SIGKILL. It keeps one container (the first) and knows nothing of replicas.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from kvern_cli.local import logs
from kvern_cli.local.launch import LOOPBACK, Launch, container_of
from kvern_cli.local.process import ChildProcess
from kvern_operator.desired.meta import FETCH, ROUTER
from kvern_operator.observed import Fetch, Object, Pod
from kvern_operator.pods import read_fetch
from kvern_operator.relayout import SaidLayout, read_layout
from kvern_operator.waiting import wait_or_timeout


@dataclass(frozen=True)
class Timing:
    """Seconds. Shorter than a kubelet's, which has hundreds of pods to look after."""

    probe_while_starting: float = 0.1
    probe: float = 1.0
    backoff: float = 1.0  # before the first restart; doubles each time
    longest_backoff: float = 60.0
    backoff_reset: float = 120.0  # a container that ran for so long starts over with the shortest back-off


# Chooses ports and GPUs for one start: (launch, name -> port). Raises Unschedulable or OSError.
MakeLaunch = Callable[[], tuple[Launch, dict[str, int]]]
_LAYOUT_SECONDS = 5.0  # how often it is asked for its layout while nothing changes


class Unschedulable(Exception):
    """There is no room for the pod; the text is the scheduler's."""


class LocalPod:
    """A pod. `run()` is its life and `stop()` ends it. `changed` is called after each change."""

    def __init__(
        self,
        *,
        name: str,
        uid: str,
        owner: str,
        component: str,
        template: Object,
        make_launch: MakeLaunch,
        release: Callable[[], None],
        log: Path,
        token: Callable[[], str],
        client: httpx.AsyncClient,
        changed: Callable[[], None],
        timing: Timing,
    ) -> None:
        self.name, self.uid, self.owner, self.component = name, uid, owner, component
        self.template, self.log = template, log
        self.ports: dict[str, int] = {}
        self.created = datetime.now(UTC)
        self.restarts, self.pid = 0, 0
        self.exit_code: int | None = None
        self.started_at = time.monotonic()
        self.failed_starts = 0  # ends in a row without having been ready
        self.ready_after: float | None = None  # seconds from start to ready, of this run
        self._make_launch, self._release, self._token = make_launch, release, token
        self._client, self._changed, self._timing = client, changed, timing
        self._process: ChildProcess | None = None
        self._ready = self._served = self._draining = False
        self._stopping = asyncio.Event()
        self._stopping_since = 0.0
        self._kill_now = asyncio.Event()
        self._reason = self._message = self._last_log = ""
        self._crashes = 0  # ends in a row that came soon after a start
        self._in_flight: int | None = None
        self._layout = SaidLayout()
        self._refused: dict[int, str] = {}  # tensor sizes that it would not change to
        self._telling: asyncio.Task[None] | None = None
        self._fetch: Fetch | None = None
        self.succeeded = False  # a Job's pod that has ended well

    # ------------------------------------------------------------ what others see

    def observed(self) -> Pod:
        """The pod as reconcile sees it."""
        return Pod(
            name=self.name,
            uid=self.uid,
            owner=self.owner,
            component=self.component,
            created=self.created,
            running=self._process is not None,
            ready=self._ready and not self._stopping.is_set(),
            served=self._served,
            terminating=self._stopping.is_set(),
            draining=self._draining,
            address=f"{LOOPBACK}:{self.ports['http']}" if "http" in self.ports else "",
            admin_address=f"{LOOPBACK}:{self.ports['admin']}" if "admin" in self.ports else "",
            in_flight=self._in_flight if self._process is not None else None,
            feasible=self._layout.feasible,
            tensor=self._layout.tensor,
            switching=self._layout.switching,
            refused=tuple(self._refused.items()),
            switch_failed=self._layout.failed,
            switch_failed_ago=self._layout.failed_ago,
            restarts=self.restarts,
            reason=self._reason,
            message=self._message,
            exit_code=self.exit_code if self._reason else None,
            fetch=self._fetch,
            last_log=self._last_log if self._reason else "",
        )

    def doing(self) -> str:
        """What it does, in a few words, for a person who waits."""
        if self._stopping.is_set():
            # What was in flight at the last look may have ended just before.
            known = self._in_flight and time.monotonic() - self._stopping_since > 2 * self._timing.probe
            return f"stopping, {self._in_flight} in flight" if known else "stopping"
        if self.succeeded:
            return "done"
        if self._process is None:
            code = f"exit code {self.exit_code}, " if self.exit_code is not None else ""
            return f"{self._reason}: {code}{self._message}" if self._reason else "starting"
        if self._draining:
            return "draining" + (f", {self._in_flight} in flight" if self._in_flight is not None else "")
        if self._layout.switching:
            return f"changing its layout ({self._layout.phase})"
        if self._ready:
            return "ready"
        if self._served:
            return "not ready"
        if self.component == ROUTER:
            return "starting"
        return logs.progress_line(self._new_log()) or "loading the model"

    def _new_log(self) -> str:
        """What this run has logged."""
        return logs.tail(self.log).rpartition(_separator(self.restarts))[2]

    # ------------------------------------------------------------ its life

    async def run(self) -> None:
        """Start, watch and restart until stopped."""
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                trouble = await self._run_once()
                if self.component == FETCH and trouble == "" and self.exit_code == 0:
                    self.succeeded = True
                if self._stopping.is_set() or self.succeeded:
                    break
                if trouble is not None:
                    await self._back_off(time.monotonic() - began, trouble)
        finally:
            self._release()
            self._reset()
            self._changed()

    async def _run_once(self) -> str | None:
        """One process, start to end. Returns why there was none, "" where it ran and ended, None: no room."""
        try:
            plan, self.ports = self._make_launch()
            self._mark_log()
            self._process = await ChildProcess.start(plan, self.log)
        except Unschedulable as error:
            self._tell_trouble("Unschedulable", str(error))
            await self._sleep(1.0)
            return None
        except OSError as error:
            self.exit_code = None
            return str(error)
        self.pid, self.started_at, self.ready_after = self._process.pid, time.monotonic(), None
        if self._crashes < 2:
            self._reason = self._message = ""
        else:
            self._message = "restarted, loading"
        self._changed()
        watcher = asyncio.create_task(self._watch(self._process))
        stopper = asyncio.create_task(self._stop_when_asked(self._process))
        try:
            self.exit_code = await self._process.wait()
        finally:
            self._process.kill()  # where this task is cancelled
            for task in (watcher, stopper):
                task.cancel()
            await asyncio.gather(watcher, stopper, return_exceptions=True)
        self.failed_starts = 0 if self._served else self.failed_starts + 1
        self._reset()
        return ""

    def _reset(self) -> None:
        self._process = None
        self._ready = self._served = self._draining = False
        self._in_flight, self.pid, self._layout, self._refused = None, 0, SaidLayout(), {}

    def _mark_log(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(_separator(self.restarts))

    async def _back_off(self, ran: float, trouble: str) -> None:
        if ran >= self._timing.backoff_reset:
            self._crashes = 0
        delay = min(self._timing.backoff * 2 ** min(self._crashes, 16), self._timing.longest_backoff)
        self._crashes += 1
        self._last_log = "" if trouble else logs.telling_line(self._new_log())
        if trouble:
            self.failed_starts += 1
            self._tell_trouble("StartError", f"{trouble}; next try in {delay:g} s")
        else:
            reason = "CrashLoopBackOff" if self._crashes > 1 else "Error"
            self._tell_trouble(reason, f"restart in {delay:g} s")
        await self._sleep(delay)
        self.restarts += 1

    def _tell_trouble(self, reason: str, message: str) -> None:
        if (self._reason, self._message) != (reason, message):
            self._reason, self._message = reason, message
            self._changed()

    async def _sleep(self, seconds: float) -> None:
        await wait_or_timeout(self._stopping, seconds)

    # ------------------------------------------------------------ probes

    async def _watch(self, process: ChildProcess) -> None:
        """Probe until cancelled; ends the process where a startup or liveness probe says so."""
        container = container_of(self.template)
        if self.component == FETCH:
            await self._watch_fetch()
            return
        startup = container.get("startupProbe") or container["readinessProbe"]
        patience = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        if not container.get("startupProbe"):
            patience = 60.0
        while not await self._probe(container["readinessProbe"]):
            if time.monotonic() - self.started_at > patience:
                self._say_in_log(f"kvern up: not ready {patience:g} s after its start; it is restarted")
                process.kill()
                return
            await asyncio.sleep(self._timing.probe_while_starting)
        self._became_ready()
        await self._probe_while_running(process, container)

    def _became_ready(self) -> None:
        self._ready = self._served = True
        self.failed_starts = 0
        self._reason = self._message = ""
        self.ready_after = time.monotonic() - self.started_at
        self._changed()

    async def _probe_while_running(self, process: ChildProcess, container: Object) -> None:
        readiness, liveness = container["readinessProbe"], container.get("livenessProbe")
        unready = dead = 0
        next_liveness = time.monotonic() + (liveness or {}).get("periodSeconds", 10)
        next_layout = 0.0
        while True:
            await self._ask_load()
            if self._layout.switching or time.monotonic() >= next_layout:
                next_layout = time.monotonic() + _LAYOUT_SECONDS
                await self._ask_layout()
            unready = 0 if await self._probe(readiness) else unready + 1
            patient = self._ready and not self._draining and unready < readiness.get("failureThreshold", 3)
            ready = unready == 0 or patient
            if ready != self._ready:
                self._ready = ready
                self._changed()
            if liveness and time.monotonic() >= next_liveness:
                next_liveness = time.monotonic() + liveness.get("periodSeconds", 10)
                dead = 0 if await self._probe(liveness) else dead + 1
                if dead >= liveness.get("failureThreshold", 3):
                    self._say_in_log(f"kvern up: error: {dead} liveness probes failed; it is restarted")
                    process.kill()
                    return
            await asyncio.sleep(self._timing.probe)

    def _say_in_log(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text + "\n")

    async def _probe(self, probe: Object) -> bool:
        http = probe["httpGet"]
        port = self.ports[http["port"]] if isinstance(http["port"], str) else http["port"]
        try:
            url = f"http://{LOOPBACK}:{port}{http['path']}"
            response = await self._client.get(url, timeout=probe.get("timeoutSeconds", 1))
        except httpx.HTTPError:
            return False
        return 200 <= response.status_code < 400

    # ------------------------------------------------------------ the admin port

    async def _admin(self, method: str, path: str) -> Any:
        """The JSON answer of the admin port; None where there is none."""
        if "admin" not in self.ports:
            return None
        try:
            response = await self._send(method, path)
            return response.json() if response.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    async def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self._client.request(
            method,
            f"http://{LOOPBACK}:{self.ports['admin']}{path}",
            json=body,
            headers={"Authorization": f"Bearer {self._token()}"},
            timeout=5,
        )

    async def _watch_fetch(self) -> None:
        while True:
            said = read_fetch(await self._admin("GET", "/admin/fetch"))
            if said is not None and said != self._fetch:
                self._fetch = said
                self._changed()
            await asyncio.sleep(self._timing.probe)

    async def _ask_load(self) -> None:
        answer = await self._admin("GET", "/admin/drain")
        load = answer.get("in_flight") if isinstance(answer, dict) else None
        draining = bool(answer.get("draining")) if isinstance(answer, dict) else self._draining
        if (load, draining) != (self._in_flight, self._draining):
            self._in_flight, self._draining = load, draining
            self._changed()

    async def _ask_layout(self) -> None:
        self._take_layout(await self._admin("GET", "/admin/layout"))

    def _take_layout(self, answer: Any) -> None:
        said = read_layout(answer)
        if said is not None and said != self._layout:
            self._layout = said
            self._changed()

    def tell(self, *, draining: bool) -> None:
        """Ask it to drain, or not to any more; one question at a time. What came of it shows in `observed()`."""
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(draining))

    async def _tell(self, draining: bool) -> None:
        answer = await self._admin("POST" if draining else "DELETE", "/admin/drain")
        if isinstance(answer, dict):
            self._draining = bool(answer.get("draining", draining))
            self._in_flight = answer.get("in_flight", self._in_flight)
            self._changed()

    def switch(self, tensor: int) -> None:
        """Ask it to change its tensor size while it serves; one question at a time."""
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._switch(tensor))

    async def _switch(self, tensor: int) -> None:
        body = {"tensor": tensor, "generation": self._layout.generation_for(tensor)}
        try:
            response = await self._send("POST", "/admin/layout", body)
            answer = response.json()
            if response.status_code == 400:
                self._refused[tensor] = str(answer["error"]["message"])
                self._changed()
            elif response.is_success:
                self._take_layout(answer)
            else:  # somebody else has asked for something: look, and reconcile asks again
                await self._ask_layout()
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return

    # ------------------------------------------------------------ its end

    def stop(self) -> None:
        """SIGTERM now, SIGKILL when the grace period is over. `run()` returns once it has ended."""
        if not self._stopping.is_set():
            self._stopping_since = time.monotonic()
            self._stopping.set()
            self._changed()  # once: every pass over the pods stops again what is to stop

    def kill(self) -> None:
        """Do not wait any longer."""
        self._stopping.set()
        self._kill_now.set()

    async def _stop_when_asked(self, process: ChildProcess) -> None:
        await self._stopping.wait()
        process.terminate()
        grace = self.template["spec"].get("terminationGracePeriodSeconds", 30)
        await wait_or_timeout(self._kill_now, grace)
        process.kill()


def _separator(restarts: int) -> str:
    return f"--- kvern up: start {restarts + 1} ---\n"
