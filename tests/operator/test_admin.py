"""Asking pods: what is read, when it is asked, and that a hung one holds up nobody."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from effects import KEY, until

from kvern_operator.admin import Pace, Prober, Report, Target, read_layout, read_load, read_routes
from kvern_router.fleet import Fleet, Replica
from kvern_router.replicas import parse_replicas
from kvern_router.settings import Settings

FAST = Pace(usual=0.05, leaving=0.01, silent=0.02, layout=0.1, timeout=0.3, patience=2)


class Engine:
    """The admin port of an engine."""

    def __init__(self):
        self.load = {"draining": False, "in_flight": 2}
        self.layout = {"feasible": [{"size": 1, "kvTokens": 4096}], "device": "cpu"}
        self.hang, self.asked, self.told = False, 0, []
        self.refuse, self.busy = "", False

    async def drain(self, request):
        self.asked += 1
        if self.hang:
            await asyncio.sleep(30)
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({}, status=401)
        if request.method != "GET":
            self.told.append(request.method)
            self.load = {**self.load, "draining": request.method == "POST"}
        return web.json_response(self.load)

    async def layout_(self, request):
        if request.method == "POST":
            body = await request.json()
            self.told.append((body["tensor"], body["generation"]))
            if self.refuse:
                return web.json_response({"error": {"message": self.refuse}}, status=400)
            if self.busy:
                return web.json_response({"error": {"message": "a switch is running"}}, status=409)
            self.layout |= {"target": body["tensor"], "generation": body["generation"], "phase": "Resharding"}
            return web.json_response(self.layout, status=202)
        return web.json_response(self.layout)

    async def start(self):
        app = web.Application()
        app.router.add_route("*", "/admin/drain", self.drain)
        app.router.add_route("*", "/admin/layout", self.layout_)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
async def engine():
    engine = Engine()
    engine.address = await engine.start()
    yield engine
    await engine.runner.cleanup()


other = engine


@pytest.fixture
async def prober():
    changed = []
    prober = Prober(changed.append, FAST)
    prober.changes = changed
    yield prober
    await prober.close()


def target(engine, uid="p-1", restarts=0, token="secret"):
    return Target(uid, f"pod {uid}", restarts, engine.address, token)


async def test_a_pod_is_asked_and_its_answers_are_kept(engine, prober):
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"] == Report(2, False, ((1, 4096),), "cpu"))
    assert prober.changes == [KEY, KEY]  # its layout, then its load
    engine.load = {"draining": False, "in_flight": 5}
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 5)
    assert len(prober.changes) == 2  # a changing load is no reason to reconcile
    prober.watch(KEY, [target(engine)], leaving=["p-1"])
    engine.load = {"draining": True, "in_flight": 0}
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 0)
    assert len(prober.changes) == 3  # but for one that leaves it is


async def test_telling_shows_at_once(engine, prober):
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 2)
    await prober.tell(KEY, "p-1", draining=True)
    assert engine.told == ["POST"] and prober.reports(KEY)["p-1"].draining
    await prober.tell(KEY, "p-1", draining=False)
    assert engine.told == ["POST", "DELETE"] and not prober.reports(KEY)["p-1"].draining
    await prober.tell(KEY, "unknown", draining=True)


async def test_a_hung_pod_holds_up_nobody_and_becomes_unknown(engine, other, prober, caplog):
    prober.watch(KEY, [target(engine), target(other, "p-2")])
    await until(lambda: all(r.in_flight == 2 for r in prober.reports(KEY).values()))
    other.hang = True
    asked = engine.asked
    await until(lambda: prober.reports(KEY)["p-2"].in_flight is None, 20)  # not when the pod answers after all
    assert engine.asked > asked and prober.reports(KEY)["p-1"].in_flight == 2
    await prober.tell(KEY, "p-2", draining=True)
    assert "pod p-2 could not be told to drain: no answer in time" in caplog.text
    other.hang = False
    await until(lambda: prober.reports(KEY)["p-2"].in_flight == 2)


async def test_one_missed_answer_is_no_news(engine, prober):
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 2)
    prober.changes.clear()
    engine.load = {"what": "is this"}
    asked = engine.asked
    await until(lambda: engine.asked > asked)
    engine.load = {"draining": False, "in_flight": 2}
    await until(lambda: engine.asked > asked + 2)
    assert prober.reports(KEY)["p-1"].in_flight == 2 and prober.changes == []


async def test_a_restarted_pod_is_a_new_one_and_the_gone_are_not_asked(engine, prober):
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 2)
    prober.watch(KEY, [target(engine, restarts=1)])
    assert prober.reports(KEY)["p-1"] == Report()
    await until(lambda: prober.reports(KEY)["p-1"].in_flight == 2)
    prober.watch(KEY, [])
    assert prober.reports(KEY) == {}
    await asyncio.sleep(0.05)
    asked = engine.asked
    await asyncio.sleep(0.15)
    assert engine.asked == asked


async def test_a_wrong_token_is_no_answer(engine, prober):
    prober.watch(KEY, [target(engine, token="wrong")])
    await until(lambda: engine.asked > 2)
    assert prober.reports(KEY)["p-1"].in_flight is None


def test_odd_answers():
    before = Report(1, True, ((1, 10),), "cpu")
    with pytest.raises(ValueError, match="no in_flight"):
        read_load(["x"], before)
    with pytest.raises(ValueError, match="no in_flight"):
        read_load({"in_flight": "3"}, before)
    assert read_layout("x", before) == before
    assert read_layout({"feasible": [{"size": 1}]}, before) == before
    assert read_layout({"feasible": [{"size": float("inf"), "kvTokens": 1}]}, before) == before
    assert read_layout({"feasible": []}, before).feasible == ()


def a_router_with(listed):
    """A router's account of the replicas of a file, as its /-/replicas gives it."""

    def never_probed(replica: Replica) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(asyncio.sleep(60))

    fleet = Fleet(Settings(Path("replicas.json")), never_probed)
    fleet.update(parse_replicas(json.dumps({"replicas": listed})))
    said = json.loads(json.dumps({"model": fleet.model, "replicas": fleet.describe()}))
    fleet.close()
    return said


