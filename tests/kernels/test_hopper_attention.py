"""How the work of our attention kernel for Hopper is cut and dealt; the kernel itself runs in `attention_cases.py` on a
GPU."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels import AttentionMetadata, hopper_attention, nvrtc
from kvern_kernels.hopper_attention import (
    BLOCK_SIZES,
    KEYS,
    ROWS,
    Variant,
    deal,
    in_order,
    plan,
    tiles_of,
    useful_share,
    variant_of,
)

ROW = st.tuples(st.integers(1, 400), st.integers(0, 3000))  # query tokens, and those before them
HEADS = st.sampled_from([(32, 8), (8, 2), (4, 2), (3, 3), (7, 1), (16, 2), (1, 1)])


def _lengths(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [count for count, _ in rows], [count + before for count, before in rows]


@given(st.lists(ROW, max_size=12), st.integers(0, 3), HEADS, st.integers(1, 70))
def test_every_token_of_every_head_is_computed_once(rows, first, head_counts, workers) -> None:
    query_lens, seq_lens = _lengths(rows)
    heads, kv_heads = head_counts
    first = min(first, len(rows))
    each = 2 if variant_of(heads, kv_heads, torch.bfloat16, 16).shared else 1
    table = plan(query_lens, seq_lens, first, heads, kv_heads, each, workers)
    assert table.dtype == torch.int32 and table.shape[1:] == (workers, 8)
    found = Counter()
    starts = [sum(query_lens[:row]) for row in range(len(rows))]
    for worker in range(workers):
        own = table[:, worker].tolist()
        assert sorted(own, key=lambda item: item[3] == 0) == own  # nothing behind the end of its list
        for token, row, seen, count, length, head, wide, zero in own:
            if count == 0:
                continue
            assert zero == 0 and length == seq_lens[row] and 0 < count <= ROWS // wide
            assert seen == length - query_lens[row] + token - starts[row] + 1
            for number in range(each * wide):
                assert (head + number) * kv_heads // heads == head * kv_heads // heads  # of one KV head
                found.update((token + i, head + number) for i in range(count))
    tokens = range(sum(query_lens[:first]), sum(query_lens))
    assert found == Counter((token, head) for token in tokens for head in range(heads))


@given(st.lists(ROW, min_size=1, max_size=8), HEADS)
def test_what_runs_together_fits_in_l2(rows, head_counts) -> None:
    """As long as K and V of one head do: the bytes between the first and the last use of a row's KV heads."""
    query_lens, seq_lens = _lengths(rows)
    heads, kv_heads = head_counts
    tiles = tiles_of(query_lens, seq_lens, 0)
    items = in_order(tiles, heads, kv_heads, 1)
    keys = [(tiles[item // heads].row, item % heads * kv_heads // heads) for item in items]
    last = {key: place for place, key in enumerate(keys)}
    open_keys: set[tuple[int, int]] = set()
    for place, key in enumerate(keys):
        open_keys.add(key)
        size = sum(seq_lens[row] * 4 * hopper_attention.DIM for row, _ in open_keys)
        assert size <= hopper_attention._GROUP_BYTES or len(open_keys) == 1
        open_keys -= {done for done in open_keys if last[done] <= place}


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 9))
def test_dealing(costs, workers) -> None:
    """Everything once, in order, and nobody works much longer than the others: at most by one item."""
    places = deal(costs, workers)
    assert len(set(places)) == len(costs)
    own = [[item for item, place in enumerate(places) if place % workers == worker] for worker in range(workers)]
    for items in own:
        assert [places[item] // workers for item in items] == list(range(len(items)))
    loads = [sum(costs[item] for item in items) for items in own]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_longest_first() -> None:
    tiles = tiles_of([300, 130], [300, 1000], 0)
    assert [tile.key_tiles for tile in tiles] == [1, 2, 3, 8, 8]
    assert [(tile.token, tile.seen, tile.tokens) for tile in tiles] == [
        (0, 1, 128),
        (128, 129, 128),
        (256, 257, 44),
        (300, 871, 128),
        (428, 999, 2),
    ]
    items = in_order(tiles, 4, 1, 2)
    assert [divmod(item, 4) for item in items] == [(3, 0), (3, 2), (4, 0), (2, 0), (1, 0), (1, 2), (0, 0), (0, 2)]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "heads", "share"),
    [
        ([128], [128], 4, 1),
        ([64], [1000], 4, 1),  # four heads side by side
        ([64], [1000], 2, 0.5),
        ([20] * 256, [1508] * 256, 4, 20 / 64),  # short ends behind a long prefix: left to Triton
        ([170], [1170], 4, 170 / 192),
        ([8000], [8000], 4, 8000 / 8000),
        ([], [], 4, 1),
    ],
)
def test_useful_share(query_lens, seq_lens, heads, share) -> None:
    assert useful_share(query_lens, seq_lens, heads, 2) == pytest.approx(share, abs=0.01)


def test_which_kernel_is_compiled() -> None:
    assert variant_of(32, 8, torch.bfloat16, 16) == Variant(torch.bfloat16, 16, True)
    assert variant_of(7, 1, torch.float16, 32) == Variant(torch.float16, 32, False)
    flags = hopper_attention.options(Variant(torch.float16, 32, True))
    assert flags[2:] == ["-DHALF=1", "-DBLOCK=32", "-DSHARED=1"]
    assert hopper_attention.fits(128, 16, torch.bfloat16, torch.bfloat16)
    assert not hopper_attention.fits(64, 16, torch.bfloat16, torch.bfloat16)
    assert not hopper_attention.fits(128, 16, torch.bfloat16, torch.float8_e4m3fn)
    assert not hopper_attention.fits(128, 8, torch.bfloat16, torch.bfloat16)
    assert not hopper_attention.fits(128, 16, torch.float32, torch.float32)


def test_the_text_is_complete_and_agrees_with_python() -> None:
    text = hopper_attention.source()
    assert "@" not in re.sub(r"@done|@never|@NAMES@", "", text)
    assert text.count('"+f"(d[') == 128 + 1
    defined = dict(re.findall(r"^#define (\w+) (\d+)", text, re.M))
    assert int(defined["ROWS"]) == ROWS and int(defined["KEYS"]) == KEYS
    assert all(KEYS % min(size, KEYS) == 0 for size in BLOCK_SIZES)
    assert hopper_attention.SHARED_BYTES <= 227 * 1024


def test_elsewhere_it_takes_nothing(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert not hopper_attention.prepare(cpu, 32, 8, 128, torch.bfloat16, 16, tmp_path)
    meta = AttentionMetadata.build([3], [3], [[0]], 16)
    q, kv = torch.zeros(3, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 1, 16, 128, dtype=torch.bfloat16)
    assert not hopper_attention.takes(q, kv, meta)


def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    def refuses(*_: object) -> bytes:
        raise nvrtc.CudaError("NVRTC cannot be loaded")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper_attention, "load", refuses)
    assert not hopper_attention.prepare(torch.device("cuda", 0), 32, 8, 128, torch.bfloat16, 16, tmp_path)
    assert "prompts use the vendor's attention and Triton's: NVRTC cannot be loaded" in caplog.text
