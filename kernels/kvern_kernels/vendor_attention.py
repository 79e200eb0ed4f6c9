"""Long prompts through cuDNN's attention: K and V are gathered into one piece and its kernel runs on them. For caches
and heads that `hopper_attention.py` does not take.

Measured on an H200, 8k tokens, 32 query and 8 KV heads of 128: gather 19 us + cuDNN 881 us (624 TFLOP/s), against
1,384 us of our own kernel (398 TFLOP/s) and 1,730 us of FlashAttention-2; 64 prompts of 1,024 tokens in one call 1,259
us against 2,015. cuDNN's causal mask is aligned at the first token: the tokens of a cached prefix are computed too, as
zeros, which pays while the prefix is short. It builds a plan in 40 to 65 ms for each new shape, so that lengths are
padded to multiples of `STEP` (what lies behind a prompt is hidden from it by the causal mask; of 8 * STEP tokens and
more, which take as long as a plan anyway, to an eighth of that: 8,000 tokens take 860 us, padded to 8,192 904 us) and
few batch sizes are used. `warm_up` builds those of the short ones beforehand. Neighbours that are equally long share a
call at just their length from SHARED_STEPS * STEP tokens on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TOKENS = 1024
STEP = 512
MOST_ROWS = 16
SHARED_STEPS = 4
MOST_PREFIX = 0.5  # of the context: (1 - 0.5^2) of the work at 1.55 times the speed


@dataclass(frozen=True)
class Run:
    """`rows` consecutive rows from `first`: in one vendor call at `padded` tokens each, or (0) in our own kernel."""

    first: int
    rows: int
    padded: int


def vendor_tokens(query_len: int, seq_len: int, head_dim: int, element_size: int) -> int:
    """The padded length at which the vendor's kernel takes a row; 0 where our own does."""
    long = seq_len >= MIN_TOKENS and seq_len - query_len <= MOST_PREFIX * seq_len
    if not long or head_dim not in (64, 128) or element_size != 2:
        return 0
    step = STEP if seq_len <= 8 * STEP else STEP // 8
    return -(-seq_len // step) * step


def plan_runs(
    query_lens: Sequence[int], seq_lens: Sequence[int], first: int, head_dim: int, element_size: int
) -> list[Run]:
    """The rows from `first` on as runs, in order. Neighbours that are equally long share a call, in powers of two up to
    MOST_ROWS, where they need no padding or are long enough to be worth a plan of their own."""
    runs: list[Run] = []
    row, end = first, len(query_lens)
    while row < end:
        padded = vendor_tokens(query_lens[row], seq_lens[row], head_dim, element_size)
        last = row + 1
        if not padded:
            while last < end and not vendor_tokens(query_lens[last], seq_lens[last], head_dim, element_size):
                last += 1
        elif query_lens[row] == seq_lens[row] and (seq_lens[row] == padded or seq_lens[row] >= SHARED_STEPS * STEP):
            while last < min(end, row + MOST_ROWS) and query_lens[last] == seq_lens[last] == seq_lens[row]:
                last += 1
            last = row + (1 << ((last - row).bit_length() - 1))
            padded = seq_lens[row] if last > row + 1 else padded
        runs.append(Run(row, last - row, padded))
        row = last
    return runs


def available(device: torch.device) -> bool:
    """Whether cuDNN's attention runs on the device: Hopper or newer."""
    return (
        device.type == "cuda"
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention")
    )


def warm_up(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, longest: int) -> None:
    """Build the vendor's plans of single prompts of up to 8 * STEP and `longest` tokens, in the thread that will need
    them. Otherwise the first prompt of each length waits for its plan."""
    if not available(device):
        return
    for length in range(MIN_TOKENS, min(longest, 8 * STEP) + 1, STEP):
        if vendor_tokens(length, length, head_dim, dtype.itemsize) == length:
            q = torch.zeros(length, heads, head_dim, dtype=dtype, device=device)
            kv = torch.zeros(1, kv_heads, length, head_dim, dtype=dtype, device=device)
            causal_attention(q, kv, kv, head_dim**-0.5)


def empty_queries(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized queries [T, Hq, D], with room behind them where the vendor's kernel may read padded ones there."""
    tokens, heads, dim = shape
    room = STEP if tokens >= MIN_TOKENS else 0
    return torch.empty(tokens + room, heads, dim, dtype=dtype, device=device)[:tokens]


def _padded(q: Tensor, length: int, prefix: int) -> Tensor:
    """[1, length, Hq, D] with `q` [n, Hq, D] behind `prefix` rows; the other rows are whatever is there, which only
    shows in their own results."""
    count, heads, dim = q.shape
    offset = q.storage_offset() - prefix * heads * dim
    size = length * heads * dim
    if q.is_contiguous() and offset >= 0 and (offset + size) * q.element_size() <= q.untyped_storage().nbytes():
        return q.as_strided((1, length, heads, dim), (size, heads * dim, dim, 1), offset)
    wide = torch.empty(1, length, heads, dim, dtype=q.dtype, device=q.device)
    wide[0, prefix : prefix + count] = q
    return wide


def causal_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, prefix: int = 0) -> Tensor:
    """Causal attention of `q` [R n, Hq, D], n tokens of each of R rows behind `prefix` others, over the first
    prefix + n of `keys` and `values` [R, Hkv, L, D], L >= prefix + n, finite behind them; returns [R n, Hq, D].

    R is 1 where n is not L.
    """
    rows, _, length, _ = keys.shape
    count, heads, dim = q.shape
    if count == rows * length:
        wide = q.view(rows, length, heads, dim)
    else:
        wide = _padded(q, length, prefix)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = op(wide.transpose(1, 2), keys, values, None, False, 0.0, True, False, scale=scale)[0]
    out = out.transpose(1, 2)
    if count == rows * length:
        return out.reshape(count, heads, dim)
    return out[0, prefix : prefix + count]
