"""What a decode step reads from the row tables: token ids, write slots, lengths and block tables of its rows.

Plain torch reference of `decode_inputs_triton.py`. With it a step needs two numbers a row from the host, so that a
captured graph can do all the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DecodeInputs:
    """`token_ids` [B] int32, `positions` [B] int64, `slots` [B] int64 (-1: none), `seq_lens` [B] int32 including this
    token, `block_tables` [B, W] int32, `places` [B] int64: where the next token goes in the flat token table, -1: none.

    Entries of `block_tables` beyond a row's length are undefined.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    places: Tensor


def decode_inputs(
    rows: Tensor, positions: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int, with_tables: bool = True
) -> DecodeInputs:
    """`rows` [B] and `positions` [B] int32: entry i computes the token at `positions[i]` of table row `rows[i]`; a
    negative position is padding. `tokens` [R, L] int32 and `block_tables` [R, W] int32 are the tables. The result's
    `block_tables` are empty without `with_tables` (several tokens of one row)."""
    row, position = rows.long(), positions.long()
    inside = position >= 0
    clamped = position.clamp(min=0)
    block = block_tables[row, clamped // block_size].long()
    slots = block * block_size + clamped % block_size
    zero, none = torch.zeros_like(position), torch.full_like(position, -1)
    return DecodeInputs(
        token_ids=torch.where(inside, tokens[row, clamped], zero.int()),
        positions=clamped,
        slots=torch.where(inside, slots, none),
        seq_lens=(position + 1).int(),
        block_tables=block_tables[row] if with_tables else block_tables[:0],
        places=torch.where(inside, row * tokens.shape[1] + position + 1, none),
    )
