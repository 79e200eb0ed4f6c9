# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Programmatic dependent launch (Hopper and newer): a kernel's programs are brought to the multiprocessors while the
kernel before it still runs, and wait there; the gap between two small kernels of a captured step shrinks.

Every kernel launched with `early_launch()` begins with `after_previous()`, or with `wait_for_previous()` where it is
large and calls `release_next()` when its work is nearly done. Before that it may read what was there before the kernel
before it began: that one has waited first, so that whatever came earlier has ended.

Small kernels call `release_then_wait()`: while they wait and compute, the memory is idle, and the product behind them
asks for its weights meanwhile (`hopper_stream.py`, or by `bring_to_l2`). So what is read ahead behind such a kernel
must be older than the kernel in front of it: weights, the plan of decode attention. What such a kernel reads ahead
itself, where a product stands in front of it that has waited, may be as new as what that product waited for; it is read
past the L1 cache, which may hold what was there before.
KVERN_EARLY_LAUNCH=0 turns it off.
"""

import functools
import os

import torch
import triton
import triton.language as tl


def _supported() -> bool:
    if os.environ.get("KVERN_EARLY_LAUNCH", "1") == "0" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


_EARLY = tl.constexpr(_supported())


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one has ended and its writes can be read."""
    if _EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next():
    """Let the next kernel be brought in, once all programs of this one have come here."""
    if _EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous():
    """`wait_for_previous` and `release_next`."""
    wait_for_previous()
    release_next()


@triton.jit
def release_then_wait():
    """`release_next` and `wait_for_previous`."""
    release_next()
    wait_for_previous()


@triton.jit
def bring_to_l2(addresses, sizes):
    """Ask for `sizes` bytes from each of `addresses` (int64), multiples of 16 both, to be in the L2 cache soon."""
    if _EARLY:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.u32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [addresses, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def early_launch() -> dict[str, bool]:
    """Launch options of a kernel that begins with one of the functions above."""
    return {"launch_pdl": True} if _EARLY.value else {}
