# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""A decode step's inputs gathered from the row tables in one launch: a program a row. The reference is
`decode_inputs.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_inputs import DecodeInputs


@triton.jit(do_not_specialize=["tokens_stride", "table_stride"])
def _decode_inputs_kernel(
    rows_ptr,
    positions_ptr,
    tokens_ptr,
    tables_ptr,
    out_ids_ptr,
    out_positions_ptr,
    out_slots_ptr,
    out_lens_ptr,
    out_tables_ptr,
    out_places_ptr,
    tokens_stride,
    table_stride,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLES: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    position = tl.load(positions_ptr + i).to(tl.int64)
    inside = position >= 0
    clamped = tl.maximum(position, 0)
    table = tables_ptr + row * table_stride
    token = tl.load(tokens_ptr + row * tokens_stride + clamped, mask=inside, other=0)
    block = tl.load(table + clamped // BS, mask=inside, other=0).to(tl.int64)
    tl.store(out_ids_ptr + i, token)
    tl.store(out_positions_ptr + i, clamped)
    tl.store(out_slots_ptr + i, tl.where(inside, block * BS + clamped % BS, -1))
    tl.store(out_lens_ptr + i, (position + 1).to(tl.int32))
    tl.store(out_places_ptr + i, tl.where(inside, row * tokens_stride + position + 1, -1))
    if not TABLES:
        return
    used = ((position + BS) // BS).to(tl.int32)
    target = out_tables_ptr + i.to(tl.int64) * table_stride
    for start in range(0, used, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        tl.store(target + entries, tl.load(table + entries, mask=entries < used, other=0), mask=entries < used)


def decode_inputs(
    rows: Tensor, positions: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int, with_tables: bool = True
) -> DecodeInputs:
    """As `decode_inputs.decode_inputs`; the tables must be contiguous."""
    count, device = rows.shape[0], rows.device
    longs = torch.empty(3, count, dtype=torch.int64, device=device)
    ints = torch.empty(2, count, dtype=torch.int32, device=device)
    tables = torch.empty(count if with_tables else 0, block_tables.shape[1], dtype=torch.int32, device=device)
    found = DecodeInputs(ints[0], longs[0], longs[1], ints[1], tables, longs[2])
    if count:
        _decode_inputs_kernel[(count,)](
            rows,
            positions,
            tokens,
            block_tables,
            found.token_ids,
            found.positions,
            found.slots,
            found.seq_lens,
            found.block_tables,
            found.places,
            tokens.stride(0),
            block_tables.stride(0),
            BS=block_size,
            BLOCK=128,
            TABLES=with_tables,
            num_warps=4 if with_tables else 1,
        )
    return found
