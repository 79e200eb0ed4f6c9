"""Who leads: the decisions alone, then candidates against an API server in this process."""

import asyncio
import itertools
import time

import pytest
from effects import until
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.kube import KubeClient
from kvern_operator.leader import (
    Elector,
    Record,
    Sighting,
    Terms,
    awake_or_not,
    decide,
    from_lease,
    next_record,
    sight,
    to_spec,
)

PATH = "/apis/coordination.k8s.io/v1/namespaces/kvern-system/leases/kvern-operator"
FAST = Terms(duration=2.4, deadline=1.8, retry=0.1)
LONG = Terms(duration=600, deadline=400, retry=0.1)  # nothing expires while a test runs


def record(holder="a", renewed="t1", duration=15.0):
    return Record(holder, renewed, "t0", 3, duration)


def test_decisions():
    assert decide(None, "a", 0) == "create"
    assert decide(Sighting(record("a"), 0), "a", 1000) == "renew"
    assert decide(Sighting(record("b"), 0), "a", 14.9) == "wait"
    assert decide(Sighting(record("b"), 0), "a", 15.0) == "take"
    assert decide(Sighting(record(""), 0), "a", 0) == "take"  # released


def test_a_lease_expires_by_ones_own_clock_since_it_last_changed():
    seen = sight(None, record("b", "t1"), 100.0)
    seen = sight(seen, record("b", "t1"), 110.0)
    assert seen.since == 100.0
    seen = sight(seen, record("b", "t2"), 112.0)  # renewed, whatever "t2" says
    assert seen.since == 112.0 and decide(seen, "a", 120.0) == "wait"


def test_what_is_written():
    taken = next_record(record("b"), "a", "now", Terms())
    assert (taken.holder, taken.acquired, taken.transitions) == ("a", "now", 4)
    renewed = next_record(taken, "a", "later", Terms())
    assert (renewed.acquired, renewed.renewed, renewed.transitions) == ("now", "later", 4)
    assert from_lease({"spec": to_spec(renewed)}) == renewed
    assert from_lease({}).holder == ""


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.1, 30)), max_size=40), st.floats(0, 14))
def test_two_candidates_never_believe_at_once_that_they_lead(steps, latency):
    """Each looks and writes in one step (the API server orders writes); valid() is `deadline` from the step's start."""
    terms, now, lease = Terms(), 0.0, None
    sightings: dict[str, Sighting | None] = {"a": None, "b": None}
    renewed = {"a": float("-inf"), "b": float("-inf")}
    for me, wait in steps:
        now += wait
        sightings[me] = sight(sightings[me], lease, now) if lease else None
        if decide(sightings[me], me, now) != "wait":
            lease = next_record(lease, me, f"{now}", terms)
            sightings[me], renewed[me] = Sighting(lease, now), now
        assert sum(now - at < terms.deadline for at in renewed.values()) <= 1


def test_terms_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match=r"retry 3\.0 < deadline 20 < duration 15\.0 must hold"):
        Terms(deadline=20)


@pytest.fixture
async def make(api):
    made = []

    def candidate(name, terms=FAST):
        client = KubeClient(Configuration(host=api.url))
        made.append(client)
        return Elector(client, "kvern-system", "kvern-operator", name, terms)

    yield candidate
    for client in made:
        await client.close()


async def test_one_leads_another_takes_over_after_a_release_at_once(api, make):
    first, second = make("a", LONG), make("b", LONG)
    await first.acquire()
    assert first.valid() and api.objects[PATH]["spec"]["holderIdentity"] == "a"
    seen = []
    waiting = asyncio.create_task(second.acquire(seen.append))
    await until(lambda: seen)
    await asyncio.sleep(0.3)
    assert not waiting.done() and seen == ["a"] and not second.valid()
    await first.release()
    assert not first.valid()
    async with asyncio.timeout(60):
        await waiting
    assert api.objects[PATH]["spec"]["holderIdentity"] == "b"
    assert api.objects[PATH]["spec"]["leaseTransitions"] == 1


async def test_a_silent_leader_is_replaced_and_has_stopped_before(api, make):
    first, second = make("a"), make("b")
    await first.acquire()  # and never renews
    async with asyncio.timeout(60):
        await second.acquire()
    assert not first.valid() and second.valid()


async def test_keep_renews_and_ends_when_the_api_server_is_away_for_too_long(api, make):
    elector = make("a")
    await elector.acquire()
    keeping = asyncio.create_task(elector.keep())
    await asyncio.sleep(2.5)
    assert not keeping.done() and elector.valid()
    api.down = True
    async with asyncio.timeout(60):
        await keeping
    assert not elector.valid()


async def test_keep_bears_a_short_absence(api, make):
    elector = make("a")
    await elector.acquire()
    keeping = asyncio.create_task(elector.keep())
    api.down = True
    await asyncio.sleep(0.3)
    api.down = False
    await asyncio.sleep(2.2)
    assert not keeping.done() and elector.valid()
    keeping.cancel()


async def test_keep_ends_when_somebody_else_holds_the_lease(api, make):
    elector = make("a")
    await elector.acquire()
    lease = api.objects[PATH]
    api.put(PATH, {**lease, "spec": {**lease["spec"], "holderIdentity": "b", "renewTime": "x"}})
    async with asyncio.timeout(60):
        await elector.keep()
    assert not elector.valid() and elector.leader == "b"
    await elector.release()  # of another's lease: nothing
    assert api.objects[PATH]["spec"]["holderIdentity"] == "b"


async def test_a_leader_ends_when_the_data_are_older_than_they_were(api, make):
    """etcd was restored from a backup: the Lease is there, at a lower version than it had."""
    elector = make("a", LONG)
    await elector.acquire()
    keeping = asyncio.create_task(elector.keep())
    lease = api.objects[PATH]
    await asyncio.sleep(0.25)
    assert not keeping.done()
    api.objects[PATH] = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "7"}}
    async with asyncio.timeout(60):
        await keeping
    assert elector.gone_back and not elector.valid()
    # The process that starts next takes what is there for what there is.
    again = make("a", LONG)
    await again.acquire()
    assert again.valid() and not again.gone_back


async def test_a_lease_that_was_not_in_the_backup_is_noticed_as_well(api, make):
    elector = make("a", LONG)
    await elector.acquire()
    keeping = asyncio.create_task(elector.keep())
    del api.objects[PATH]
    api._versions = itertools.count(3)
    async with asyncio.timeout(60):
        await keeping
    assert elector.gone_back


async def test_a_standby_that_sees_a_restore_leads_on(api, make):
    first, second = make("a", LONG), make("b", LONG)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: second.leader == "a")
    lease = api.objects[PATH]
    spec = {**lease["spec"], "holderIdentity": ""}
    api.objects[PATH] = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "7"}, "spec": spec}
    async with asyncio.timeout(60):
        await waiting
    assert second.valid() and not second.gone_back


def test_a_lease_does_not_stay_fresh_while_the_machine_sleeps(monkeypatch):
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no clock that runs while it sleeps")
    monkeypatch.setattr(time, "clock_gettime", lambda clock: {time.CLOCK_BOOTTIME: 5000.0}[clock])
    assert awake_or_not() == 5000.0
