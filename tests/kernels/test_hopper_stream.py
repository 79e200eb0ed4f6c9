"""How products of few rows are divided among a Hopper GPU's multiprocessors; the kernel itself runs in
`stream_cases.py` on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels import hopper_stream, nvrtc
from kvern_kernels.fp8 import BlockScaledRows, Fp8Weight, ScaledRows
from kvern_kernels.hopper_stream import GROUPS, KINDS, MAX_ROWS, Split, Variant, choose_split, goes_by_blocks

SMS = 132  # of an H200


def test_llama_3_8b() -> None:
    for inner in (4096, 8192):  # bytes, FP8 and 16 bits
        assert choose_split(6144, inner, False, SMS) == Split(2, 2)  # 96 blocks
        assert choose_split(4096, inner, False, SMS) == Split(1, 2)  # 128
        assert choose_split(28672, inner, True, SMS) == Split(4, 1)  # 112
        assert choose_split(4096, inner * 7 // 2, False, SMS) == Split(1, 2)
    assert choose_split(14336, 8192, True, SMS) == Split(2, 1)  # half of it, on each of two cards
    assert choose_split(10240, 16384, False, SMS) == Split(2, 1)  # 70B: 80 blocks, no need for pieces
    assert choose_split(576, 3072, False, SMS) == Split(1, 3)  # 9 tiles of 6 steps


def test_what_goes_by_blocks() -> None:
    """Of models with heads of 128: o, gate_up and down of Llama 3 8B; not where a block of threads has fewer columns
    than a scale, nor where the last step would be filled in part."""
    assert goes_by_blocks(4096, 4096, False, SMS) and goes_by_blocks(4096, 14336, False, SMS)
    assert goes_by_blocks(28672, 4096, True, SMS) and not goes_by_blocks(14336, 4096, True, SMS)
    assert goes_by_blocks(8192, 28672, False, SMS) and goes_by_blocks(57344, 8192, True, SMS)  # 70B
    assert not goes_by_blocks(3072, 3072 + 128, False, SMS) and goes_by_blocks(3072, 3072 + 512, False, SMS)
    assert not goes_by_blocks(100, 4096, False, SMS)


@given(st.integers(1, 900), st.integers(1, 300), st.booleans())
def test_blocks_fill_the_steps_of_what_goes_by_blocks(tiles: int, sixteenths: int, gated: bool) -> None:
    columns, inner = 64 * tiles, 16 * sixteenths
    if not goes_by_blocks(columns, inner, gated, SMS):
        return
    split = choose_split(columns, inner, gated, SMS)
    assert split is not None
    variant = Variant(torch.float8_e4m3fn, gated, split.groups, 8, blocks=True)
    assert variant in hopper_stream.variants(torch.float8_e4m3fn)
    if gated:
        assert columns // 2 % 128 == 0
    else:
        assert inner % (128 * variant.boxes) == 0 and variant.boxes % 2 == 0


@given(st.integers(1, 3000), st.integers(1, 60_000), st.booleans(), st.integers(1, 200))
def test_every_split_covers_the_weight_once(tiles: int, inner: int, gated: bool, multiprocessors: int) -> None:
    split = choose_split(64 * tiles, 16 * inner, gated, multiprocessors)
    assert split is not None
    assert split.groups in GROUPS and tiles % split.groups == 0
    blocks = tiles // split.groups * split.pieces
    assert split.pieces == 1 or (blocks <= multiprocessors and not gated)
    if split.groups > 1:
        assert blocks * (1 if split.pieces > 1 or gated else 2) >= multiprocessors // 2
    variant = Variant(torch.bfloat16, gated, split.groups, 8)
    assert variant in hopper_stream.variants(torch.bfloat16)
    steps = -(-16 * inner // (128 * variant.boxes))
    assert split.pieces <= steps


def test_what_does_not_fit() -> None:
    assert choose_split(100, 4096, False, SMS) is None  # no whole tile of 64 rows
    assert choose_split(128, 1000, False, SMS) is None  # rows of which one begins within 16 bytes


@pytest.mark.parametrize("dtype", KINDS)
def test_rings_fit_and_keep_the_memory_busy(dtype: torch.dtype) -> None:
    for variant in hopper_stream.variants(dtype):
        assert variant.shared_bytes <= 227 * 1024 - 16 * 1024, variant  # a norm fits beside it
        assert variant.stages > hopper_stream._PACE, variant
        assert variant.stage_bytes % 1024 == 0, variant
        assert variant.tokens % 8 == 0 and variant.tokens <= MAX_ROWS
        assert variant.threads <= 1024


@pytest.mark.parametrize("tokens", range(8, MAX_ROWS + 1, 8))
def test_the_text_is_complete(tokens: int) -> None:
    text = hopper_stream.source(tokens)
    assert "@" not in text.replace("@done", "")
    assert text.count('"+f"(d[') == tokens // 2
    assert f"m64n{tokens}k16.f32.bf16.bf16" in text
    operands = re.search(r"\{(%0[^}]*)\}, %(\d+), %(\d+), p", text)
    assert operands is not None
    assert operands[1].count("%") == tokens // 2
    assert (int(operands[2]), int(operands[3])) == (tokens // 2, tokens // 2 + 1)
    assert f"setp.ne.b32 p, %{tokens // 2 + 2}, 0" in text


def test_options_name_every_number_of_the_text() -> None:
    common = ["-DGROUPS=4", "-DBOXES=1", "-DTOKENS=32", "-DSTAGES=5", "-DPACE=2"]
    for blocks in (False, True):
        flags = hopper_stream.options(Variant(torch.float8_e4m3fn, True, 4, 32, blocks))
        assert flags[2:] == ["-DKIND=1", "-DGATED=1", f"-DBLOCKS={int(blocks)}", *common]


def test_nothing_is_computed_where_nothing_was_loaded(tmp_path: Path) -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16)
    hopper_stream.prepare(x.device, torch.bfloat16, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert hopper_stream.linear_parts(x, weight) is None
    assert hopper_stream.gated_linear(x, weight) is None
    weight8 = Fp8Weight.quantize(torch.zeros(128, 512))
    rows, blocks = ScaledRows(weight8.values[:4], torch.ones(4)), BlockScaledRows.empty(4, 512, x.device)
    assert not hopper_stream.takes_blocks(4, weight8)
    assert hopper_stream.fp8_block_linear_parts(blocks, weight8) is None
    assert hopper_stream.fp8_gated_blocks(rows, weight8) is None


def test_a_compiler_that_fails_leaves_the_products_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*given: object) -> bytes:
        raise nvrtc.CudaError("NVRTC cannot be loaded")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper_stream, "compiled", refuses)
    hopper_stream.prepare(torch.device("cuda", 0), torch.bfloat16, tmp_path)
    assert "decode uses Triton's products only: NVRTC cannot be loaded" in caplog.text
    assert not hopper_stream._kernels
