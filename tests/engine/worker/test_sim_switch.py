"""What a switch of the layout takes on a simulated device: the profile's figures, for what a real rank would move."""

import json
from pathlib import Path

import pytest

from kvern_engine.config import EngineConfig
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import Finish, MoveKv, Reform, Switched, SwitchToWorker
from kvern_engine.worker.sim import SimWorker
from kvern_engine.worker.sim_profile import load_profile
from kvern_engine.worker.sim_switch import SimReformed
from kvern_engine.worker.switching import Switching, reformed

COSTS = {
    "group_seconds": 0.2,
    "build_seconds": 0.3,
    "kv_seconds": 0.1,
    "peer_bytes_per_second": 1e9,
    "copy_bytes_per_second": 1e10,
    "weight_bytes": 4_000_000_000,
    "kv_bytes_per_token": 1000,
    "kv_heads": 8,
}


@pytest.fixture
def profile(tmp_path: Path) -> str:
    from kvern_engine.worker import sim_profile

    shipped = json.loads((Path(sim_profile.__file__).parent / "sim_profiles" / "h200-llama3-8b.json").read_text())
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(shipped | COSTS))
    return str(path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def switched(profile: str, before: tuple[int, int], after: tuple[int, int], rank: int = 0, **fields: float):
    clock = Clock()
    sizes = {"data_parallel_size": before[0], "tensor_parallel_size": before[1]}
    config = EngineConfig(model="sim", device="sim", sim_profile=profile, block_size=16, **sizes, **fields)
    worker = SimWorker(config, rank, clock=clock, sleep=clock.sleep)
    ready = worker.load()
    began = clock.now
    found = reformed(worker, ready, Reform(1, *after, "file:///nowhere", 1.0))
    assert isinstance(found, SimReformed)
    assert clock.now - began == pytest.approx(sum(found.seconds.values()))
    return found, clock


def test_an_engine_that_grows_copies_its_half_and_moves_kv(profile: str) -> None:
    found, clock = switched(profile, (2, 1), (1, 2))
    assert found.seconds == pytest.approx({"groups": 0.2, "build": 0.3, "weights": 2e9 / 1e10})
    assert found.ready.weight_bytes == 2_000_000_000
    assert found.ready.num_blocks > 2 * SimWorker(found.worker.config, 0, like=found.worker).load().num_blocks // 3
    began = clock.now
    moves = [(0, 0, [(i, i) for i in range(100)]), (1, 0, [(i, 100 + i) for i in range(100)])]
    seconds = found.move_kv(moves)
    each = 16 * 500  # bytes of a block on a rank that holds half of the heads
    assert seconds == pytest.approx({"kv": 0.1 + 100 * each / 1e9 + 100 * each / 1e10})
    assert clock.now - began == pytest.approx(seconds["kv"])


def test_an_engine_that_shrinks_receives_what_it_lacks(profile: str) -> None:
    found, _ = switched(profile, (1, 2), (2, 1), rank=1)
    assert found.seconds["weights"] == pytest.approx(2e9 / 1e9 + 2e9 / 1e10)
    seconds = found.move_kv([(0, 1, [(0, 0), (1, 1)])])
    assert seconds["kv"] == pytest.approx(0.1 + 16_000 / 1e9 + 16_000 / 1e10)


def test_simulated_time_goes_as_fast_as_it_is_told(profile: str) -> None:
    slow, _ = switched(profile, (2, 1), (1, 2))
    fast, _ = switched(profile, (2, 1), (1, 2), sim_speed=4.0)
    assert {name: seconds / 4 for name, seconds in slow.seconds.items()} == pytest.approx(fast.seconds)


def test_the_shipped_profile_says_what_a_switch_takes() -> None:
    shipped = load_profile("h200-llama3-8b")
    assert shipped.group_seconds > 0 and shipped.build_seconds > 0 and shipped.peer_bytes_per_second > 1e11


def test_rates_must_be_above_zero(profile: str) -> None:
    path = Path(profile)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"copy_bytes_per_second": 0}))
    with pytest.raises(ValueError, match="copy_bytes_per_second must be above 0, got 0"):
        load_profile(profile)


SWITCHED = [Reform(1, 1, 2, "file:///nowhere", 1.0), MoveKv(1, [])]


@pytest.mark.parametrize(
    "messages",
    [
        [Reform(2, 2, 1, "file:///nowhere", 1.0), Finish(1, True), MoveKv(2, []), Finish(2, False)],
        [Finish(2, False), Finish(1, True)],
    ],
    ids=["as the next one begins", "as the next one fails"],
)
def test_the_last_word_about_a_switch_may_come_late(profile: str, messages: list[SwitchToWorker]) -> None:
    """Each switch has a socket of its own. What comes of the next one tells that the last one has succeeded."""
    clock = Clock()
    config = EngineConfig(model="sim", device="sim", sim_profile=profile, block_size=16, data_parallel_size=2)
    worker = SimWorker(config, 0, clock=clock, sleep=clock.sleep)
    told: list[Switched] = []
    serving = Switching(worker, worker.load(), told.append)
    for message in [*SWITCHED, *messages]:
        serving.handle(message)
    assert not [answer.error for answer in told if answer.error]
    assert serving.worker.layout == Layout(1, 2), "the second switch went back to what the first one had made"
