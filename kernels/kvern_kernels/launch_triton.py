# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Programmatic dependent launch (Hopper and newer): a kernel's programs are brought to the multiprocessors while the
kernel before it still runs, and wait there; the gap between two small kernels of a captured step shrinks.

Every kernel launched with `early_launch()` begins with `after_previous()`, or with `wait_for_previous()` where it is
large and calls `release_next()` when its work is nearly done: nothing before them may touch memory.
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


@functools.cache
def early_launch() -> dict[str, bool]:
    """Launch options of a kernel that begins with `after_previous()` or `wait_for_previous()`."""
    return {"launch_pdl": True} if _EARLY.value else {}
