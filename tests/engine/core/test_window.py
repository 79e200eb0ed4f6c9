"""Sliding windows in the core: which blocks are given back, and which cached prefixes can be started behind."""

from core_harness import Engine, expected
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.core.window import NO_BLOCK, first_needed, usable_prefix

sizes = st.sampled_from([1, 2, 4, 16])
windows = st.integers(1, 70)


@given(st.integers(0, 300), windows, sizes)
def test_no_token_sees_what_lies_before_the_first_needed_block(position: int, window: int, size: int) -> None:
    first = first_needed(position, window, size)
    seen = range(max(0, position - window + 1), position + 1)
    assert first == seen[0] // size  # not one block more is kept
    assert all(place // size >= first for place in seen)
    assert all(first_needed(later, window, size) >= first for later in range(position, position + 40))


@given(st.lists(st.booleans(), max_size=24), windows, sizes)
def test_the_longest_prefix_whose_visible_blocks_are_known(present: list[bool], window: int, size: int) -> None:
    known = [100 + index if there else None for index, there in enumerate(present)]
    found = usable_prefix(known, window, size)

    def can_start_behind(count: int) -> bool:
        visible = range(max(0, count * size - window + 1), count * size)
        return all(known[place // size] is not None for place in visible)

    assert len(found) == max(count for count in range(len(known) + 1) if can_start_behind(count))
    needed = {place // size for place in range(max(0, len(found) * size - window + 1), len(found) * size)}
    assert found == [known[index] if index in needed else NO_BLOCK for index in range(len(found))]


@given(st.lists(st.booleans(), max_size=24), sizes)
def test_a_window_that_nothing_fills_changes_nothing(present: list[bool], size: int) -> None:
    known = [index if there else None for index, there in enumerate(present)]
    until = present.index(False) if False in present else len(present)
    assert usable_prefix(known, len(known) * size + 1, size) == known[:until]


def test_a_long_answer_holds_no_more_than_its_window() -> None:
    engine = Engine(num_blocks=64, block_size=4, sliding_window=10, max_model_len=240, caching=False)
    engine.add("long", 9, max_tokens=200, ignore_eos=True)
    most = 0
    while not engine.core.idle:
        engine.step()
        most = max(most, engine.pool.num_used)
    assert most == 4  # 10 tokens are in at most 4 blocks of 4, the newest one included
    assert engine.tokens("long") == expected(engine, "long")
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_long_prompt_gives_blocks_back_while_it_is_computed() -> None:
    engine = Engine(
        num_blocks=32, block_size=4, sliding_window=8, max_num_batched_tokens=8, max_model_len=120, caching=False
    )
    engine.add("long", 96, max_tokens=2, ignore_eos=True)
    used = []
    for _ in range(10):
        engine.step()
        used.append(engine.pool.num_used)
    assert used[0] == 24 and used == sorted(used, reverse=True) and used[-1] <= 8
    engine.run()
    assert engine.tokens("long") == expected(engine, "long")


def test_what_left_the_window_is_found_by_the_next_request() -> None:
    """Blocks behind the window stay cached; a prefix needs only those that its next token sees."""
    engine = Engine(num_blocks=16, block_size=4, sliding_window=6, max_model_len=60)
    prompt = list(range(300, 340))
    engine.add("first", prompt, max_tokens=3, ignore_eos=True)
    engine.run()
    engine.add("again", [*prompt, 1, 2], max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.outputs["again"][0].num_cached_tokens == 40
    placed = next(row for plan in engine.plans for row in plan.added if row.request_id == "again")
    assert placed.blocks[:8] == [NO_BLOCK] * 8 and min(placed.blocks[8:]) >= 0
    assert engine.tokens("again") == expected(engine, "again")


def test_choices_fork_although_the_first_has_left_the_prompt_behind() -> None:
    """The others fork when the first is done, or long after its prompt: the blocks they need are kept."""
    engine = Engine(num_blocks=16, block_size=4, sliding_window=5, max_num_seqs=2, max_model_len=80)
    engine.add("other", 3, max_tokens=30, ignore_eos=True)
    engine.step(2)
    engine.add("forks", 17, n=3, max_tokens=24, ignore_eos=True, seed=4)
    engine.run()
    for index in range(3):
        assert engine.tokens("forks", index) == expected(engine, "forks", index)
    assert engine.pool.num_free == engine.pool.num_blocks
