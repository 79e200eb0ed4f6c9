"""How products of few rows are divided among a Hopper GPU's multiprocessors; the kernel itself runs in
`stream_cases.py` on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels import hopper_stream, nvrtc
from kvern_kernels.hopper_stream import GROUPS, KINDS, MAX_ROWS, Split, Variant, choose_split

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
    flags = hopper_stream.options(Variant(torch.float8_e4m3fn, True, 4, 32))
    assert flags[2:] == ["-DKIND=1", "-DGATED=1", "-DGROUPS=4", "-DBOXES=1", "-DTOKENS=32", "-DSTAGES=5", "-DPACE=2"]


def test_nothing_is_computed_where_nothing_was_loaded(tmp_path: Path) -> None:
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16)
    hopper_stream.prepare(x.device, torch.bfloat16, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert hopper_stream.linear_parts(x, weight) is None
    assert hopper_stream.gated_linear(x, weight) is None


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
