"""The API server's side of a switch of the layout: what is held, what fences say, and where everything goes after."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvern_engine.ipc import Abort, AddRequest, CoreReady, EngineDead, EngineStats, Outputs, TokenOutput
from kvern_engine.metrics import Metrics, PodView
from kvern_engine.parallel.messages import Drained, Fence, Hold, LayoutChanged, Left
from kvern_engine.request import SamplingParams
from kvern_engine.server.engine_client import EngineClient, Mailbox
from kvern_engine.transport import (
    SUPERVISOR_IN,
    bind,
    connect,
    core_in,
    decode_to_core,
    decode_to_supervisor,
    encode,
    server_in,
)


def request(name: str) -> AddRequest:
    return AddRequest(name, 0, [5, 6, 7], SamplingParams(max_tokens=4), time.monotonic())


class Pod:
    """The sockets of three cores and a supervisor, played by the test."""

    def __init__(self, folder: str, engines: int, metrics: Metrics | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.cores = [bind(self._context, zmq.PULL, folder, core_in(e)) for e in range(3)]
        self.supervisor = bind(self._context, zmq.PULL, folder, SUPERVISOR_IN)
        self.client = EngineClient(0, folder, engines, metrics)
        self._server = connect(self._context, zmq.PUSH, folder, server_in(0), linger_ms=500)
        for engine in range(engines):
            self.say(self.ready(engine))

    @staticmethod
    def ready(engine: int) -> CoreReady:
        return CoreReady(engine, 32, 16, 512)

    def say(self, message: Any) -> None:
        self._server.send(encode(message))

    async def wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 10
        while not (value := condition()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        return value

    async def got(self, engine: int) -> Any:
        """The next message at a core."""
        await self.wait(lambda: self.cores[engine].poll(0))
        return decode_to_core(self.cores[engine].recv())

    async def nothing(self, engine: int) -> None:
        await asyncio.sleep(0.1)
        assert not self.cores[engine].poll(0)

    async def begin(self, *names: str) -> dict[str, Any]:
        """Requests that run, by name; engines take turns."""
        await self.wait(lambda: all(view.state == "ready" for view in self.client.views()))
        handles = {name: self.client.submit(request(name), Mailbox()) for name in names}
        for handle in handles.values():
            assert isinstance(await self.got(handle.engine), AddRequest)
        return handles

    async def hold(self, engines: int) -> None:
        self.say(Hold(1, engines))
        for engine in range(engines):
            assert await self.got(engine) == Fence(1, 0)

    def close(self) -> None:
        self.client.close()
        for sock in (*self.cores, self.supervisor, self._server):
            sock.close()
        self._context.term()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvern-") as made:
        yield str(Path(made))


async def test_nothing_comes_after_a_fence_and_all_of_it_later(folder: str) -> None:
    pod = Pod(folder, 2)
    try:
        running = await pod.begin("a", "b", "gone")
        await pod.hold(2)
        held = pod.client.submit(request("held"), Mailbox())
        pod.client.release(pod.client.submit(request("left"), Mailbox()), "abort")  # never sent, and never to be
        pod.client.release(running["gone"], "abort")
        pod.client.end_choice(running["a"], 0)
        for engine in (0, 1):
            await pod.nothing(engine)
        pod.say(LayoutChanged(1, 1, 2, [pod.ready(0)], {"a": 0, "b": 0, "gone": 0}))
        found = [await pod.got(0) for _ in range(3)]
        assert [m.request_id for m in found if isinstance(m, AddRequest)] == ["held"]
        assert [m for m in found if isinstance(m, Abort)] == [Abort(["gone"]), Abort([], [("a", 0)])]
        await pod.nothing(0)
        await pod.nothing(1)
        assert [view.engine for view in pod.client.views()] == [0]
        assert {handle.engine for handle in (*running.values(), held)} - {running["gone"].engine} <= {0}
        assert pod.client._balancer.load == [sum(h.cost for h in (running["a"], running["b"], held))]
    finally:
        pod.close()


async def test_an_engine_that_has_not_reported_yet_holds_nothing(folder: str) -> None:
    """Neither after the start nor after a switch: without its report all blocks would seem to be in use."""
    pod = Pod(folder, 2)

    def free() -> list[int]:
        return [view.stats.blocks_free for view in pod.client.views() if view.state == "ready"]

    try:
        await pod.begin()
        assert free() == [32, 32]
        await pod.hold(2)
        pod.say(LayoutChanged(1, 1, 2, [pod.ready(0)], {}))
        await pod.wait(lambda: len(pod.client.views()) == 1)
        assert free() == [32]
    finally:
        pod.close()


async def test_a_long_freeze_is_no_stall(folder: str) -> None:
    """A failing switch may freeze its pod for minutes; a /health of 503 would have it restarted."""
    pod = Pod(folder, 1)

    def states() -> list[str]:
        for engine in pod.client._engines:
            engine.heard, engine.stats = time.monotonic() - 1000, EngineStats(0, heartbeat=time.monotonic() - 1000)
        return [view.state for view in pod.client.views()]

    try:
        await pod.begin()
        assert states() == ["stalled"]
        await pod.hold(1)
        await pod.wait(lambda: states() == ["ready"])
        pod.say(LayoutChanged(1, 1, 1, [pod.ready(0)], {}))
        await pod.wait(lambda: states() == ["stalled"])
    finally:
        pod.close()


async def test_the_last_outputs_are_read_before_the_switch_goes_on(folder: str) -> None:
    pod = Pod(folder, 2)
    try:
        running = await pod.begin("a", "b")
        await pod.hold(2)
        for engine in (0, 1):
            name = next(name for name, handle in running.items() if handle.engine == engine)
            pod.say(Outputs(engine, [TokenOutput(name, 0, [engine], "length")]))
            await asyncio.sleep(0.05)
            assert not pod.supervisor.poll(0)
            pod.say(Left(1, engine))
        await pod.wait(lambda: pod.supervisor.poll(0))
        assert decode_to_supervisor(pod.supervisor.recv()) == Drained(1, 0)
        # Both have ended, but nobody has read that yet: engine 1 is no more, and that is no matter.
        pod.say(LayoutChanged(1, 1, 2, [pod.ready(0)], {}))
        await pod.wait(lambda: len(pod.client.views()) == 1)
        after = pod.client.submit(request("after"), Mailbox())
        message = await pod.got(0)
        assert isinstance(message, AddRequest) and message.request_id == "after" and after.engine == 0
        for handle in running.values():
            pod.client.release(handle, "length")
        await pod.nothing(0)
        assert pod.client._balancer.load == [after.cost]
    finally:
        pod.close()


async def test_an_engine_that_dies_in_a_switch_keeps_nobody_waiting(folder: str) -> None:
    pod = Pod(folder, 2)
    try:
        running = await pod.begin("a", "b")
        await pod.hold(2)
        box = Mailbox()
        for number in range(2):  # one of them is meant for the engine that dies
            pod.client.submit(request(f"held{number}"), box)
        pod.say(Left(1, 0))
        pod.say(EngineDead(1, "worker 1 was killed", last=False))
        await pod.wait(lambda: pod.supervisor.poll(0))
        assert decode_to_supervisor(pod.supervisor.recv()) == Drained(1, 0)
        pod.say(LayoutChanged(1, 2, 1, [pod.ready(0)], {}))
        found = [await pod.got(0) for _ in range(2)]
        assert {message.request_id for message in found} == {"held0", "held1"}
        assert [view.state for view in pod.client.views()] == ["ready", "dead"]
        assert [handle.engine_died for handle in running.values()] == [h.engine == 1 for h in running.values()]
    finally:
        pod.close()


async def test_more_engines_are_reached_too(folder: str) -> None:
    pod = Pod(folder, 1)
    try:
        await pod.begin("a")
        await pod.hold(1)
        pod.say(LayoutChanged(1, 3, 1, [pod.ready(engine) for engine in range(3)], {"a": 2}))
        await pod.wait(lambda: len(pod.client.views()) == 3)
        pod.client.abort("a")
        assert await pod.got(2) == Abort(["a"])
        for number in range(3):
            pod.client.submit(request(f"new{number}"), Mailbox())
        for engine in range(3):
            assert isinstance(await pod.got(engine), AddRequest)
    finally:
        pod.close()


async def test_a_core_may_be_faster_than_the_news_of_its_layout(folder: str) -> None:
    """Its sockets are others than the supervisor's: what it says first may be read first, and is part of a stream."""
    pod = Pod(folder, 1)
    try:
        handle = (await pod.begin("a"))["a"]
        await pod.hold(1)
        pod.say(Outputs(2, [TokenOutput("a", 0, [7])], EngineStats(2, num_running=1)))
        pod.say(LayoutChanged(1, 3, 1, [pod.ready(engine) for engine in range(3)], {"a": 2}))
        pod.say(Outputs(2, [TokenOutput("a", 0, [8])]))
        await pod.wait(lambda: handle.counts == [2])
        assert [output.token_ids for _, output in await handle.mailbox.get()] == [[7], [8]]
        assert handle.engine == 2
    finally:
        pod.close()


