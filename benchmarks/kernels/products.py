"""Matrix products of few rows at Llama-3-8B's shapes: cuBLAS beside our split kernel, alone and as a layer's chain.

Used by `bench_kernels.py` (phase gemm). A chain is what a decode step runs of a layer apart from attention: the four
products, rotary + KV write, two norms and SwiGLU.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from timing import COPY_TB_S, DIM, DTYPE, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, Timing, copies, time_calls

from kvern_kernels import Fp8Weight, activation_triton, fp8_triton, norm_triton, rotary_triton
from kvern_kernels.small_gemm_triton import (
    ProductTiles,
    fp8_gated_linear,
    fp8_linear_parts,
    gated_linear,
    linear_parts,
)

QKV = (HEADS + 2 * KV_HEADS) * DIM
SHAPES = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
SPLITS = {"qkv": (2, 4), "o": (2, 4, 8), "gate_up": (1,), "down": (2, 4, 7, 8)}
ROWS = (1, 16, 32, 64, 128)
TILES = ((64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 8, 4), (64, 64, 4, 6))
GATED_TILES = ((64, 128, 4, 3), (64, 64, 4, 5), (64, 64, 4, 4), (128, 64, 8, 4), (64, 128, 8, 3))


def product(shape: str, rows: int, tiles: ProductTiles | None) -> Timing:
    """One product alone; `tiles` None is cuBLAS (and for gate_up SwiGLU after it)."""
    columns, inner = SHAPES[shape]
    moved = 2.0 * columns * inner

    def build() -> list[Callable[[], object]]:
        sets = copies(moved)
        weights = torch.randn(sets, columns, inner, dtype=DTYPE, device="cuda")
        x = torch.randn(rows, inner, dtype=DTYPE, device="cuda")
        if tiles is None:
            if shape == "gate_up":
                return [lambda w=w: activation_triton.silu_and_mul(F.linear(x, w)) for w in weights]
            return [lambda w=w: F.linear(x, w) for w in weights]
        if shape == "gate_up":
            return [lambda w=w: gated_linear(x, w, tiles) for w in weights]
        return [lambda w=w: linear_parts(x, w, tiles) for w in weights]

    config = {"rows": rows}
    if tiles:
        config["tiles"] = [tiles.block_n, tiles.block_k, tiles.splits, tiles.num_warps, tiles.num_stages]
    return Timing("cublas" if tiles is None else "product", shape, build, moved, 2.0 * columns * inner * rows, config)


def sweep() -> Iterator[Timing]:
    for rows in ROWS:
        for shape, splits in SPLITS.items():
            yield product(shape, rows, None)
            for block_n, block_k, warps, stages in GATED_TILES if shape == "gate_up" else TILES:
                for split in splits:
                    yield product(shape, rows, ProductTiles(block_n, block_k, split, warps, stages))


FP8_SPLITS = {"qkv": (2, 4), "o": (2, 4), "gate_up": (1,), "down": (4, 7)}
FP8_TILES = ((64, 128, 4, 5), (64, 256, 4, 4), (32, 256, 4, 5), (128, 128, 8, 4))
FP8_GATED_TILES = ((64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 4), (128, 128, 8, 3))


def fp8_product(shape: str, rows: int, tiles: ProductTiles | None) -> Timing:
    """As `product` with weights and rows in FP8; with cuBLAS gate_up is followed by SwiGLU and the quantization of its
    rows, with `tiles` by the latter."""
    columns, inner = SHAPES[shape]

    def build() -> list[Callable[[], object]]:
        sets = copies(1.0 * columns * inner)
        one = torch.randn(columns, inner, dtype=DTYPE, device="cuda") * 0.02
        weights = [Fp8Weight.quantize(one) for _ in range(sets)]
        x = fp8_triton.quantize_rows(torch.randn(rows, inner, dtype=DTYPE, device="cuda"))
        if tiles is None:
            if shape == "gate_up":
                return [lambda w=w: fp8_triton.silu_and_mul_fp8(fp8_triton.fp8_linear(x, w, DTYPE)) for w in weights]
            return [lambda w=w: fp8_triton.fp8_linear(x, w, DTYPE) for w in weights]
        if shape == "gate_up":
            return [lambda w=w: fp8_triton.quantize_rows(fp8_gated_linear(x, w, DTYPE, tiles)) for w in weights]
        return [lambda w=w: fp8_linear_parts(x, w, tiles) for w in weights]

    config = {"rows": rows, "fp8": True}
    if tiles:
        config["tiles"] = [tiles.block_n, tiles.block_k, tiles.splits, tiles.num_warps, tiles.num_stages]
    kernel = "cublas_fp8" if tiles is None else "product_fp8"
    return Timing(kernel, shape, build, 1.0 * columns * inner, 2.0 * columns * inner * rows, config)


def fp8_sweep() -> Iterator[Timing]:
    for rows in (1, 32):
        for shape, splits in FP8_SPLITS.items():
            yield fp8_product(shape, rows, None)
            for block_n, block_k, warps, stages in FP8_GATED_TILES if shape == "gate_up" else FP8_TILES:
                for split in splits:
                    yield fp8_product(shape, rows, ProductTiles(block_n, block_k, split, warps, stages))


class Layers:
    """Weights and buffers of a few layers, more than the L2 holds."""

    def __init__(self, rows: int, count: int = 4) -> None:
        self.weights = [
            {name: torch.randn(size, dtype=DTYPE, device="cuda") * 0.02 for name, size in SHAPES.items()}
            for _ in range(count)
        ]
        self.x, self.attended, self.residual = (torch.randn(rows, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(3))
        self.norm = torch.randn(HIDDEN, dtype=DTYPE, device="cuda")
        self.cos_sin = torch.randn(64, DIM, device="cuda")
        self.positions = torch.arange(rows, device="cuda") % 64
        self.slots = torch.arange(rows, device="cuda")
        self.kv = torch.zeros(2, KV_HEADS, 64, 16, DIM, dtype=DTYPE, device="cuda")

    def vendor(self, w: dict) -> torch.Tensor:
        q, k, v = (
            F.linear(self.x, w["qkv"]).view(-1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        )
        rotary_triton.rope_and_cache(q, k, v, self.cos_sin, self.positions, self.kv, self.slots)
        x, _ = norm_triton.add_rms_norm(F.linear(self.attended, w["o"]), self.residual, self.norm, 1e-5)
        x = F.linear(activation_triton.silu_and_mul(F.linear(x, w["gate_up"])), w["down"])
        return norm_triton.add_rms_norm(x, self.residual, self.norm, 1e-5)[0]

    def ours(self, w: dict, tiles: dict[str, ProductTiles]) -> torch.Tensor:
        parts = linear_parts(self.x, w["qkv"], tiles["qkv"])
        q, k, v = parts.view(len(parts), -1, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        rotary_triton.rope_and_cache(q, k, v, self.cos_sin, self.positions, self.kv, self.slots, dtype=DTYPE)
        parts = linear_parts(self.attended, w["o"], tiles["o"])
        x, _ = norm_triton.add_rms_norm_parts(parts, self.residual, self.norm, 1e-5)
        parts = linear_parts(gated_linear(x, w["gate_up"], tiles["gate_up"]), w["down"], tiles["down"])
        return norm_triton.add_rms_norm_parts(parts, self.residual, self.norm, 1e-5)[0]


def chains(results: list[dict]) -> Iterator[dict]:
    """A layer's chain by cuBLAS and by the best tiles of each product in `results`."""
    floor = sum(2.0 * n * k for n, k in SHAPES.values()) / COPY_TB_S / 1e6
    for rows in ROWS:
        best = {}
        for shape in SHAPES:
            timed = [
                r
                for r in results
                if r["kernel"] == "product" and r["case"] == shape and r["rows"] == rows and "us" in r
            ]
            block_n, block_k, splits, warps, stages = min(timed, key=lambda r: r["us"])["tiles"]
            best[shape] = ProductTiles(block_n, block_k, splits, warps, stages)
        layers = Layers(rows)
        start = layers.residual.clone()
        expected = layers.vendor(layers.weights[0])
        layers.residual.copy_(start)
        got = layers.ours(layers.weights[0], best)
        difference = float((got.float() - expected.float()).norm() / expected.float().norm())
        vendor = time_calls([partial(layers.vendor, w) for w in layers.weights])
        layers.residual.copy_(start)
        ours = time_calls([partial(layers.ours, w, best) for w in layers.weights])
        layers.residual.copy_(start)
        yield {
            "kernel": "layer_chain", "rows": rows, "cublas_us": round(vendor, 2), "ours_us": round(ours, 2),
            "floor_us": round(floor, 2), "difference": float(f"{difference:.2g}"),
            "tiles": {name: list(vars(tiles).values()) for name, tiles in best.items()},
        }  # fmt: skip
