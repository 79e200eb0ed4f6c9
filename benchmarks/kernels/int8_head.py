"""Times an LM head in INT8 with several tiles beside the vendor's product in bf16, on one GPU:

    PYTHONPATH=kernels python benchmarks/kernels/int8_head.py --out OUT

Llama-3's head, 128,256 x 4,096; the weights are read from memory each time. JSON lines go to OUT/int8_head.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import time_calls

from kvern_kernels import int8
from kvern_kernels.int8_triton import HeadTiles, int8_linear

COLUMNS, INNER = 128256, 4096
TILES = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (64, 128, 3), (64, 64, 6)]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    weight = torch.randn(COLUMNS, INNER, dtype=torch.bfloat16, device="cuda") * 0.02
    packed = int8.Int8Weight.quantize(weight)
    with (a.out / "int8_head.jsonl").open("w") as file:
        for rows in (1, 8, 16, 32, 64):
            x = torch.randn(rows, INNER, dtype=torch.bfloat16, device="cuda")
            expected = int8.int8_linear(x, packed).float()
            us = time_calls([lambda x=x: torch.nn.functional.linear(x, weight)] * 3)
            print(f"rows {rows}: bf16 {us:.1f} us ({2 * weight.numel() / us / 1e6:.2f} TB/s)", flush=True)
            lines = [{"rows": rows, "tiles": None, "us": round(us, 1)}]
            for tiles in TILES:
                chosen, line = HeadTiles(*tiles), {"rows": rows, "tiles": tiles}
                try:
                    got = int8_linear(x, packed, chosen).float()
                    line["error"] = float(f"{float((got - expected).norm() / expected.norm()):.2g}")
                    us = time_calls([lambda x=x, chosen=chosen: int8_linear(x, packed, chosen)] * 3)
                    line |= {"us": round(us, 1), "tb_s": round(weight.numel() / us / 1e6, 2)}
                except Exception as error:
                    line["failed"] = str(error)[:120]
                lines.append(line)
                print("  ", *line.values(), flush=True)
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
