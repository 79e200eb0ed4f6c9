"""A simulated device becomes a rank of another layout: nothing is moved, and it takes the time that real ones would."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvern_engine.core.plan import WorkerReady
from kvern_engine.parallel.layout import Layout, even_slice
from kvern_engine.parallel.messages import Reform

if TYPE_CHECKING:
    from kvern_engine.worker.sim import SimWorker


class SimReformed:
    """As `reform.Reformed`. Times come from the profile: making groups, and bytes over the link to a peer."""

    def __init__(self, before: "SimWorker", ready: WorkerReady, message: Reform) -> None:
        from kvern_engine.worker.sim import SimWorker

        if before.layout.pipeline > 1:
            raise ValueError(
                f"the layout cannot be changed: the model is a pipeline of {before.layout.pipeline} stages"
            )
        self._before = before
        after = Layout(message.data, message.tensor, 1)
        sizes = {"data_parallel_size": after.data, "tensor_parallel_size": after.tensor}
        config = before.config.model_copy(update=sizes)
        self.worker = SimWorker(config, before.rank, clock=before._clock, sleep=before._sleep, like=before)
        self.ready = self.worker.load()
        profile = before.profile
        has, wants = profile.rank_weight_bytes(before.layout), profile.rank_weight_bytes(after)
        received = max(0, wants - has)
        moved = received / profile.peer_bytes_per_second + (wants - received) / profile.copy_bytes_per_second
        parts = {"groups": profile.group_seconds, "build": profile.build_seconds, "weights": moved}
        self.seconds = {name: seconds / config.sim_speed for name, seconds in parts.items()}
        before._sleep(sum(self.seconds.values()))

    def move_kv(self, moves: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> dict[str, float]:
        """Sleeps for as long as the rank's part of these blocks would take."""
        before, after = self._before, self.worker
        profile, rank = before.profile, before.rank
        size = before.config.block_size * profile.rank_kv_bytes_per_token(after.layout)
        engine, _, place = after.layout.coordinates(rank)
        was, _, place_was = before.layout.coordinates(rank)
        wants = even_slice(profile.kv_heads, after.layout.tensor, place)
        has = even_slice(profile.kv_heads, before.layout.tensor, place_was)
        own = max(0, min(wants.stop, has.stop) - max(wants.start, has.start)) / max(1, wants.count)
        received = copied = 0.0
        for old, new, pairs in moves:
            if new == engine:
                copied += len(pairs) * size * (own if old == was else 0)
                received += len(pairs) * size * (1 - own if old == was else 1)
        seconds = profile.kv_seconds + received / profile.peer_bytes_per_second + copied / profile.copy_bytes_per_second
        seconds /= before.config.sim_speed
        before._sleep(seconds)
        return {"kv": seconds}

    def undo(self) -> None:
        """There is nothing to give back."""

    def settle(self) -> None:
        """There is nothing to let go."""
