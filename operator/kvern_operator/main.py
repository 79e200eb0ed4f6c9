"""`kvern-operator`: configuration, the Lease, kopf and the workers, put together and taken apart again.

One process leads, others wait. Whoever loses the Lease exits and is started again by its kubelet: nothing of a leader's
memory survives, so nothing of it can be wrong.

Exit codes: 0 after SIGTERM or SIGINT, 1 when the lease is lost or something ended that must not, 2 for a wrong setting.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.config import ConfigException

from kvern_operator import __version__, oplog
from kvern_operator.admin import Prober
from kvern_operator.api.types import API_VERSION
from kvern_operator.apply import Executor
from kvern_operator.autoscale.budgets import BudgetReader, gpus_of_orphans, gpus_of_others
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.scrape import OwnThread, Round, Scraper, Target
from kvern_operator.config import Config, ConfigError, read_config
from kvern_operator.controller import Controller
from kvern_operator.desired import meta
from kvern_operator.events import Poster
from kvern_operator.handlers import register
from kvern_operator.health import DEAF, Health
from kvern_operator.kube import PLURALS, ApiError, KubeClient, load_configuration
from kvern_operator.leader import Elector, Terms
from kvern_operator.metrics import Metrics
from kvern_operator.mirror import Mirror
from kvern_operator.nodes import NodeReader
from kvern_operator.notices import NoticeReader
from kvern_operator.queue import Delays, Key, KeyQueue, Workers
from kvern_operator.verify import Verifier
from kvern_operator.watches import Watches

log = logging.getLogger("kvern.main")

SILENT_API = 60.0  # seconds without an answer about the Lease after which a standby is not ready
LAST_WORDS = 8.0  # seconds that the end may take
LOOK_FOR_CRD = 5.0  # seconds between looks while it is not there
LOOK_FOR_MONITORS = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to stop or the lease is lost; returns the exit code. Takes no arguments but --version."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        sys.stdout.write(f"kvern-operator {__version__}\n")
        return 0
    if arguments:
        sys.stderr.write(f"kvern-operator takes no arguments (got {' '.join(arguments)}); it reads KVERN_* variables\n")
        return 2
    try:
        config = read_config()
    except ConfigError as error:
        sys.stderr.write("".join(f"kvern-operator: {problem}\n" for problem in error.problems))
        return 2
    oplog.set_up(config.log_format, config.log_level)
    return asyncio.run(Operator(config).run())


class Operator:
    """One process. Its parts know each other only through what is passed here."""

    def __init__(self, config: Config) -> None:
        self.config, self.terms = config, Terms()
        self.port = 0  # of the health server, once it listens
        self.metrics = Metrics()
        self.health = Health(self.metrics, self._alive, self._ready)
        self._stop = asyncio.Event()
        self._elector: Elector | None = None
        self._watches = Watches()
        self._leading = self._lost = False
        self._waiting_for = "the API server"

    # ------------------------------------------------------------ probes

    def _alive(self) -> str:
        age = self._watches.age() if self._leading else 0.0
        return f"a watch has been silent for {age:.0f} s" if age > DEAF else ""

    def _ready(self) -> str:
        if self._elector is None:
            return f"waiting for {self._waiting_for}"
        if self._elector.silence() > SILENT_API:
            return "the API server does not answer about the Lease"
        return ""

    # ------------------------------------------------------------ its life

    async def run(self) -> int:
        """From the first socket to the last; returns the exit code."""
        self._handle_signals()
        try:
            self.port = await self.health.start(self.config.health_port)
        except OSError as error:
            log.error("port %d cannot be listened on: %s", self.config.health_port, error.strerror)
            return 1
        client: KubeClient | None = None
        try:
            client = KubeClient(await load_configuration())
            return await self._lead(client)
        except ConfigException as error:
            log.error("no way to the API server: neither a service account nor a kubeconfig: %s", error)
            return 1
        finally:
            await self.health.stop()
            if client is not None:
                await client.close()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number)

    def _told_to_stop(self, number: int) -> None:
        if not self._stop.is_set():
            log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()

    async def _lead(self, client: KubeClient) -> int:
        config = self.config
        log.info("kvern-operator %s, %s, watching %s", __version__, config.identity, _where(config))
        if not await self._or_stop(self._wait_for_crd(client)):
            return 0
        elector = self._elector = Elector(client, config.namespace, config.lease_name, config.identity, self.terms)
        self.metrics.gauge("kvern_operator_leader", "1 where this process leads", lambda: float(elector.valid()))
        if not await self._or_stop(elector.acquire(lambda who: log.info("standby: %s leads", who or "nobody"))):
            return 0
        self._leading = True
        client.may_write, client.wrote = elector.valid, self.metrics.wrote
        keeping = asyncio.create_task(self._keep(elector), name="keep the lease")
        try:
            code = await self._operate(client)
        finally:
            self._leading = False
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            if not self._lost:
                client.may_write = lambda: False
                await elector.release()
        return 1 if self._lost else code

    async def _keep(self, elector: Elector) -> None:
        await elector.keep()
        self._lost = True
        self._stop.set()

    async def _or_stop(self, work: Awaitable[None]) -> bool:
        """Do the work; False where the operator was told to stop before it was done."""
        task, stop = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            task.result()
            return True
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _wait_for_crd(self, client: KubeClient) -> None:
        """kopf looks for the resource once where it may not watch CRDs: wait until it is there."""
        said = ""
        while True:
            try:
                if await client.serves(API_VERSION, PLURALS["InferenceService"]):
                    return
                self._waiting_for = f"the CRD of {API_VERSION} (install the chart kvern-crds)"
            except ApiError as error:
                self._waiting_for = f"the API server: {error}"
            if said != self._waiting_for:
                said = self._waiting_for
                log.warning("waiting for %s", said)
            await asyncio.sleep(LOOK_FOR_CRD)

    # ------------------------------------------------------------ while leading

    async def _operate(self, client: KubeClient) -> int:
        """Run kopf and the workers until told to stop, or until one of them ends by itself."""
        namespaces = self.config.watch_namespaces
        monitors = self.config.pod_monitors and await client.serves(
            meta.API_VERSIONS["PodMonitor"], PLURALS["PodMonitor"]
        )
        ready = asyncio.Event()
        parts, sessions = _Parts(self, client, self._watches, monitors), list[aiohttp.ClientSession]()
        registry = register(
            client.configuration,
            self._watches,
            sessions,
            parts.mirror,
            parts.add,
            namespaced=bool(namespaces),
            pod_monitors=monitors,
        )
        parts.start()
        where = {"namespaces": list(namespaces)} if namespaces else {"clusterwide": True}
        # An identity of ours: kopf's own is made of the user's name, and a container's user 65532 has none.
        kopf_run = kopf.operator(
            registry=registry,
            standalone=True,
            identity=cast(Any, self.config.identity),
            stop_flag=self._stop,
            ready_flag=ready,
            **where,
        )
        watching = asyncio.create_task(kopf_run, name="kopf")
        again = asyncio.create_task(self._own_signals(ready), name="signals")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            ends: list[asyncio.Future[Any]] = [watching, stop, parts.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return 0
            await self._explain(watching, parts.failed)
            return 1
        finally:
            await parts.stop()  # first: no write once the lease may be another's
            self._stop.set()
            await asyncio.wait({watching}, timeout=LAST_WORDS)
            for task in (watching, again, stop):
                task.cancel()
            await asyncio.gather(watching, again, stop, return_exceptions=True)
            for session in sessions:
                await session.close()

    async def _own_signals(self, ready: asyncio.Event) -> None:
        """kopf takes the signals when it starts; a second SIGTERM would then end in an error of its own."""
        await ready.wait()
        self._handle_signals()

    async def _explain(self, *tasks: "asyncio.Future[None]") -> None:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                log.error("something ended that must not: %s", task.exception(), exc_info=task.exception())
                return
        log.error("kopf ended by itself")


class _Parts:
    """What works while this process leads."""

    def __init__(self, operator: Operator, client: KubeClient, watches: Watches, pod_monitors: bool) -> None:
        config, metrics = operator.config, operator.metrics
        self._operator, self._client, self._monitors = operator, client, pod_monitors
        self.mirror = mirror = Mirror()
        queue = KeyQueue(delays=Delays(resync=config.resync))
        self._prober, self._notices = Prober(self.add), NoticeReader(client, self.add)
        self._scraper, self._scraping = Scraper(), OwnThread("scrape")
        self._autoscaler = Autoscaler(
            self._scrape,
            BudgetReader(client),
            metrics,
            self.add,
            unseen=lambda known: {
                **gpus_of_others(mirror.keys(), mirror.service, known),
                **gpus_of_orphans(mirror.orphans(), mirror.pods),
            },
        )
        metrics.show(self._autoscaler.figures)
        controller = Controller(
            mirror,
            Executor(client, mirror, self._prober),
            self._prober,
            self._notices,
            NodeReader(client),
            Poster(client, config.identity),
            dataclasses.replace(config.settings, pod_monitors=pod_monitors, autoscales=True),
            metrics,
            queue.remove,
            self._autoscaler,
        )
        self._workers = Workers(queue, controller.work)
        self._verifier = Verifier(client, mirror, config.watch_namespaces, pod_monitors, self.add)
        watches.listed = self._verifier.listed
        metrics.gauge("kvern_operator_services", "InferenceServices", lambda: float(len(mirror.keys())))
        metrics.gauge("kvern_operator_queue_depth", "Services that wait for a worker", lambda: float(queue.depth))
        metrics.gauge(
            "kvern_operator_watch_silence_seconds", "Age of the last word of the most silent watch", watches.age
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, key: Key) -> None:
        """Put a service on the queue."""
        self._workers.add(key)

    async def _scrape(self, targets: Iterable[Target]) -> Round:
        chosen = list(targets)
        return await self._scraping.run(lambda: self._scraper.round(chosen))

    def start(self) -> None:
        """Let all of them run. Nothing is decided before everything that exists has arrived."""
        works = {"workers": self._work(), "notices": self._notices.run(), "verifier": self._verifier.run()}
        works["autoscaler"] = self._autoscaler.run()
        if self._operator.config.pod_monitors:
            works["PodMonitors"] = self._watch_monitors()
        for name, work in works.items():
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def _work(self) -> None:
        await self._verifier.arrived()
        log.info("%d services", len(self.mirror.keys()))
        await self._workers.run()

    async def _watch_monitors(self) -> None:
        """The Prometheus operator may come or go later. What is watched is set at the start: so start again then."""
        group_version, plural = meta.API_VERSIONS["PodMonitor"], PLURALS["PodMonitor"]
        while True:
            await asyncio.sleep(LOOK_FOR_MONITORS)
            with contextlib.suppress(ApiError):
                if await self._client.serves(group_version, plural) != self._monitors:
                    log.warning("PodMonitors are %s now: starting again", "gone" if self._monitors else "known")
                    self._operator._stop.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError(f"{task.get_name()} ended"))

    async def stop(self) -> None:
        """Stop writing, at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prober.close()
        with contextlib.suppress(Exception):
            await self._scraping.run(self._scraper.close)
        await self._scraping.stop()
        if not self.failed.done():
            self.failed.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.failed


def _where(config: Config) -> str:
    return "all namespaces" if not config.watch_namespaces else "namespaces " + ", ".join(config.watch_namespaces)


if __name__ == "__main__":
    sys.exit(main())
