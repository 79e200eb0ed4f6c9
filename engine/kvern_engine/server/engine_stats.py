"""Reports of engines as an API server shows them. Pure."""

from collections.abc import Mapping

import msgspec

from kvern_engine.ipc import CoreReady, EngineStats

_COUNTERS = ("prefix_queries", "prefix_hits", "preemptions", "steps", "step_tokens")


def at_rest(stats: EngineStats) -> EngineStats:
    """The last report of a dead engine: counters stay, but it runs nothing and holds nothing any more."""
    return msgspec.structs.replace(
        stats,
        num_running=0,
        num_waiting=0,
        num_waiting_deferred=0,
        kv_cache_usage=0.0,
        kv_waste=0.0,
        blocks_free=stats.blocks_total,
        blocks_cached=0,
    )


def unheard(ready: CoreReady, now: float) -> EngineStats:
    """What is known of an engine that is ready, and has not reported yet: all of its blocks are free."""
    blocks = ready.num_blocks
    return EngineStats(ready.engine, blocks_total=blocks, blocks_free=blocks, heartbeat=now)


def together(stats: EngineStats, replaced: EngineStats | None) -> EngineStats:
    """The report of a core with what those before it had counted: a core counts from 0, and counters must not fall."""
    if replaced is None:
        return stats
    sums = {name: getattr(stats, name) + getattr(replaced, name) for name in _COUNTERS}
    return msgspec.structs.replace(
        stats,
        **sums,
        step_seconds=_sums(stats.step_seconds, replaced.step_seconds),
        device_seconds=_sums(stats.device_seconds, replaced.device_seconds),
    )


def _sums(some: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: some.get(name, 0.0) + others.get(name, 0.0) for name in {**others, **some}}
