"""Switches one after the other, whatever comes in whatever order and whoever dies: never two cores over one worker,
every request goes on where its API server believes it to be or is told an error, and each switch ends."""

import logging
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from switch_world import NextWorker, World

from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import ChangeLayout
from kvern_engine.worker import switching

LAYOUTS = [Layout(4, 1), Layout(2, 2), Layout(1, 4)]


@pytest.fixture(scope="module", autouse=True)
def workers_without_devices() -> Any:
    """There is nothing to collect, either, and what fails on purpose is not to be read about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switching, "reformed", NextWorker)
        patch.setattr(switching, "gc", SimpleNamespace(collect=lambda: 0))
        for name in ("layout_switch", "worker.switching"):
            patch.setattr(logging.getLogger(f"kvern_engine.{name}"), "disabled", True)
        yield


class Chance:
    """What happens next in a world, at random; `harm` is how likely something goes wrong."""

    def __init__(self, world: World, rng: random.Random, harm: float) -> None:
        self._world, self._rng, self._harm, self._generation = world, rng, harm, 0
        self._haste: dict[Any, float] = {}  # of each channel: some are a thousand times slower than others

    def _deliver(self) -> None:
        channels = list(self._world.channels)
        haste = [self._haste.setdefault(channel, 10 ** self._rng.uniform(-3, 0)) for channel in channels]
        self._world.deliver(self._rng.choices(channels, haste)[0])

    def happen(self) -> None:
        world, rng = self._world, self._rng
        if rng.random() < self._harm:
            self._harmful()
            return
        chance = rng.random()
        if world.channels and chance < 0.7:
            self._deliver()
        elif world.exits and chance < 0.75:
            world.notice(rng.randrange(len(world.exits)))
        elif chance < 0.8:
            self._generation += 1
            world.switch.ask(ChangeLayout(0, 1, rng.choice([1, 2, 4]), self._generation))
        elif chance < 0.9:
            core = world.processes_of.get(("core", rng.randrange(4)))
            if core is not None:
                core.step()
        else:
            server = world.processes_of.get(("server", rng.randrange(len(world.servers))))
            if server is not None:
                (server.submit if rng.random() < 0.6 else server.abort)(rng.randrange(100))
        world.now += 0.01
        world.switch.tick()

    def _harmful(self) -> None:
        world, rng = self._world, self._rng
        what = rng.choice(["death", "late", "late", "fails", "fails", "server"])
        if what == "death":
            kind, number = victim = rng.choice(["worker", "core"]), rng.randrange(4)
            world.end(victim, f"{kind} {number} was killed by SIGKILL")
        elif what == "late":
            world.now += rng.choice([5.0, 40.0, 100.0])
        elif what == "fails":
            worker = world.processes_of.get(("worker", rng.randrange(4)))
            if worker is not None:
                worker.worker.fails = rng.choice(["", "there", "on the way back, too"])
        elif len(world.servers) > 1:
            idle = world.processes_of.get(("server", 1))
            if idle is not None and not idle.engine_of:
                world.end(("server", 1), "it had nothing left to do")

    def settle(self) -> None:
        """Let everything arrive; who does not answer is out of time."""
        world, rng = self._world, self._rng
        for _ in range(40):
            while world.channels or world.exits:
                if (world.exits and rng.random() < 0.2) or not world.channels:
                    world.notice(rng.randrange(len(world.exits)))
                else:
                    self._deliver()
            if not world.switch.running:
                return
            world.now += 100.0
            world.switch.tick()
        raise AssertionError("it does not end")


def play(source: Layout, servers: int, harm: float, seed: int, events: int = 400) -> World:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), source, servers)
        chance = Chance(world, random.Random(seed), harm)
        for _ in range(events):
            if len(world.dead) == world.layout.data:
                return world  # the pod has failed
            chance.happen()
        chance.settle()
        if len(world.dead) < world.layout.data:
            world.check_at_rest()
            assert not list(Path(folder).iterdir())
        return world


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.integers(0, 2**32))
def test_nobody_is_harmed_where_nothing_fails(source: Layout, servers: int, seed: int) -> None:
    world = play(source, servers, 0.0, seed)
    assert not world.dead and not any(server.failed for server in world.servers)
    assert world.state is None or not world.state.totals.get("RolledBack")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 3), st.sampled_from([0.005, 0.02, 0.05]), st.integers(0, 2**32))
def test_whatever_fails_only_the_dead_are_lost(source: Layout, servers: int, harm: float, seed: int) -> None:
    play(source, servers, harm, seed)