async def test_who_left_in_an_earlier_switch_has_not_left_in_this_one(folder: str) -> None:
    pod = Pod(folder, 2)
    try:
        await pod.begin("a", "b")
        await pod.hold(2)
        pod.say(LayoutChanged(1, 2, 1, [pod.ready(0), pod.ready(1)], {}))  # it went back before the last outputs came
        pod.say(Hold(2, 2))
        for engine in (0, 1):
            assert await pod.got(engine) == Fence(2, 0)
            pod.say(Left(1, engine))
        await asyncio.sleep(0.1)
        assert not pod.supervisor.poll(0)
        for engine in (0, 1):
            pod.say(Left(2, engine))
        await pod.wait(lambda: pod.supervisor.poll(0))
        assert decode_to_supervisor(pod.supervisor.recv()) == Drained(2, 0)
    finally:
        pod.close()


async def test_tokens_are_counted_at_the_engine_that_computes_them(folder: str) -> None:
    """Not at one that there is no more."""
    view = PodView([], False, {}, {}, None)
    metrics = Metrics(Path(folder), model_name="m", num_engines=2, handlers=[], view=lambda: view)
    pod = Pod(folder, 2, metrics)

    def counted(name: str) -> list[float]:
        series = next(series for series in metrics.series if series.name == name)
        return [metrics.slots.own[slot] for slot in series.start.values()]

    try:
        running = await pod.begin("a", "b")
        await pod.hold(2)
        held = pod.client.submit(request("c"), Mailbox())
        pod.say(LayoutChanged(1, 1, 2, [pod.ready(0)], {"a": 0, "b": 0}))
        pod.say(Outputs(0, [TokenOutput(name, 0, [1], "length") for name in ("a", "b", "c")]))
        handles = [*running.values(), held]
        await pod.wait(lambda: all(handle.left == 0 for handle in handles))
        for handle in handles:
            pod.client.release(handle, "length")
        assert counted("vllm:generation_tokens") == [3, 0]
        assert sum(counted("vllm:request_success")[:4]) == 3
    finally:
        pod.close()


