"""The loop of `kvern up`: observe, reconcile, carry out, until told to stop. The operator's loop, for one service.

The file is watched: a valid change becomes the next generation of the spec, an invalid one is reported and ignored.
"""

import asyncio
import contextlib
import secrets
import shutil
import signal
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from kvern_cli.ask import AskError, ask, curl_line
from kvern_cli.local import logs
from kvern_cli.local.cluster import LocalCluster, Machine
from kvern_cli.local.limits import refusals, warnings
from kvern_cli.local.pod import LocalPod
from kvern_cli.local.state import StateFolder
from kvern_cli.view import Row, View
from kvern_operator.api.base import format_time
from kvern_operator.api.load import ManifestError, load_text
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceService, immutable_changes
from kvern_operator.desired import meta
from kvern_operator.reconcile import Plan, reconcile
from kvern_operator.settings import Settings
from kvern_operator.waiting import wait_or_timeout

TICK = 0.25  # seconds between looks at the file, and at most between passes
HOPELESS = 3  # starts in a row that failed, after which a waiting question is given up


class UpError(Exception):
    """It cannot go on; the text is for the user."""


class Runner:
    """One `kvern up`. `run` returns the exit status."""

    def __init__(
        self, file: Path, service: InferenceService, state: StateFolder, port: int, machine: Machine, view: View
    ) -> None:
        self._file, self._state, self._view, self._machine = file, state, view, machine
        self._uid, self._created = str(uuid.uuid4()), datetime.now(UTC)
        self._operator_key = secrets.token_bytes(32)
        self._url = f"http://127.0.0.1:{port}/v1"
        self._cluster = LocalCluster(state.path, port, machine)
        self._status: InferenceServiceStatus | None = None
        self._stamp = self._stat()
        self._stop, self._kill_now = asyncio.Event(), asyncio.Event()
        self._answering = asyncio.Event()
        self._complaint = ""
        self._warned: set[str] = set()
        self._service = self._adopt(service, 1)

    # ------------------------------------------------------------ the file

    def _stat(self) -> tuple[int, int, int]:
        try:
            stat = self._file.stat()
            return stat.st_mtime_ns, stat.st_size, stat.st_ino
        except OSError:
            return 0, 0, 0

    def _adopt(self, service: InferenceService, generation: int) -> InferenceService:
        """The service with what the API server would have set; says what this machine will not do."""
        for line in warnings(service, self._machine.claims.keys(), len(self._machine.gpus)):
            if line not in self._warned:
                self._warned.add(line)
                self._view.say(f"warning: {line}")
        created = {"uid": self._uid, "generation": generation, "creationTimestamp": format_time(self._created)}
        metadata = service.metadata.model_copy(update=created)
        return service.model_copy(update={"metadata": metadata})

    def _read_file(self) -> None:
        """Take over a changed file; keep the old spec where it is not valid."""
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._complain(f"{self._file}: {error}")
            return
        try:
            changed = load_text(text, str(self._file))
            lines = [*immutable_changes(self._service.spec, changed.spec), *self._new_identity(changed)]
            lines += [str(p) for p in refusals(changed, self._machine.claims.keys())]
            if lines:
                self._complain("\n".join(f"{self._file}: {line}" for line in lines))
                return
        except ManifestError as error:
            self._complain(str(error))
            return
        self._complaint = ""
        if changed.spec != self._service.spec:
            generation = self._service.metadata.generation + 1
            self._view.say(f"{self._file} has changed: generation {generation}")
            self._service = self._adopt(changed, generation)

    def _new_identity(self, changed: InferenceService) -> list[str]:
        old, new = self._service.metadata, changed.metadata
        return [
            f"metadata.{field}: {after!r} (was {before!r}) would be another service; run it with a kvern up of its own"
            for field, before, after in (("name", old.name, new.name), ("namespace", old.namespace, new.namespace))
            if before != after
        ]

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self._view.say(f"the change is ignored, what ran before goes on:\n{text}")

    # ------------------------------------------------------------ the loop

    async def run(self, question: str | None, timeout: float | None) -> int:
        """Until stopped, answered or given up. Always stops what it has started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        asking = asyncio.create_task(self._converse(question, timeout))
        try:
            while not self._stop.is_set():
                self._read_file()
                self._pass()
                if asking.done() and (question is not None or asking.exception()):
                    break
                await self._wait()
        finally:
            await self._end(asking)
        if self._kill_now.is_set():
            return 130
        if asking.cancelled():
            return 0 if question is None else 130
        return asking.result()

    def stop(self) -> None:
        """Drain and stop; asked a second time, stop now."""
        if self._stop.is_set():
            self._kill_now.set()
        self._stop.set()
        self._cluster.changed.set()

    async def _wait(self) -> None:
        await wait_or_timeout(self._cluster.changed, TICK)
        self._cluster.changed.clear()

    def _pass(self) -> None:
        """One pass of the operator's loop."""
        service, cluster = self._service, self._cluster
        resources = service.spec.resources
        observed = cluster.observe(self._status, resources.gpus_per_pod * resources.nodes_per_replica)
        ignored = warnings(service, self._machine.claims.keys(), len(self._machine.gpus))
        settings = Settings(
            operator_key=self._operator_key,
            endpoints_delay=0,  # nobody forgets endpoints here
            router_replicas=1,
            url=self._url,
            ignored=tuple(ignored),
        )
        plan = reconcile(service, observed, datetime.now(UTC), settings)
        self._carry_out(plan)
        self._status = plan.status
        available = plan.status.condition("Available")
        if available is not None and available.status == "True":
            self._answering.set()
        self._show()

    def _carry_out(self, plan: Plan) -> None:
        for note in plan.notes:
            self._view.say(note)
        for obj in plan.apply:
            self._cluster.apply(obj)
        for name in plan.resume:
            self._cluster.pods[name].tell(draining=False)
        for name in plan.drain:
            self._cluster.pods[name].tell(draining=True)
        for name, size in plan.switch:
            self._cluster.pods[name].switch(size)
        for key in plan.delete:
            self._cluster.delete(key)
        self._cluster.sync()

    def _show(self) -> None:
        pods = sorted(self._cluster.pods.values(), key=lambda p: (p.component != meta.ENGINE, p.name))
        self._view.update([_row(pod) for pod in pods if not pod.succeeded])
        self._write_state()

    def _write_state(self, **more: object) -> None:
        document = self._service.to_dict()
        document["status"] = (self._status or InferenceServiceStatus()).to_dict()
        pods = sorted(self._cluster.pods.values(), key=lambda p: p.name)
        self._state.write(
            {
                "file": str(self._file.resolve()),
                "created": format_time(self._created),
                "service": document,
                "pods": [_pod_document(pod) for pod in pods],
                **more,
            }
        )

    # ------------------------------------------------------------ the question

    async def _converse(self, question: str | None, timeout: float | None) -> int:
        """Wait until the service answers, then ask, or say how to. Raises UpError."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while not self._answering.is_set():
            if deadline is not None and time.monotonic() > deadline:
                raise UpError(f"not ready within {timeout:g} s: {self._why()}")
            if question is not None and any(p.failed_starts >= HOPELESS for p in self._cluster.pods.values()):
                raise UpError(f"it does not start: {self._why()}\n{self._log_hint()}")
            await asyncio.sleep(0.02)
        model = self._service.spec.model.served_name
        if question is None:
            with self._view.paused():
                self._print_hints(model)
            return 0
        with self._view.paused():
            print(f"\n> {question}\n", flush=True)
            try:
                await ask(self._url, model, question, lambda piece: print(piece, end="", flush=True))
            except AskError as error:
                raise UpError(f"no answer: {error}") from None
            print(f"\n\nURL:  {self._url}\nAsk:  {curl_line(self._url, model, question)}", flush=True)
        return 0

    def _why(self) -> str:
        ready = self._status.condition("Ready") if self._status else None
        return f"{ready.reason}: {ready.message}" if ready else "nothing has started"

    def _log_hint(self) -> str:
        worst = max(self._cluster.pods.values(), key=lambda p: p.failed_starts)
        lines = logs.plain_lines(logs.tail(worst.log))[-12:]
        return "\n".join([f"the end of {worst.log}:", *(f"    {line}" for line in lines)])

    def _print_hints(self, model: str) -> None:
        name = self._service.metadata.name
        seconds = (datetime.now(UTC) - self._created).total_seconds()
        print(
            f"\n{name} answers after {seconds:.1f} s\n"
            f"  URL:     {self._url}\n"
            f"  Ask:     {curl_line(self._url, model, 'What is the capital of France?')}\n"
            f'  Python:  openai.OpenAI(base_url="{self._url}", api_key="none")  # model "{model}"\n'
            f"  State:   kvern status {name}\n"
            f"  Change:  edit {self._file}; it is carried out at once\n"
            f"  Stop:    Ctrl-C\n",
            flush=True,
        )

    # ------------------------------------------------------------ the end

    async def _end(self, asking: "asyncio.Task[int]") -> None:
        self._stop.set()
        asking.cancel()
        with contextlib.suppress(BaseException):
            await asking
        busy, began = False, time.monotonic()

        def waiting(pods: list[LocalPod]) -> None:
            nonlocal busy
            load = sum(p.observed().in_flight or 0 for p in pods)
            # What was in flight at the last look may have ended just before.
            if load and not busy and time.monotonic() - began > 1.5:
                busy = True
                self._view.say(f"draining: {load} requests in flight (Ctrl-C again stops now)")
            self._view.update([_row(pod) for pod in pods])

        await self._cluster.stop(self._kill_now, waiting)
        self._view.update([])
        self._write_state(stopped=format_time(datetime.now(UTC)))
        shutil.rmtree(self._state.path / "volumes", ignore_errors=True)  # holds the admin token


def _row(pod: LocalPod) -> Row:
    seen = pod.observed()
    seconds = pod.ready_after if seen.ready and pod.ready_after is not None else time.monotonic() - pod.started_at
    state = "ready" if seen.ready else "trouble" if seen.reason else "busy"
    return Row(pod.name, pod.doing(), seconds, state)


def _pod_document(pod: LocalPod) -> dict[str, object]:
    seen = pod.observed()
    return {
        "name": seen.name,
        "replica": seen.owner,
        "component": seen.component,
        "ready": seen.ready,
        "doing": pod.doing(),
        "reason": seen.reason,
        "message": seen.message,
        "exitCode": seen.exit_code,
        "lastLine": seen.last_log,
        "draining": seen.draining,
        "restarts": seen.restarts,
        "inFlight": seen.in_flight,
        "address": seen.address,
        "pid": pod.pid,
        "log": str(pod.log),
        "created": format_time(seen.created),
    }
