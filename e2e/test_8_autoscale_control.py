"""The operator or the API server goes away while replicas or the layout change: what comes of it is what would have
come anyway, once, and no client sees an error.

`tests/operator/test_killed.py` kills the operator after each single write; here it is killed by the clock.
"""

import time
from collections.abc import Callable

import events
import nodes
import pytest
import streams
from busy import Show
from kit import Client, Service, eventually
from streams import Load
from test_8_autoscale import (
    LAID,
    LONGEST,
    SMALL,
    STABILIZATION,
    before_a_step,
    ended,
    has_told_of_size_two,
    known_texts,
    ready,
    scaling,
    size_proves_itself,
    story,
)

Make = Callable[..., Service]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.full, pytest.mark.alone]


def killed() -> None:
    """SIGKILL, as soon as the decision can be read."""
    events.kill_operator()


def frozen() -> None:
    """The one that has decided stops; another leads; the first wakes up and believes that it still does."""
    first = events.leader()
    nodes.signal(first, "operator", 19)
    try:
        eventually("the other leads", lambda: events.uid(events.leader()) != events.uid(first), 60)
    finally:
        nodes.signal(first, "operator", 18)


def cut_off() -> None:
    """No API server for a minute, in the burst."""
    nodes.api_server_away(60)


def stays_at_four(one: Service) -> None:
    """While the load goes on: longer than the stabilization window, in which a decision is made every 5 s."""
    until = time.monotonic() + STABILIZATION + 15
    while time.monotonic() < until:
        assert scaling(one)["desired"] == 4, scaling(one)["lastDecision"]
        time.sleep(1)


@pytest.mark.parametrize("disturb", [killed, frozen, cut_off], ids=lambda disturb: disturb.__name__)
def test_a_step_of_load_meanwhile(service: Make, client: Client, show: Show, disturb: Callable[[], None]) -> None:
    """A load for four replicas begins; with the first decision to add some, somebody goes away."""
    events.fresh_operator()
    if disturb is frozen:
        events.two_run()
    one, load = before_a_step(service, client, disturb.__name__)
    try:
        load.begin()
        eventually("more are wanted", lambda: [d for d in scaling(one)["history"] if d["kind"] == "up"], 60, every=0.2)
        disturb()
        eventually("four replicas ready", lambda: ready(one) == 4, 240)
        load.all_run(240)
        stays_at_four(one)
        made = [d for d in scaling(one)["history"] if d["from"] != d["to"]]
        counts = [made[0]["from"], *(d["to"] for d in made)]
        assert counts == sorted(counts) and counts[-1] == 4, counts  # no way back, and no more than are allowed
        assert len(one.pods()) == 4
        ended(load)
        story(one, show)
    finally:
        load.stop()
        events.one_runs()


def planned(one: Service) -> str:
    """The phase of the planner's change."""
    return str(one.object()["status"]["parallelism"]["plan"]["phase"])


@pytest.mark.parametrize("disturb", [killed, frozen], ids=lambda disturb: disturb.__name__)
def test_a_change_of_the_layout_meanwhile(
    service: Make, client: Client, show: Show, disturb: Callable[[], None]
) -> None:
    """The pod is told to change its layout, which takes it a quarter of a minute; who told it goes away. The next one
    finds the change under way in status, sees it through, and watches it."""
    events.fresh_operator()
    if disturb is frozen:
        events.two_run()
    one = service("load", **LAID, engine={"maxModelLen": LONGEST, "args": {**SMALL["sim"], "data-parallel-size": "2"}})
    load = Load(client, one, f"mid-{disturb.__name__}-{one.namespace}", streams=2, tokens=200, knock=5)
    known_texts(load, one.namespace, engine={"args": streams.FAST})
    one.wait_ready()
    pods = {p["metadata"]["uid"] for p in one.pods()}
    try:
        load.start()
        eventually("the layout changes", lambda: planned(one) == "Changing", 240, every=0.2)
        disturb()
        eventually("size 2 in place", lambda: one.object()["status"]["parallelism"]["current"] == 2, 120)
        size_proves_itself(one)
        ended(load)
        assert {p["metadata"]["uid"] for p in one.pods()} == pods
        assert [d["to"] for d in one.object()["status"]["parallelism"]["history"]] == [2]
        has_told_of_size_two(one, show)
    finally:
        load.stop()
        events.one_runs()
