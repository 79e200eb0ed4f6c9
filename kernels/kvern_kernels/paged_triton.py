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
def even_numbers(words):
    """The low bytes of int16 `words`, E4M3, as float16 and divided by 256: only the exponent's bias differs."""
    if COMPILED:  # two words at once; the compiler would take them apart and put the results together again
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bits;
            shl.b32 bits, $1, 7;
            and.b32 bits, bits, 0x3f803f80;
            shl.b32 $0, $1, 8;
            lop3.b32 $0, $0, 0x80008000, bits, 0xea;
            }""",
            "=&r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    bits = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def odd_numbers(words):
    """The high bytes, as `even_numbers`."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bits;
            shr.b32 bits, $1, 1;
            and.b32 bits, bits, 0x3f803f80;
            lop3.b32 $0, $1, 0x80008000, bits, 0xea;
            }""",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    bits = (words & -32768) | ((words >> 1) & 0x3F80)
    return bits.to(tl.float16, bitcast=True)
