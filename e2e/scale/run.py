#!/usr/bin/env python3
"""How far one operator goes: 200 services one a second, 200 at once, 1,000 with 5,000 pods, and then nothing to do.

    run.py [--out FILE] [--profile FOLDER] [--idle SECONDS] [--services N --pods N] [--plane kwok|replay]

Prints one JSON line a phase (--out appends them to FILE) and ends with 1 where a promise is not kept. The control plane
is etcd, kube-apiserver, controllers, scheduler and kwok on this machine, in a network namespace of its own; the times
hold what those take of its processors. --plane replay takes one Python process in their place, for profiles alone.
--profile writes the stacks of the operator's processor time, a file a phase, for flame graph tools (see profiled.py).

phase    what it does                                            promise
steady   a service a second, 200 times                           creation to last child applied: p50 < 0.2 s, p99 < 1 s
burst    200 services at once                                    all of them Ready within 60 s
mass     more, until there are 1,000 services with 5,000 pods    none; how long it takes
beside   20 more, one a second, beside those                     as steady
idle     nothing, for some minutes                               no write but the Lease's; less than 300 MiB
restart  the operator is killed and started again                less than 300 MiB at its highest; no write
before   the same with the operator that --before names          as restart
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import figures
import plane as planes
from api import SERVICES, Access, Api, Object

PROMISE_MIB = 300.0
HEALTH_PORT = 18080
SETTLED = 20.0  # seconds without a write of the operator after which nothing is left to do
LONGEST = 1800.0  # seconds that a phase may take
Key = tuple[str, str]
Row = dict[str, Any]


def manifest(name: str, replicas: int) -> Object:
    """A service as people write it, of an engine that nobody starts."""
    return {
        "apiVersion": "kvern.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "builtin://smollm2-135m"},
            "resources": {"gpusPerPod": 0, "cpu": "2", "memory": "2Gi"},
            "replicas": replicas,
        },
    }


class Readiness:
    """When each service was first Ready, by this process's clock, from a watch."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.at: dict[Key, float] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async for event in self._api.watch(f"{SERVICES}/inferenceservices"):
            obj = event["object"]
            key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
            conditions = (obj.get("status") or {}).get("conditions") or ()
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                self.at.setdefault(key, time.time())
                self._changed.set()

    async def wait(self, keys: list[Key], seconds: float, watched: "asyncio.Task[None]") -> list[Key]:
        """Wait until all are ready, for at most so many seconds. Returns those that are not."""
        deadline = time.monotonic() + seconds
        while missing := [key for key in keys if key not in self.at]:
            if watched.done():
                watched.result()
            if time.monotonic() > deadline:
                return missing
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
        return []


