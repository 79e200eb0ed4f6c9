"""Deaths, hangs and failed starts in real processes on the simulated device: who is told what, and what is left over.

The scenarios are those of `benchmarks/failures.py`, which writes docs/failures.md from all of them.
"""

import failures
import pytest
import start_stop
import switch_failures
from failures import NotHere, Outcome

TOLD_WITHIN = 15.0  # seconds, on a machine with much else to do; below the 20 that a rank may be starved for


def run(name: str) -> Outcome:
    try:
        outcome = failures.SCENARIOS[name]("sim")
    except NotHere as reason:
        pytest.skip(str(reason))
    assert outcome.left_over == []
    return outcome


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kill_rank", "worker 1 (engine 0, stage 0, tensor rank 1) was killed by SIGKILL"),
        ("stop_rank", "is stopped (SIGSTOP), no sign of life for 2.5 s"),
    ],
)
def test_a_dead_or_hanging_rank_ends_its_engine_alone(name: str, words: str) -> None:
    outcome = run(name)
    assert outcome.seconds < TOLD_WITHIN
    assert words in outcome.client and "worker 1" in outcome.client and "send it again" in outcome.client
    assert "worker 1" in outcome.log and "engine=0" in outcome.log
    assert outcome.health == "200" and outcome.ready == "200 (engines: 0 dead, 1 ready)"
    assert outcome.others == "2 of 2 other streams go on; a new request got 200"


def test_the_last_engine_takes_the_pod_with_it() -> None:
    outcome = run("kill_last")
    assert outcome.seconds < TOLD_WITHIN
    assert (outcome.health, outcome.ready, outcome.status) == ("503", "503 (engines: 0 dead)", 1)
    assert outcome.log.startswith("kvern serve: error: worker 1 (engine 0, stage 0, tensor rank 1) was killed")


def test_a_rank_that_never_joins_is_named() -> None:
    outcome = run("rank_missing")
    assert outcome.status == 1
    assert outcome.log == "kvern serve: error: worker 1 of 2 did not join: nothing was heard for 6 s"
    assert outcome.health == "200 while waiting" and outcome.client == "503: The model is still loading. Please retry."


def test_no_room_for_shared_memory_is_said_before_anything_starts() -> None:
    outcome = run("memory_full")
    assert outcome.status == 1 and "512 KiB free, and sockets and shared memory need 1024 KiB there" in outcome.log


def test_starting_and_stopping_leaves_nothing() -> None:
    result = start_stop.run(3, "sim", ["-tp", "2"])
    assert result["left_over"] == [] and result["descriptors_grown"] == 0


@pytest.mark.parametrize(
    ("phase", "strike", "words"),
    [
        ("Preparing", "SIGSTOP", "is stopped (SIGSTOP), no sign of life for 2.5 s"),
        ("Adopting", "kill -9", "worker 3 (engine 1, stage 0, tensor rank 1) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_is_lost_while_the_layout_changes(phase: str, strike: str, words: str) -> None:
    seen = switch_failures.strike("sim", phase, strike, 3)
    assert seen.outcome.startswith("RolledBack: worker 3") and words in seen.outcome
    assert "2 of 4 streams complete; the others: The engine that ran this request died: worker R" in seen.clients
    assert seen.health == "200 / 200" and "a new request got 200" in seen.after
    assert "a new switch 400 (not all of its engines are ready.)" in seen.after
    assert seen.left_over == []
