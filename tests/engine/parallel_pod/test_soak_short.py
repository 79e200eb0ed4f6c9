"""The soak of `benchmarks/soak.py` in a few seconds: what half an hour of it must not leave, this must not either."""

import soak


def state(**changed: object) -> soak.State:
    each = {"rss": {"main": 100, "core-0": 100}, "fds": {"main": 10, "core-0": 9}, "threads": {"main": 5, "core-0": 3}}
    fields = {**each, "tasks": 7, "blocks_held": 0, "busy": {}, **changed}
    return soak.State(**fields)  # type: ignore[arg-type]


def test_what_is_left_is_found() -> None:
    assert soak.differences(state(), state(fds={"main": 9, "core-0": 9}, tasks=6)) == []
    end = state(
        rss={"main": 100 + soak.RSS_SLACK + 1, "core-0": 100},
        fds={"main": 11, "core-0": 9},
        tasks=8,
        busy={"blocks held": 3.0},
    )
    assert soak.differences(state(), end) == [
        "blocks held 3 at rest",
        f"main has {soak.RSS_SLACK + 1} bytes more",
        "main has 11 fds where it had 10",
        "8 asyncio tasks where there were 7",
    ]
    gone = state(rss={"main": 100}, fds={"main": 10}, threads={"main": 5})
    assert soak.differences(state(), gone) == ["processes ['main'] where there were ['core-0', 'main']"]


def test_nothing_is_left_after_a_while_at_the_edge_of_the_pool() -> None:
    result = soak.soak("sim", 5, 2, 16, "--sim-speed", "1")
    assert (result["left"], result["wrong"]) == ([], [])
    assert result["generated_tokens"] > 0
    assert len(result["kinds"]) == 10 and result["requests"] > 16