class Run:
    """One run over its phases. Rows are printed as they come."""

    def __init__(self, given: argparse.Namespace, plane: planes.Plane) -> None:
        self._given, self._plane = given, plane
        self.kept = True
        self._common = {"plane": plane.name, "cores": os.cpu_count(), "commit": _commit()}
        self._operator: planes.Process | None = None

    # ------------------------------------------------------------ the operator

    @property
    def operator(self) -> planes.Process:
        """The process that runs now."""
        assert self._operator is not None
        return self._operator

    def start_operator(self, source: Path) -> None:
        """Start it; its profile, if there is to be one, goes to a file that is renamed after each phase."""
        profile = self._given.profile / "now" if self._given.profile else None
        self._operator = planes.start_operator(self._plane, HEALTH_PORT, source.absolute(), profile)

    @contextlib.asynccontextmanager
    async def phase(self, name: str, *, from_start: bool = False) -> AsyncIterator[Row]:
        """What happens within is measured; the row is told at the end. `from_start`: the operator has just begun."""
        before, began, row = self.operator.usage(), time.time(), dict[str, Any]()
        passes = 0.0 if from_start else await self._metric("kvern_operator_reconciles_total")
        self.operator.reset_peak()
        if self._given.profile and not from_start:  # it knows no signals yet, and they would be its end
            self.operator.signal(signal.SIGUSR1)
        yield row
        after = self.operator.usage()
        if self._given.profile:
            await self._keep_profile(name)
        passes = await self._metric("kvern_operator_reconciles_total") - passes
        told = {
            "w": f"scale_{name}",
            "s": round(time.time() - began, 1),
            **row,
            "passes": int(passes),
            "operator_cpu_s": round(after.cpu - before.cpu, 2),
            "rss_mib": round(after.rss, 1),
            "rss_peak_mib": round(after.peak, 1),
        }
        self.tell(told)

    async def _metric(self, name: str) -> float:
        """One of the operator's own; -1 while it does not answer."""
        self.operator.check()
        try:
            async with Api(Access(f"http://127.0.0.1:{HEALTH_PORT}")) as health:
                return await health.total("/metrics", name)
        except OSError:
            return -1.0

    async def _keep_profile(self, name: str) -> None:
        now = self._given.profile / "now"
        now.unlink(missing_ok=True)
        self.operator.signal(signal.SIGUSR2)
        for _ in range(100):
            if now.exists():
                now.rename(self._given.profile / f"{name}.stacks")
                return
            await asyncio.sleep(0.1)

    def tell(self, row: Row) -> None:
        """Print a row, and append it to the file of results."""
        row |= self._common | {"load1": round(os.getloadavg()[0], 1)}
        self.kept = self.kept and row.get("kept", True)
        line = json.dumps(row)
        print(line, flush=True)
        if self._given.out:
            with self._given.out.open("a") as out:
                out.write(line + "\n")

    # ------------------------------------------------------------ what phases are made of

    async def create(self, api: Api, namespace: str, names: list[str], replicas: list[int], period: float) -> None:
        """Services of one namespace: one every `period` seconds, or 0: twenty at a time."""
        path, limit = f"{SERVICES}/namespaces/{namespace}/inferenceservices", asyncio.Semaphore(20)

        async def one(index: int) -> None:
            await asyncio.sleep(index * period)
            async with limit:
                await api.create(path, manifest(names[index], replicas[index]))

        await asyncio.gather(*(one(index) for index in range(len(names))))

    def children(self, namespace: str) -> Row:
        """From creation to the last child, of all services of a namespace."""
        found = figures.applied(figures.read_log(self._plane.folder), planes.OPERATOR, namespace)
        seconds = [service.seconds for service in found.values() if service.children]
        numbers = sorted({len(service.children) for service in found.values()})
        return {"n": len(found), "children": numbers, "applied_s": figures.summary(seconds)}

    async def settle(self) -> None:
        """Wait until the operator has written nothing for a while, by its own counter. Raises RuntimeError."""
        deadline, written, since = time.monotonic() + LONGEST, -1.0, time.monotonic()
        while time.monotonic() - since < SETTLED:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the operator still writes after {LONGEST:.0f} s")
            await asyncio.sleep(1.0)
            now = await self._metric("kvern_operator_api_writes_total")
            if now != written:
                written, since = now, time.monotonic()

    # ------------------------------------------------------------ the phases

    async def steadily(self, api: Api, ready: Readiness, watched: "asyncio.Task[None]", name: str, n: int) -> None:
        """One a second: steady, and beside."""
        await api.namespace(name)
        names = [f"s{index:04d}" for index in range(n)]
        async with self.phase(name) as row:
            began = time.time()
            await self.create(api, name, names, [1] * n, 1.0)
            missing = await ready.wait([(name, each) for each in names], 60, watched)
            row |= self.children(name)
            at = [ready.at[name, each] - began - index for index, each in enumerate(names) if (name, each) in ready.at]
            row |= {"ready_s": figures.summary(at), "not_ready": len(missing), "promise": "p50 < 0.2 s, p99 < 1 s"}
            row["kept"] = row["applied_s"]["p50"] < 0.2 and row["applied_s"]["p99"] < 1 and not missing

    async def burst(self, api: Api, ready: Readiness, watched: "asyncio.Task[None]", n: int) -> None:
        """All at once."""
        await api.namespace("burst")
        names = [f"b{index:04d}" for index in range(n)]
        async with self.phase("burst") as row:
            began = time.time()
            await self.create(api, "burst", names, [1] * n, 0)
            created = time.time() - began
            missing = await ready.wait([("burst", each) for each in names], 300, watched)
            last = max((at for key, at in ready.at.items() if key[0] == "burst"), default=0.0)
            row |= self.children("burst") | {"created_s": round(created, 2), "all_ready_s": round(last - began, 2)}
            row |= {"not_ready": len(missing), "promise": "all Ready within 60 s"}
            row["kept"] = not missing and row["all_ready_s"] < 60

    async def mass(self, api: Api, ready: Readiness, watched: "asyncio.Task[None]", services: int, pods: int) -> None:
        """Up to so many services and pods in all; each service has two routers."""
        there, have = len(ready.at), await api.count("/api/v1/pods", "kvern.dev/service")
        n = services - there
        await api.namespace("mass")
        names = [f"m{index:04d}" for index in range(n)]
        engines = pods - have - 2 * n
        replicas = [max(engines // n, 0) + (index < engines % n) for index in range(n)]
        async with self.phase("mass") as row:
            began = time.time()
            for start in range(0, n, 50):  # as a person's scripts do; a queue of hundreds is burst's business
                some = names[start : start + 50]
                await self.create(api, "mass", some, replicas[start : start + 50], 0)
                missing = await ready.wait([("mass", each) for each in some], LONGEST, watched)
                if missing:
                    raise RuntimeError(f"not Ready after {LONGEST:.0f} s: {missing[:5]}")
            row |= {"n": n, "all_ready_s": round(time.time() - began, 1)}
        row = {"services": len(ready.at), "pods": await api.count("/api/v1/pods", "kvern.dev/service")}
        self._common |= row

    async def idle(self, seconds: float) -> None:
        """Nothing happens."""
        await self.settle()
        async with self.phase("idle") as row:
            began = time.time()
            await asyncio.sleep(seconds)
            written = figures.writes(figures.read_log(self._plane.folder), planes.OPERATOR, began)
            row |= {"writes": dict(written), "promise": "no write but the Lease's, < 300 MiB"}
            row["kept"] = not written and self.operator.usage().peak < PROMISE_MIB

    async def restart(self, name: str, source: Path) -> None:
        """kill -9, and another one: it waits for the Lease, lists everything and looks at every service once."""
        self.operator.signal(signal.SIGKILL)
        killed = time.time()
        await asyncio.sleep(0.5)
        self.start_operator(source)
        async with self.phase(name, from_start=True) as row:
            passes = await self._passes(self._common.get("services", 0))
            row |= {"first_passes_s": round(passes - killed, 1)}
            await self.settle()
            written = figures.writes(figures.read_log(self._plane.folder), planes.OPERATOR, killed)
            row |= {"writes": dict(written), "promise": "< 300 MiB at its highest, no write but the Lease's"}
            row["kept"] = not written and self.operator.usage().peak < PROMISE_MIB

    async def _passes(self, wanted: int) -> float:
        """When the operator had made so many passes, by its own counter."""
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            if await self._metric("kvern_operator_reconciles_total") >= wanted:
                return time.time()
            await asyncio.sleep(0.5)
        raise RuntimeError(f"fewer than {wanted} passes after {LONGEST:.0f} s")

    async def all(self) -> None:
        """Every phase in its order."""
        given = self._given
        async with Api(self._plane.admin) as api:
            if self._plane.name == "kwok":
                await planes.install(api)
            self.start_operator(given.operator)
            await self._leads()
            ready = Readiness(api)
            watched = asyncio.create_task(ready.run(), name="watch services")
            await asyncio.sleep(1.0)
            try:
                await self.steadily(api, ready, watched, "steady", given.steady)
                await self.settle()
                await self.burst(api, ready, watched, given.burst)
                await self.settle()
                if given.services > len(ready.at):
                    await self.mass(api, ready, watched, given.services, given.pods)
                    await self.settle()
                    await self.steadily(api, ready, watched, "beside", 20)
                await self.idle(given.idle)
                await self.restart("restart", given.operator)
                if given.before:
                    await self.restart("before", given.before)
            finally:
                watched.cancel()
                await asyncio.gather(watched, return_exceptions=True)

    async def _leads(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if await self._metric("kvern_operator_leader") == 1:
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("the operator does not lead after 60 s")

    def stop(self) -> None:
        """End the operator."""
        if self._operator is not None:
            self._operator.stop()


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=planes.ROOT)
    return found.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plane", choices=["kwok", "replay"], default="kwok")
    parser.add_argument("--steady", type=int, default=200, metavar="N", help="services, one a second")
    parser.add_argument("--burst", type=int, default=200, metavar="N", help="services at once")
    parser.add_argument("--services", type=int, default=1000, metavar="N", help="in the end")
    parser.add_argument("--pods", type=int, default=5000, metavar="N", help="in the end")
    parser.add_argument("--idle", type=float, default=180.0, metavar="SECONDS")
    parser.add_argument("--operator", type=Path, default=planes.ROOT / "operator", metavar="FOLDER", help="its source")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another version's, to be restarted as well")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the lines to it")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="stacks of the operator's processor time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs stay; else in a folder that is deleted")
    return parser.parse_args()


def main() -> int:
    """Exit code 0 where every promise is kept, 1 where one is not, 2 where something is missing or broke."""
    given = parse()
    planes.enter_own_network()
    planes.stop_on_signals()
    for path in (given.out, given.profile, given.keep):
        if path is not None:
            (path if path is not given.out else path.parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvern-scale-") as scratch:
        folder = (given.keep or Path(scratch)).absolute()
        given.profile = given.profile.absolute() if given.profile else None
        try:
            plane = planes.start_kwok(folder) if given.plane == "kwok" else planes.start_replay(folder)
        except RuntimeError as error:
            print(f"scale: {error}", file=sys.stderr)
            return 2
        run, engines = Run(given, plane), planes.start_engines(folder)
        try:
            asyncio.run(run.all())
        except RuntimeError as error:
            print(f"scale: {error}", file=sys.stderr)
            return 2
        finally:
            run.stop()
            engines.stop()
            plane.stop()
    return 0 if run.kept else 1


if __name__ == "__main__":
    sys.exit(main())
