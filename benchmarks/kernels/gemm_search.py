"""Does cuBLASLt know a faster kernel for a product than the one that its heuristic (and torch) takes? Llama-3-8B's
shapes, bf16, weights as they are stored ("TN") and transposed ("NN"); every candidate that the heuristic offers is
timed, the best ones again in turns, since a card under its power limit slows down while it is measured.

    python benchmarks/kernels/gemm_search.py --out OUT/gemm_search.jsonl --rows 32 256 8192
"""

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from timing import copies

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
CUDA_R_32F, CUDA_R_16BF = 0, 14
COMPUTE_32F = 68
TRANSA, TRANSB = 3, 4
MAX_WORKSPACE_BYTES = 1
WORKSPACE = 64 << 20


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def check(status, what):
    if status:
        raise RuntimeError(f"{what}: cuBLAS status {status}")


def library():
    for name in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    import nvidia

    for folder in nvidia.__path__:
        for path in Path(folder).rglob("libcublasLt.so*"):
            return ctypes.CDLL(str(path))
    raise RuntimeError("no libcublasLt here")


class Lt:
    def __init__(self):
        self.lib, self.handle = library(), ctypes.c_void_p()
        check(self.lib.cublasLtCreate(ctypes.byref(self.handle)), "create")
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def layout(self, rows, columns, ld):
        found = ctypes.c_void_p()
        arguments = ctypes.c_int(CUDA_R_16BF), ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(ld)
        check(self.lib.cublasLtMatrixLayoutCreate(ctypes.byref(found), *arguments), "layout")
        return found

    def product(self, kind, m, n, k):
        """Descriptors of y [m, n] = x [m, k] W^T, in the library's column-major terms."""
        desc = ctypes.c_void_p()
        check(self.lib.cublasLtMatmulDescCreate(ctypes.byref(desc), COMPUTE_32F, CUDA_R_32F), "desc")
        if kind == "TN":
            one = ctypes.c_int32(1)
            check(self.lib.cublasLtMatmulDescSetAttribute(desc, TRANSA, ctypes.byref(one), ctypes.c_size_t(4)), "trans")
            w = self.layout(k, n, k)
        else:
            w = self.layout(n, k, n)
        return desc, w, self.layout(k, m, k), self.layout(n, m, n)

    def candidates(self, product, most):
        desc, w, x, y = product
        preference = ctypes.c_void_p()
        check(self.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "preference")
        size = ctypes.c_size_t(WORKSPACE)
        check(
            self.lib.cublasLtMatmulPreferenceSetAttribute(
                preference, MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.c_size_t(8)
            ),
            "workspace",
        )
        results, count = (Heuristic * most)(), ctypes.c_int()
        check(
            self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, desc, w, x, y, y, preference, most, results, ctypes.byref(count)
            ),
            "heuristic",
        )
        return [result for result in results[: count.value] if result.state == 0]

    def run(self, product, weight, x, y, found):
        desc, dw, dx, dy = product
        check(
            self.lib.cublasLtMatmul(
                self.handle, desc, ctypes.byref(self.one), ctypes.c_void_p(weight.data_ptr()), dw,
                ctypes.c_void_p(x.data_ptr()), dx, ctypes.byref(self.zero), ctypes.c_void_p(y.data_ptr()), dy,
                ctypes.c_void_p(y.data_ptr()), dy, ctypes.byref(found.algo),
                ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ),
            "matmul",
        )  # fmt: skip


def timed(call, count):
    """Microseconds of each of `count` calls (numbered), as one graph, after one replay to warm up."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    graph.replay()
    return graph


def replay(graph, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def search(lt, name, m, most, turns):
    n, k = SHAPES[name]
    sets = max(2, copies(2.0 * n * k)) if m < 4096 else 2
    weights = torch.randn(sets, n, k, dtype=torch.bfloat16, device="cuda") * 0.02
    turned = weights.transpose(1, 2).contiguous()
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    calls = {"torch": lambda i: F.linear(x, weights[i]), "torch NN": lambda i: torch.mm(x, turned[i])}
    for kind, stored in (("TN", weights), ("NN", turned)):
        product = lt.product(kind, m, n, k)
        for number, found in enumerate(lt.candidates(product, most)):
            def call(i, product=product, stored=stored, found=found):
                lt.run(product, stored[i], x, y, found)

            calls[f"{kind} {number}"] = call
    calls["TN 0"](0)
    expected = F.linear(x, weights[0]).float()
    difference = float((y.float() - expected).norm() / expected.norm())
    graphs, times = {}, {}
    for label, call in calls.items():
        try:
            graphs[label] = timed(call, sets)
        except RuntimeError as error:
            print(name, m, label, str(error)[:100])
            torch.cuda.synchronize()
            continue
        times[label] = min(replay(graphs[label], sets) for _ in range(2))
    best = sorted(times, key=times.get)[:4]
    kept = dict.fromkeys([*best, "torch", "torch NN", min((t for t in times if t.startswith("TN")), key=times.get)])
    again = {label: [] for label in kept}
    for _ in range(turns):
        for label in again:
            again[label].append(replay(graphs[label], sets))
    found = {label: round(statistics.median(values), 2) for label, values in again.items()}
    return {"shape": name, "rows": m, "candidates": len(calls), "difference": float(f"{difference:.1g}"), "us": found}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--rows", type=int, nargs="+", default=[8192, 256, 32])
    ap.add_argument("--most", type=int, default=12)
    ap.add_argument("--turns", type=int, default=9)
    a = ap.parse_args()
    lt = Lt()
    with a.out.open("a") as file:
        for m in a.rows:
            for name in SHAPES:
                line = search(lt, name, m, a.most, a.turns)
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(json.dumps(line), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
