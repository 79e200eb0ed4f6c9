#!/usr/bin/env python3
"""What this card can do, in a few seconds: cards of one kind differ by several per cent, and a table is to be read
beside the ceilings of the card that it was measured on. One JSON line.

    python benchmarks/kernels/ceilings.py [--sustained 2]
"""

import argparse
import json
import sys
import time

import torch


def seconds(call, count):
    """Of one call, in a stretch of `count`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / count


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--sustained", type=float, default=2.0, help="seconds of products for the sustained rate")
    a = ap.parse_args()
    size, flops = 8192, 2.0 * 8192**3
    x, w = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(x)

    def product():
        torch.mm(x, w, out=out)

    seconds(product, 3)
    time.sleep(1)
    rested = min(seconds(product, 10) for _ in range(3))
    seconds(product, int(a.sustained / rested))
    sustained = seconds(product, 100)
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    read = min(seconds(lambda: torch.sum(big), 3) for _ in range(3))
    found = {"card": torch.cuda.get_device_name(), "bf16_tflop_s": round(flops / rested / 1e12)}
    found |= {"sustained_tflop_s": round(flops / sustained / 1e12), "read_tb_s": round(4 * (1 << 30) / read / 1e12, 2)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
