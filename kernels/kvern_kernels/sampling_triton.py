# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Sampling over the vocabulary in Triton, without a sort. The reference is `sampling.py`.

Two launches. The first takes a tile of a row a program: maximum, first index of it, and the sum of exponentials. The
second takes a row a program: a greedy one only merges the maxima; a random one looks for the smallest logit that top-k
and top-p keep, by a four-way search over the logits' ordered bit patterns (eight passes for 16-bit logits, whatever
the vocabulary), and draws by inverting the distribution function, tile first, then within the tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling import SamplingTables

TILE = 8192


@triton.jit
def _load_tile(row_ptr, tile, vocab, TILE: tl.constexpr):
    offsets = tile * TILE + tl.arange(0, TILE)
    return offsets, tl.load(row_ptr + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(x, BITS: tl.constexpr):
    """The place of float32 `x` in the order of all floats, as an integer of BITS bits (16: exact for bfloat16)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)


@triton.jit
def _peaks_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    peaks_ptr,
    first_ptr,
    sums_ptr,
    logits_stride,
    vocab,
    TILE: tl.constexpr,
    RANDOM: tl.constexpr,
):
    i = tl.program_id(0)
    tile = tl.program_id(1)
    piece = i * tl.num_programs(1) + tile
    offsets, x = _load_tile(logits_ptr + i.to(tl.int64) * logits_stride, tile, vocab, TILE)
    peak = tl.max(x, axis=0)
    tl.store(peaks_ptr + piece, peak)
    tl.store(first_ptr + piece, tl.min(tl.where(x == peak, offsets, vocab - 1), axis=0))
    if RANDOM:
        temperature = tl.load(temperature_ptr + tl.load(rows_ptr + i))
        if temperature > 0:
            shift = tl.where(peak == float("-inf"), 0.0, peak)
            tl.store(sums_ptr + piece, tl.sum(tl.exp((x - shift) / temperature), axis=0))


@triton.jit
def _amounts(row_ptr, low, step, floor, peak, temperature, vocab, tiles, MASS: tl.constexpr, BITS: tl.constexpr,
             TILE: tl.constexpr):  # fmt: skip
    """How much lies at or above the keys low + step, low + 2 step and low + 3 step: weights (MASS), or tokens."""
    first = tl.zeros([TILE], tl.float32)
    second = tl.zeros([TILE], tl.float32)
    third = tl.zeros([TILE], tl.float32)
    for tile in range(0, tiles):
        offsets, x = _load_tile(row_ptr, tile, vocab, TILE)
        if MASS:
            worth = tl.exp((x - peak) / temperature)
        else:
            worth = tl.full([TILE], 1.0, tl.float32)
        worth = tl.where((x >= floor) & (offsets < vocab), worth, 0.0)
        keys = _key(x, BITS).to(tl.int64)
        first += tl.where(keys >= low + step, worth, 0.0)
        second += tl.where(keys >= low + 2 * step, worth, 0.0)
        third += tl.where(keys >= low + 3 * step, worth, 0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0)


@triton.jit
def _search(row_ptr, low, wanted, floor, peak, temperature, vocab, tiles, MASS: tl.constexpr, BITS: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """The largest key at or above which lies at least `wanted` (int64); `low` where even that has less."""
    high = _key(peak, BITS).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + 3) // 4
        first, second, third = _amounts(
            row_ptr, low, step, floor, peak, temperature, vocab, tiles, MASS, BITS, TILE
        )  # fmt: skip
        at_third = third >= wanted
        at_second = second >= wanted
        at_first = first >= wanted
        origin = low
        low = tl.where(
            at_third, low + 3 * step, tl.where(at_second, low + 2 * step, tl.where(at_first, low + step, low))
        )
        above = tl.where(at_third, high, tl.where(at_second, origin + 3 * step, origin + 2 * step))
        above = tl.where(at_first, above, origin + step)
        high = tl.minimum(high, above)
    return low


@triton.jit
def _pick_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    places_ptr,
    peaks_ptr,
    first_ptr,
    sums_ptr,
    tokens_ptr,
    out_ptr,
    logits_stride,
    vocab,
    tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
):
    i = tl.program_id(0)
    numbers = tl.arange(0, TILES)
    inside = numbers < tiles
    peaks = tl.load(peaks_ptr + i * tiles + numbers, mask=inside, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    firsts = tl.load(first_ptr + i * tiles + numbers, mask=inside, other=vocab - 1)
    token = tl.min(tl.where((peaks == peak) & inside, firsts, vocab - 1), axis=0)
    if RANDOM:
        row = tl.load(rows_ptr + i)
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & (peak > float("-inf")):
            row_ptr = logits_ptr + i.to(tl.int64) * logits_stride
            top_k = tl.load(top_k_ptr + row)
            limited = (top_k > 0) & (top_k < vocab)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            sums = tl.load(sums_ptr + i * tiles + numbers, mask=inside, other=0.0)
            shift = tl.where(peaks == float("-inf"), peak, peaks)
            masses = sums * tl.exp((shift - peak) / temperature)
            floor = tl.where(min_p > 0, peak + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
            bottom: tl.constexpr = -(1 << (BITS - 1))
            cut = tl.full([], bottom, tl.int64)
            filtered = (min_p > 0) | limited | (top_p < 1.0)
            if filtered:
                if limited:
                    cut = _search(
                        row_ptr, cut, top_k.to(tl.float32), floor, peak, temperature, vocab, tiles, False, BITS, TILE
                    )  # fmt: skip
                if top_p < 1.0:
                    # All that top-k and min-p keep; a step of 0 asks for `cut` itself.
                    total, _, _ = _amounts(
                        row_ptr, cut, 0, floor, peak, temperature, vocab, tiles, True, BITS, TILE
                    )  # fmt: skip
                    cut = _search(
                        row_ptr, cut, tl.maximum(top_p * total, 1e-30), floor, peak, temperature, vocab, tiles, True,
                        BITS, TILE,
                    )  # fmt: skip
                masses = tl.zeros([TILES], tl.float32)
                for tile in range(0, tiles):
                    offsets, x = _load_tile(row_ptr, tile, vocab, TILE)
                    kept = (x >= floor) & (_key(x, BITS).to(tl.int64) >= cut) & (offsets < vocab)
                    mass = tl.sum(tl.where(kept, tl.exp((x - peak) / temperature), 0.0), axis=0)
                    masses = tl.where(numbers == tile, mass, masses)
            ends = tl.cumsum(masses.to(tl.float64), axis=0)
            target = tl.load(uniform_ptr + i) * tl.sum(masses.to(tl.float64), axis=0)
            last = tl.max(tl.where(masses > 0, numbers, 0), axis=0)
            chosen = tl.minimum(tl.min(tl.where(ends > target, numbers, TILES), axis=0), last)
            before = tl.sum(tl.where(numbers < chosen, masses.to(tl.float64), 0.0), axis=0)
            offsets, x = _load_tile(row_ptr, chosen, vocab, TILE)
            kept = (x >= floor) & (_key(x, BITS).to(tl.int64) >= cut) & (x > float("-inf"))
            weights = tl.where(kept, tl.exp((x - peak) / temperature), 0.0)
            passed = (tl.cumsum(weights, axis=0) > (target - before).to(tl.float32)) & (weights > 0)
            drawn = tl.min(tl.where(passed, offsets, vocab), axis=0)
            # Sums in another order may round differently: then the last token kept is meant.
            token = tl.where(drawn < vocab, drawn, tl.max(tl.where(weights > 0, offsets, 0), axis=0))
    tl.store(out_ptr + i, token.to(tl.int64))
    place = tl.load(places_ptr + i)
    tl.store(tokens_ptr + place, token.to(tl.int32), mask=place >= 0)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    state: SamplingTables,
    uniform: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """As `sampling.sample_tokens`; rows of `logits` must be contiguous."""
    count, vocab = logits.shape
    if out is None:
        out = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return out
    tiles = triton.cdiv(vocab, TILE)
    peaks = torch.empty(2, count, tiles, dtype=torch.float32, device=logits.device)
    first = torch.empty(count, tiles, dtype=torch.int32, device=logits.device)
    random = uniform is not None
    _peaks_kernel[(count, tiles)](
        logits, rows, state.temperature, peaks[0], first, peaks[1], logits.stride(0), vocab, TILE=TILE, RANDOM=random,
        num_warps=8,
    )  # fmt: skip
    _pick_kernel[(count,)](
        logits,
        rows,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        uniform if random else peaks,
        places,
        peaks[0],
        first,
        peaks[1],
        tokens,
        out,
        logits.stride(0),
        vocab,
        tiles,
        TILES=triton.next_power_of_2(tiles),
        TILE=TILE,
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        RANDOM=random,
        num_warps=16 if random else 1,
    )
    return out
