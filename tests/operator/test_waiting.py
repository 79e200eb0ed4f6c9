"""Waiting with a limit: a cancellation always gets through, whatever else happens in the same turn of the loop."""

import asyncio

import pytest
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.kube import KubeClient
from kvern_operator.notices import NoticeReader, Subject
from kvern_operator.queue import KeyQueue, Workers
from kvern_operator.waiting import wait_or_timeout


async def ends(task: "asyncio.Task[object]") -> bool:
    """Whether it does so, given far more time than it needs."""
    done, _ = await asyncio.wait({task}, timeout=30)
    return bool(done)


async def test_it_says_whether_the_event_came():
    event = asyncio.Event()
    assert not await wait_or_timeout(event, 0.01)
    assert not await wait_or_timeout(event, 0) and not await wait_or_timeout(event, -1)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await wait_or_timeout(event, 60)
    assert await wait_or_timeout(event, 0) and await wait_or_timeout(event, None)


@pytest.mark.parametrize("first", ["event", "cancellation"])
@pytest.mark.parametrize("seconds", [None, 60.0])
async def test_a_cancellation_that_comes_with_the_event_is_passed_on(first, seconds):
    event = asyncio.Event()
    task = asyncio.create_task(wait_or_timeout(event, seconds))
    await asyncio.sleep(0)
    assert not task.done()
    for act in (event.set, task.cancel) if first == "event" else (task.cancel, event.set):
        act()
    assert await ends(task) and task.cancelled()


async def test_a_cancellation_that_comes_with_the_timeout_is_passed_on():
    async def waits() -> None:
        loop = asyncio.get_running_loop()
        while True:  # as the loops do that use it
            loop.call_later(0.01, task.cancel)
            await wait_or_timeout(asyncio.Event(), 0.01)

    task = asyncio.create_task(waits())
    assert await ends(task) and task.cancelled()


async def test_others_get_a_turn_though_the_event_is_set():
    """A loop around it whose own work sets the event again must not keep the whole program to itself."""
    event, turns = asyncio.Event(), []
    event.set()

    async def other() -> None:
        turns.append("other")

    task = asyncio.create_task(other())
    assert await wait_or_timeout(event, 60)
    assert turns == ["other"] and task.done()


async def test_loops_around_it_end_when_cancelled_as_something_comes():
    """What waits in the operator for work, and is stopped just as some comes."""

    async def work(_: object) -> None:
        pass

    workers = Workers(KeyQueue(), work)
    workers.add(("ns", "later"), 1000)  # so that there is something to wait for, with a limit
    notices = NoticeReader(KubeClient(Configuration(host="http://127.0.0.1:9")), lambda _: None)
    notices.want(("ns", "later"), Subject(frozenset({"pod"}), "router"))
    for run, wake in ((workers.run, lambda: workers.add(("ns", "now"))), (notices.run, notices._more.set)):
        task = asyncio.create_task(run())
        for _ in range(5):
            await asyncio.sleep(0)
        wake()
        task.cancel()
        assert await ends(task) and task.cancelled()