async def test_a_router_says_whom_it_sends_to(prober):
    ready = {"name": "smol-r0-0", "url": "http://10.0.0.1:8000", "state": "ready"}
    going = {"name": "smol-r1-0", "url": "http://10.0.0.2:8000", "state": "draining"}
    said, seen = a_router_with([ready, going]), []

    async def replicas(request):
        seen.append(request.headers.get("Authorization"))
        return web.json_response(said)

    app = web.Application()
    app.router.add_get("/-/replicas", replicas)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        prober.watch(KEY, [Target("p-9", "router", 0, address, "", routing=True)], leaving=["p-9"])
        await until(lambda: prober.reports(KEY)["p-9"].sends_to == {"smol-r0-0"})
        said = a_router_with([ready | {"state": "draining"}, going])
        await until(lambda: prober.reports(KEY)["p-9"].sends_to == frozenset())
        assert prober.changes == [KEY, KEY] and set(seen) == {None}
    finally:
        await runner.cleanup()
    await until(lambda: prober.reports(KEY)["p-9"].sends_to is None)  # it is gone, and not known to have left anybody


@pytest.mark.parametrize("answer", [None, [], {}, {"replicas": 3}, {"replicas": [{"name": "a"}]}])
def test_what_is_no_answer_of_a_router_is_none(answer):
    with pytest.raises(ValueError, match="no replicas"):
        read_routes(answer, Report())


SIZES = {"current": 1, "target": 1, "generation": 4, "phase": "Stable", "last": []}


async def test_a_pod_is_told_a_size_and_watched_until_it_has_it(engine, prober):
    engine.layout |= SIZES
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].layout.tensor == 1)
    await prober.switch(KEY, "p-1", 2)
    assert engine.told == [(2, 5)] and prober.reports(KEY)["p-1"].layout.switching
    prober.changes.clear()
    engine.layout |= {"current": 2, "phase": "Stable"}
    await until(lambda: prober.reports(KEY)["p-1"].layout.tensor == 2)
    assert not prober.reports(KEY)["p-1"].layout.switching and prober.changes
    await prober.switch(KEY, "p-1", 2)
    assert engine.told[-1] == (2, 5), "asked again for what it was told last: the same generation"


async def test_a_pod_that_refuses_a_size_says_why(engine, prober, caplog):
    engine.layout |= SIZES
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].layout.tensor == 1)
    engine.refuse = "tensor must be 1, the present size, got 2: the model is a pipeline of 2 stages."
    await prober.switch(KEY, "p-1", 2)
    assert prober.reports(KEY)["p-1"].refused == ((2, engine.refuse),)
    assert f"pod p-1 could not be told to change to tensor size 2: {engine.refuse}" in caplog.text
    await prober.switch(KEY, "nobody", 2)


async def test_one_that_is_busy_or_has_failed_is_looked_at_again(engine, prober):
    engine.layout |= SIZES
    prober.watch(KEY, [target(engine)])
    await until(lambda: prober.reports(KEY)["p-1"].layout.tensor == 1)
    engine.busy = True
    engine.layout |= {"generation": 9, "last": [{"to": 2, "outcome": "RolledBack", "reason": "worker 1 died"}]}
    await prober.switch(KEY, "p-1", 2)
    await until(lambda: prober.reports(KEY)["p-1"].layout.failed == (2, "worker 1 died"))
    report = prober.reports(KEY)["p-1"]
    assert report.refused == () and report.layout.generation_for(2) == 10


async def test_an_answer_without_end_is_not_read_to_it(engine, prober):
    engine.load["note"] = "x" * 2**21
    with pytest.raises(ValueError, match="an answer of over 1048576 bytes"):
        await prober.call("GET", target(engine), "/admin/drain")
