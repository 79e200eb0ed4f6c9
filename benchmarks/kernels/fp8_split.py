"""Times the products whose rows a decode step makes in 16 bits (o, down) with weights in FP8, several tiles beside the
way over quantized rows, on one GPU:

    PYTHONPATH=kernels python benchmarks/kernels/fp8_split.py --out OUT

Llama-3-8B's shapes; the weights are read from memory each time. JSON lines go to OUT/fp8_split.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from products import SHAPES, copies
from timing import DTYPE, time_calls

from kvern_kernels import SplitRows, fp8_triton
from kvern_kernels.fp8 import Fp8Weight
from kvern_kernels.fp8_split_triton import SplitTiles, linear_parts
from kvern_kernels.small_gemm_triton import choose_fp8_tiles, fp8_linear_parts

TILES = [(64, 64, 4), (64, 128, 3), (64, 64, 6), (64, 32, 6), (128, 64, 4), (128, 32, 5)]
SPLITS = {"o": (2, 4), "down": (2, 4, 7)}


def timed(shape, rows):
    """Lines of one product: over quantized rows, their quantization included, then with each tile."""
    columns, inner = SHAPES[shape]
    one = torch.randn(columns, inner, dtype=DTYPE, device="cuda") * 0.02
    weights = [Fp8Weight.quantize(one) for _ in range(copies(1.0 * columns * inner))]
    x = torch.randn(rows, inner, dtype=DTYPE, device="cuda")
    split, common = SplitRows.of(x), choose_fp8_tiles(rows, columns, False, 132)
    expected = x.float() @ weights[0].restore().T
    quantized = [lambda w=w: fp8_linear_parts(fp8_triton.quantize_rows(x), w, common) for w in weights]
    yield {"shape": shape, "rows": rows, "tiles": None, "us": round(time_calls(quantized), 2)}
    for block_n, block_w, stages in TILES:
        for splits in SPLITS[shape]:
            tiles = SplitTiles(block_n, block_w, splits, stages)
            line = {"shape": shape, "rows": rows, "tiles": [block_n, block_w, splits, stages]}
            try:
                got = linear_parts(split, weights[0], tiles).sum(0)
                line["error"] = float(f"{float((got - expected).norm() / expected.norm()):.2g}")
                calls = [lambda w=w, tiles=tiles: linear_parts(split, w, tiles) for w in weights]
                us = time_calls(calls)
                line |= {"us": round(us, 2), "tb_s": round(columns * inner / us / 1e6, 2)}
            except Exception as error:
                line["failed"] = str(error)[:120]
            yield line


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    with (a.out / "fp8_split.jsonl").open("w") as file:
        for shape in ("o", "down"):
            for rows in (1, 8, 16, 32):
                for line in timed(shape, rows):
                    file.write(json.dumps(line) + "\n")
                    print(*line.values(), flush=True)
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
