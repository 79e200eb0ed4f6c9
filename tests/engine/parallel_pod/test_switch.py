"""A pod whose layout changes while it serves: streams that see a pause and nothing else, and ways back when a part of
it dies. The same experiment as `benchmarks/switch.py`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pods import wait_for
from switch import SwitchPod, make_eight_heads, streams

from kvern_engine.worker.sim_profile import load_profile

ENDS = 120.0
FULL = os.environ.get("KVERN_TEST_FULL") == "1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_eight_heads(tmp_path_factory.mktemp("model"))


@contextmanager
def four_ranks(model: str, folder: Path) -> Iterator[SwitchPod]:
    """A pod on CPUs, of which nothing may be left at its end."""
    made = SwitchPod(model, folder, "--num-gpu-blocks-override", "400", device="cpu")
    yield made
    made.pod.stop()
    assert made.pod.left_over() == []


@pytest.fixture(scope="module")
def pod(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwitchPod]:
    with four_ranks(model, tmp_path_factory.mktemp("pod")) as made:
        yield made


@pytest.fixture
def own_pod(model: str, tmp_path: Path) -> Iterator[SwitchPod]:
    """For one test, which breaks it."""
    with four_ranks(model, tmp_path) as made:
        yield made


def test_streams_see_a_pause_and_the_same_text(pod: SwitchPod) -> None:
    undisturbed = streams(pod, 6, 150).finish()
    assert not undisturbed.errors
    before = pod.held()
    running = streams(pod, 6, 150)
    running.wait_for_tokens(3)
    for tensor in (2, 4, 2, 1):
        record = pod.switch(tensor)
        assert record["outcome"] == "Switched", record
        assert record["recomputed"] == 0
    assert running.alive, "the switches were to come while streams run"
    found = running.finish()
    assert not found.errors and found.texts == undisturbed.texts
    again = pod.switch(1)  # idempotent: it is so already
    assert again["to"] == 1 and pod.layout()["phase"] == "Stable"
    assert pod.held() == before
    assert pod.blocks_in_use() == 0


def test_a_simulated_pod_switches_as_a_real_one_does(model: str, tmp_path: Path) -> None:
    """What the profile says a switch takes is what it takes; the rest (cores, streams, blocks) is the real thing."""
    speed = 1.0
    made = SwitchPod(model, tmp_path, "--num-gpu-blocks-override", "1000", "--sim-speed", str(speed), device="sim")
    try:
        undisturbed = streams(made, 6, 500).finish()
        assert not undisturbed.errors
        running = streams(made, 6, 500)
        running.wait_for_tokens(3)
        profile = load_profile("h200-llama3-8b")
        for tensor in (2, 4, 2, 1):
            record = made.switch(tensor)
            assert (record["outcome"], record["recomputed"]) == ("Switched", 0), record
            assert record["seconds"]["groups"] == pytest.approx(profile.group_seconds / speed)
            assert record["seconds"]["build"] == pytest.approx(profile.build_seconds / speed)
            assert record["pauseSeconds"] >= (profile.group_seconds + profile.build_seconds) / speed
        found = running.finish()
        assert not found.errors and found.texts == undisturbed.texts
        assert made.blocks_in_use() == 0
    finally:
        made.pod.stop()
    assert made.pod.left_over() == []


def test_who_asks_wrongly_is_told(pod: SwitchPod) -> None:
    pod.switch(1)
    old = pod.generation
    status, body = pod.ask(3, old + 1)
    assert status == 400 and body["error"]["code"] == "layout_not_feasible"
    assert body["error"]["message"] == "tensor must be one of 1, 2, 4 on the 4 devices of this pod, got 3."
    assert pod.ask(1, old + 3)[0] == 200
    status, body = pod.ask(2, old + 2)
    words = f"generation {old + 2} is older than {old + 3}, which was asked for before."
    assert status == 409 and body["error"]["message"] == words
    assert pod.ask(2, old + 4)[0] == 202
    assert pod.ask(2, old + 4)[0] in (200, 202)
    status, body = pod.ask(4, old + 5)
    assert status == 409 and body["error"]["code"] == "switch_in_progress"
    assert wait_for(lambda: pod.layout()["phase"] == "Stable", ENDS)
    assert pod.layout()["current"] == 2
    pod.generation = old + 5


@pytest.mark.parametrize(
    ("kill", "why"),
    [(True, "worker 3 was killed by SIGKILL"), *([(False, "stopped (SIGSTOP)")] if FULL else [])],
    ids=["killed", *(["stopped"] if FULL else [])],
)
def test_a_lost_rank_takes_its_engine_along_and_nobody_else(own_pod: SwitchPod, kill: bool, why: str) -> None:
    """Stopped before the switch, so that the others wait for it; killed while they do, or not (KVERN_TEST_FULL=1; of
    simulated ranks in test_failures.py)."""
    pod = own_pod
    running = streams(pod, 4, 400)
    running.wait_for_tokens(3)
    victim = pod.pod.children("worker-3")[0]
    victim.send_signal(signal.SIGSTOP)
    assert pod.ask(2, 1)[0] == 202
    if kill:
        victim.send_signal(signal.SIGKILL)
    assert wait_for(lambda: pod.layout()["phase"] == "Stable", ENDS)
    (record, *_) = pod.layout()["last"]
    assert record["outcome"] == "RolledBack" and 0 <= record["secondsAgo"] < 60
    assert why in record["reason"]
    assert (pod.layout()["current"], pod.layout()["engines"]) == (1, 4)
    found = running.finish()
    assert len(found.errors) <= 1, "only what engine 3 had is lost"
    assert all("worker 3" in text for text in found.errors.values())
    assert record["pauseSeconds"] < (20 if kill else 40)  # this machine may be busy; a phase may take 90 s
    status, body = pod.ask(2, 2)
    assert status == 400 and "not all of its engines are ready" in body["error"]["message"]
