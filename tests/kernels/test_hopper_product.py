"""What decides where our kernel for Hopper computes a product; the kernel itself runs in `hopper_cases.py` on a GPU."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels import hopper_product, nvrtc
from kvern_kernels.hopper_product import Variant

CLUSTERS = 66  # of an H200


@given(st.integers(1, 40_000), st.integers(1, 120), st.integers(1, 100))
def test_share_is_what_is_useful_of_the_time(rows: int, column_tiles: int, clusters: int) -> None:
    """Rounds times clusters times tiles of 256 rows hold the rows exactly once."""
    share = hopper_product.useful_share(rows, column_tiles * 256, clusters)
    assert 0 < share <= 1
    rounds = -(-(-(-rows // 256) * column_tiles) // clusters)
    assert share * rounds * clusters * 256 == pytest.approx(rows * column_tiles)


def test_shapes() -> None:
    assert hopper_product.fits(28672, 4096, torch.bfloat16)
    assert hopper_product.fits(28672, 4096, torch.float8_e4m3fn)
    assert hopper_product.fits(256, 64, torch.bfloat16)
    assert not hopper_product.fits(256, 64, torch.float8_e4m3fn)  # half a step
    assert not hopper_product.fits(128, 4096, torch.bfloat16)
    assert not hopper_product.fits(256, 4096, torch.float16)


def test_what_the_shares_mean() -> None:
    """Full steps of Llama-3-8B are worth it, few rows are not; sums only where the last round is nearly full."""
    gate_up = 28672
    for rows in (8000, 16000, 16384):
        assert hopper_product.useful_share(rows, gate_up, CLUSTERS) >= hopper_product._GATED_SHARE, rows
    assert hopper_product.useful_share(1025, gate_up, CLUSTERS) < hopper_product._GATED_FP8_SHARE
    assert hopper_product.useful_share(1536, gate_up, CLUSTERS) >= hopper_product._GATED_FP8_SHARE
    assert hopper_product.useful_share(1536, gate_up, CLUSTERS) < hopper_product._GATED_SHARE
    assert hopper_product.useful_share(16384, 4096, CLUSTERS) >= hopper_product._ADDING_SHARE
    assert hopper_product.useful_share(8000, 4096, CLUSTERS) < hopper_product._ADDING_SHARE


def test_nothing_is_used_where_nothing_was_loaded() -> None:
    x, weight = torch.zeros(2048, 64, dtype=torch.bfloat16), torch.zeros(512, 64, dtype=torch.bfloat16)
    hopper_product.prepare(x.device, torch.bfloat16, Path("nowhere"))
    assert not hopper_product.gates(x, weight)
    assert not hopper_product.adds(x, weight, torch.zeros(2048, 512, dtype=torch.bfloat16))


def test_the_text_is_complete_and_agrees_with_python() -> None:
    text = hopper_product.source()
    assert "@" not in re.sub(r"@done|@NAMES@", "", text)
    assert text.count('"+f"(d[') == 128
    defined = dict(re.findall(r"^#define (\w+) (\d+)", text, re.M))
    assert int(defined["ROWS"]) * 2 == hopper_product.ROW_PAIR
    assert int(defined["COLUMNS"]) == hopper_product.COLUMNS
    assert int(defined["STEP_BYTES"]) == hopper_product.STEP_BYTES
    assert int(defined["STAGES"]) == hopper_product._STAGES
    assert 2 * int(defined["OUT_BYTES"]) == hopper_product._OUT_BYTES
    assert hopper_product.SHARED_BYTES <= 227 * 1024
    assert hopper_product.options(Variant(fp8=True, gated=True))[2:] == ["-DFP8=1", "-DGATED=1", "-DADD=0"]


def test_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for a text, its options and a version; a folder that cannot be written only costs time."""
    asked: list[str] = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda source, options: asked.append(source) or b"code")
    for _ in range(2):
        assert nvrtc.compiled("a", ["-DX"], tmp_path) == b"code"
    assert nvrtc.compiled("a", ["-DY"], tmp_path) == b"code"
    assert asked == ["a", "a"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert nvrtc.compiled("a", [], blocked / "below") == b"code"
