"""Does cuBLASLt know a faster kernel for a product than the one that its heuristic (and torch) takes?

Llama-3-8B's shapes, bf16 or FP8, weights as they are stored ("TN") and, in bf16, transposed ("NN"); every candidate
that the heuristic offers is timed, the best ones again in turns.

A card at its power limit slows down while it is measured: with --sustained every candidate runs for so many
milliseconds at a time, after as many that are not counted, as in a long prompt, where the kernel counts that needs the
least energy.

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
CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3 = 0, 14, 28
COMPUTE_32F = 68
TRANSA, A_SCALE, B_SCALE, FAST_ACCUM = 3, 17, 18, 25
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
        self.scale = torch.ones((), device="cuda")
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def layout(self, rows, columns, ld, kind=CUDA_R_16BF):
        found = ctypes.c_void_p()
        arguments = ctypes.c_int(kind), ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(ld)
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
        elif kind == "FP8":
            for name, value, size in (
                (TRANSA, ctypes.c_int32(1), 4), (FAST_ACCUM, ctypes.c_int8(1), 1),
                (A_SCALE, ctypes.c_void_p(self.scale.data_ptr()), 8),
                (B_SCALE, ctypes.c_void_p(self.scale.data_ptr()), 8),
            ):  # fmt: skip
                check(
                    self.lib.cublasLtMatmulDescSetAttribute(desc, name, ctypes.byref(value), ctypes.c_size_t(size)),
                    "fp8",
                )
            types = CUDA_R_8F_E4M3
            return desc, self.layout(k, n, k, types), self.layout(k, m, k, types), self.layout(n, m, n)
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


def kernel_name(graph):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    return rows[0].key.replace("nvjet_sm90_", "")[:48] if rows else ""


def sustained(graph, count, milliseconds, once):
    """Microseconds a call where the card has been computing the same for a while."""
    replays = max(1, round(milliseconds * 1000 / (once * count)))
    for _ in range(replays):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count / replays


def candidates(lt, name, m, most, sets, fp8):
    """name -> call(i) of every candidate and of torch's choice, over `sets` weights."""
    n, k = SHAPES[name]
    weights = torch.randn(sets, n, k, dtype=torch.bfloat16, device="cuda") * 0.02
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    if fp8:
        e4m3 = torch.float8_e4m3fn
        weights, x = (weights * 4000).to(e4m3), (x * 100).to(e4m3)
        stored = {"FP8": weights}
        calls = {
            "torch": lambda i: torch._scaled_mm(
                x, weights[i].t(), scale_a=lt.scale, scale_b=lt.scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        }
    else:
        turned = weights.transpose(1, 2).contiguous()
        stored = {"TN": weights, "NN": turned}
        calls = {"torch": lambda i: F.linear(x, weights[i]), "torch NN": lambda i: torch.mm(x, turned[i])}
    for kind, held in stored.items():
        product = lt.product(kind, m, n, k)
        for number, found in enumerate(lt.candidates(product, most)):

            def call(i, product=product, held=held, found=found):
                lt.run(product, held[i], x, y, found)

            calls[f"{kind} {number}"] = call
    first = next(label for label in calls if not label.startswith("torch"))
    calls[first](0)
    expected = calls["torch"](0).float()
    return calls, float((y.float() - expected).norm() / expected.norm())


def search(lt, name, m, a):
    n, k = SHAPES[name]
    sets = max(2, copies(2.0 * n * k)) if m < 4096 else 2
    calls, difference = candidates(lt, name, m, a.most, sets, a.fp8)
    graphs, times, names = {}, {}, {}
    for label, call in calls.items():
        try:
            graphs[label] = timed(call, sets)
        except RuntimeError as error:
            print(name, m, label, str(error)[:100])
            torch.cuda.synchronize()
            continue
        times[label] = min(replay(graphs[label], sets) for _ in range(2))
    best = sorted(times, key=times.get)[: a.finalists]
    kept = list(dict.fromkeys([*best, *(label for label in times if label.startswith("torch"))]))
    again = {label: [] for label in kept}
    for turn in range(a.turns):
        for label in kept if turn % 2 else kept[::-1]:
            one = (
                sustained(graphs[label], sets, a.sustained, times[label])
                if a.sustained
                else replay(graphs[label], sets)
            )
            again[label].append(one)
    names = {label: kernel_name(graphs[label]) for label in kept} if a.names else {}
    found = {label: [round(statistics.median(values), 2), names.get(label, "")] for label, values in again.items()}
    line = {"shape": name, "rows": m, "fp8": a.fp8, "sustained_ms": a.sustained, "candidates": len(calls)}
    return {**line, "difference": float(f"{difference:.1g}"), "us": found}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--rows", type=int, nargs="+", default=[8192, 256, 32])
    ap.add_argument("--most", type=int, default=12)
    ap.add_argument("--turns", type=int, default=9)
    ap.add_argument("--finalists", type=int, default=4)
    ap.add_argument("--sustained", type=float, default=0, help="milliseconds")
    ap.add_argument("--fp8", action="store_true")
    ap.add_argument("--names", action="store_true", help="say which kernels the finalists are")
    a = ap.parse_args()
    lt = Lt()
    with a.out.open("a") as file:
        for m in a.rows:
            for name in SHAPES:
                line = search(lt, name, m, a)
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(json.dumps(line), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
