"""What the sums through peers' memory are compiled with; the kernel itself runs in tests/gpu/test_peer_sum.py."""

import pytest

from kvern_kernels.peer_sum_source import SLOTS, Variant, options, source


@pytest.mark.parametrize(
    ("width", "threads"), [(8, 32), (256, 32), (576, 96), (4096, 512), (5120, 640), (8192, 1024), (16384, 1024)]
)
def test_a_block_has_whole_warps_and_a_thread_for_each_16_bytes(width: int, threads: int) -> None:
    made = Variant(2, width)
    assert made.threads == threads
    assert made.threads % 32 == 0
    assert made.threads * 8 >= width or made.threads == 1024


def test_options_name_what_the_source_is_written_for() -> None:
    found = options(Variant(4, 4096, True, 1 << 20), "90")
    assert found[0] == "--gpu-architecture=sm_90"
    names = {option.removeprefix("-D").partition("=")[0] for option in found[2:]}
    assert names == {"RANKS", "WIDTH", "THREADS", "HALF", "SLOT_BYTES"}
    assert all(name in source() for name in names)
    assert f"call % {SLOTS}" in source()
