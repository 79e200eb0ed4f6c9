# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""What the Triton attention kernels share: where tokens of the paged cache lie, and how an FP8 cache is read.

Two neighbouring E4M3 numbers are read as one 16-bit word and become two float16 numbers, the even and the odd
dimensions of a head. So a tile of an FP8 cache goes through shared memory as one of half as many 16-bit numbers does,
with the same wide loads and transpositions, where single bytes would have none. float16 holds every E4M3 number.
"""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def kv_pointers(base, table_ptr, positions, inside, dims, D: tl.constexpr, BS: tl.constexpr, SCALAR: tl.constexpr):
    """Pointers [len(positions), len(dims)] to the paged tokens at `positions`."""
    if SCALAR:  # the tile lies in one block
        first = tl.min(positions, axis=0)
        block = tl.load(table_ptr + first // BS).to(tl.int64)
        return base + block * (BS * D) + (positions % BS)[:, None] * D + dims[None, :]
    else:
        blocks = tl.load(table_ptr + positions // BS, mask=inside, other=0).to(tl.int64)
        return base + (blocks * (BS * D) + (positions % BS) * D)[:, None] + dims[None, :]


@triton.jit
def piece_of(pieces_ptr, program):
    """(row or -1, first and last but one position, how many pieces the row has) of a program, see `DecodePlan`."""
    entry = pieces_ptr + program * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def queries_of(row, query_start_ptr, seq_lens_ptr, end, MAX_Q: tl.constexpr):
    """(the first query token of a row, how many there are, the row's length), of at most MAX_Q; of one, whose tile
    needs no mask but for `end`, the length is `end`."""
    if MAX_Q == 1:
        return row, 1, end
    else:
        first = tl.load(query_start_ptr + row)
        return first, tl.load(query_start_ptr + row + 1) - first, tl.load(seq_lens_ptr + row)


@triton.jit
def head_offsets(first_token, tile_rows, head, token_stride, GROUP: tl.constexpr, D: tl.constexpr):
    """Where the query heads of KV head `head` begin that are a tile's rows, those of the first token first."""
    tokens = (first_token + tile_rows // GROUP).to(tl.int64)
    return tokens * token_stride + (head * GROUP + tile_rows % GROUP) * D


@triton.jit
def scale_pointers(base, first_token, tile_rows, head, stride, GROUP: tl.constexpr):
    """Where the scales of the heads go that `head_offsets` finds: tokens side by side, heads `stride` apart."""
    return base + (head * GROUP + tile_rows % GROUP) * stride + first_token + tile_rows // GROUP


@triton.jit
def hide(scores, positions, visible, end, MAX_Q: tl.constexpr):
    """Scores without those of tokens behind `end`, or behind the last position that a tile row sees."""
    if MAX_Q == 1:
        return tl.where((positions < end)[None, :], scores, float("-inf"))
    else:
        return tl.where(positions[None, :] <= tl.minimum(visible, end - 1)[:, None], scores, float("-inf"))


@triton.jit
def online_softmax(scores, top, total):
    """Takes a tile of scores (in powers of two) into the softmax of each row: its weights, what earlier sums shrink by,
    and the new maxima and totals."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that sees nothing yet keeps -inf; subtracting it would give NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, decay, new_top, total * decay + tl.sum(weights, axis=1)


@triton.jit
def store_stats(stats_ptr, piece, tile_rows, top, total, ROWS: tl.constexpr):
    """Maxima and totals of the first ROWS tile rows of a piece of the context, for the merge."""
    stats = stats_ptr + piece * (2 * ROWS) + tile_rows
    tl.store(stats, top, mask=tile_rows < ROWS)
    tl.store(stats + ROWS, total, mask=tile_rows < ROWS)


@triton.jit
def to_448(largest):
    """(the scale, what to multiply by) with which numbers of at most `largest` become E4M3."""
    scale = tl.maximum(largest / 448.0, 1e-12)
    return scale, 1.0 / scale


@triton.jit
def e4m3(values):
    """`values`, float32, in E4M3; of those that are too large the largest."""
    return tl.minimum(tl.maximum(values, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def fp8_numbers(words):
    """(the low bytes, the high bytes) of int16 `words`, E4M3 each, as float16."""
    if COMPILED:  # two words at once: the compiler would take them apart and put the results together again
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    # Sign, exponent and mantissa have the same order in float16; only the exponent's bias differs, by 8.
    low = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
    high = (words & -32768) | ((words >> 1) & 0x3F80)
    return low.to(tl.float16, bitcast=True) * 256.0, high.to(tl.float16, bitcast=True) * 256.0
