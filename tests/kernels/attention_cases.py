"""Attention of prompts on Hopper against the reference, compiled: `pytest tests/kernels/attention_cases.py` on such a
card. Blocks in random order; what the cache holds that no row owns, and the output, are poisoned.
"""

import pytest
import torch
from torch import Tensor

from kvern_kernels import AttentionMetadata, attention, attention_triton, hopper_attention, large_products

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU; torch finds none here")

DIM = hopper_attention.DIM
STEPS = [  # query lengths, context lengths
    ([1], [1]),
    ([2], [2]),
    ([63], [63]),
    ([128], [128]),
    ([129], [129]),
    ([300], [300]),
    ([64], [1000]),
    ([130], [131]),
    ([257], [900]),
    ([100, 17, 128, 256, 3], [100, 400, 128, 500, 1000]),
    ([1, 1, 1, 200, 9, 513], [7, 300, 1, 200, 77, 800]),
    ([40] * 30, list(range(40, 640, 20))),
]


class Case:
    def __init__(self, query_lens, seq_lens, heads=4, kv_heads=2, block=16, dtype=torch.bfloat16, poison=True):
        torch.manual_seed(sum(seq_lens))
        needed = [-(-length // block) for length in seq_lens]
        order = torch.randperm(sum(needed) + 5).tolist()
        tables, start = [], 0
        for count in needed:
            tables.append(order[start : start + count])
            start += count
        self.meta = AttentionMetadata.build(query_lens, seq_lens, tables, block, "cuda")
        self.q = torch.randn(sum(query_lens), heads, DIM, dtype=dtype, device="cuda")
        self.kv = torch.randn(2, kv_heads, sum(needed) + 5, block, DIM, dtype=dtype, device="cuda")
        self.wanted = attention.paged_attention(self.q, self.kv, self.meta, DIM**-0.5)
        if poison:
            owned = torch.zeros(sum(needed) + 5, block, dtype=torch.bool)
            for table, length in zip(tables, seq_lens, strict=True):
                for place in range(length):
                    owned[table[place // block], place % block] = True
            self.kv[:, :, ~owned.cuda()] = float("nan")

    def got(self, first=0):
        out = torch.full_like(self.q, float("nan"))
        hopper_attention.attention(self.q, self.kv, self.meta, DIM**-0.5, out, first)
        return out


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in (torch.bfloat16, torch.float16):
        for block in hopper_attention.BLOCK_SIZES:
            for shared in (False, True):
                hopper_attention.load(device, hopper_attention.Variant(dtype, block, shared), large_products.folder())


@pytest.mark.parametrize("heads", [8, 4, 2])  # of two KV heads: two or one of a block, two blocks together or alone
@pytest.mark.parametrize("block", hopper_attention.BLOCK_SIZES)
@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
def test_prompts(query_lens, seq_lens, block, heads):
    case = Case(query_lens, seq_lens, heads, block=block)
    assert error(case.got(), case.wanted) < 4e-3


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 1), (6, 2), (5, 5), (32, 8), (16, 1)])
def test_heads(heads, kv_heads):
    case = Case([200, 70], [200, 300], heads, kv_heads)
    assert error(case.got(), case.wanted) < 4e-3


def test_float16():
    case = Case([200, 70], [200, 300], dtype=torch.float16)
    assert error(case.got(), case.wanted) < 6e-4


def test_long_prompts():
    """Many tiles a block, rings gone round many times."""
    case = Case([1, 2000, 4000, 1024], [5000, 4500, 4000, 1024], 32, 8)
    assert error(case.got(1)[1:], case.wanted[1:]) < 4e-3


def test_extreme_scores():
    """One key that takes all of the weight, and scores that would overflow without their largest."""
    case = Case([300], [300], poison=False)
    case.q *= 30
    wanted = attention.paged_attention(case.q, case.kv, case.meta, DIM**-0.5)
    assert error(case.got(), wanted) < 6e-3


def test_in_a_step_beside_decodes():
    case = Case([1, 1, 150, 133], [400, 33, 150, 500], 8, 2, poison=False)
    assert hopper_attention.takes(case.q, case.kv, case.meta)
    got = attention_triton.paged_attention(case.q, case.kv, case.meta, DIM**-0.5)
    assert error(got, case.wanted) < 4e-3


def test_the_same_bits_however_a_prompt_is_cut():
    """A query token's numbers do not follow from what else is computed: chunks, other rows, another run."""
    case = Case([700], [700], poison=False)
    whole = case.got()
    for _ in range(20):
        assert torch.equal(case.got(), whole)
    table = case.meta.block_tables[0].tolist()
    for begin, end in ((0, 130), (130, 131), (131, 500), (500, 700)):
        case.meta = AttentionMetadata.build([end - begin], [end], [table], 16, "cuda")
        full, case.q = case.q, case.q[begin:end].clone()
        assert torch.equal(case.got(), whole[begin:end])
        case.q = full