async def test_counters_of_engines_do_not_fall(folder: str) -> None:
    """Each core counts from 0; what those before it counted stays, also of engines that there are no more."""
    pod = Pod(folder, 2)

    def say(engine: int, steps: int) -> None:
        pod.say(Outputs(engine, [], EngineStats(engine, steps=steps, step_seconds={"wait": float(steps)})))

    def counted() -> dict[int, tuple[int, float]]:
        found = {**pod.client.past(), **{view.engine: view.stats for view in pod.client.views()}}
        return {engine: (stats.steps, stats.step_seconds.get("wait", 0.0)) for engine, stats in found.items()}

    try:
        await pod.begin()
        expected = {0: 0, 1: 0}
        for switch, engines in ((1, 1), (2, 2), (3, 1)):
            for engine in range(len(pod.client.views())):
                say(engine, 10 + engine)
                expected[engine] += 10 + engine
            pod.say(Hold(switch, len(pod.client.views())))
            for engine in range(len(pod.client.views())):
                pod.say(Left(switch, engine))
            pod.say(LayoutChanged(switch, engines, 1, [pod.ready(engine) for engine in range(engines)], {}))
            await pod.wait(lambda wanted=engines: len(pod.client.views()) == wanted)
            assert counted() == {engine: (steps, float(steps)) for engine, steps in expected.items()}
    finally:
        pod.close()
