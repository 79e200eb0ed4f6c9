"""What a step of a running LLM consists of on a GPU: kernel by kernel, idle time, and the host's share. Used by
`h200.py --timeline`.

A kernel's floor is the bytes that it must move over the card's measured bandwidth (Llama-3-8B, see `floors`).
"""

import cProfile
import io
import json
import pstats
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

READ_TB_S = 4.39  # measured on an H200, see docs/performance-h200.md
GROUPS = (  # the first pattern found in a kernel's name decides
    (
        "attention",
        (
            "_decode_kernel",
            "decode_fp8",
            "_merge_kernel",
            "_prefill_kernel",
            "hopper_attention",
            "fmha",
            "flash",
            "cudnn",
            "_gather",
        ),
    ),
    ("sums", ("peer_sum", "nccl")),
    ("norm", ("_rms_norm_kernel", "_norm_kernel")),
    ("rope + KV write", ("_rope_kernel",)),
    ("silu", ("_silu",)),
    ("sampling", ("_peaks_kernel", "_pick_kernel")),
    ("inputs", ("_decode_inputs_kernel", "index", "gather", "embedding", "Memcpy", "Memset")),
    (
        "gemm",
        (
            "gemm",
            "hopper_product",
            "_product_kernel",
            "_split_kernel",
            "nvjet",
            "hopper_stream",
            "cutlass",
            "xmma",
            "gemv",
            "splitK",
            "_linear",
            "cublas",
        ),
    ),
)


def group_of(name):
    return next((group for group, parts in GROUPS if any(part.lower() in name.lower() for part in parts)), "other")


def floors(config, rows, context, fp8=False, fp8_kv=False):
    """Least microseconds a decode step of each group, by memory traffic at `rows` rows with `context` tokens each. With
    `fp8` weights take a byte (those of the head too, up to 64 rows), with `fp8_kv` K and V do."""
    hidden, layers = config.hidden_size, config.num_layers
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = hidden * heads * config.head_dim + config.num_heads * config.head_dim * hidden
    layer += 3 * hidden * config.intermediate_size
    head = config.vocab_size * hidden * (1 if fp8 and rows <= 64 else 2)
    weights = layers * layer * (1 if fp8 else 2) + head
    kv = 2 * layers * config.num_kv_heads * config.head_dim * context * rows * (1 if fp8_kv else 2)
    per_us = READ_TB_S * 1e6
    return {"gemm": round(weights / per_us, 1), "attention": round(kv / per_us, 1)}


class Decoding:
    """`rows` requests of `n_in` prompt tokens that decode until the block is left."""

    def __init__(self, llm, rows, n_in, seed=5):
        from kvern_engine import SamplingParams
        from kvern_engine.ipc import AddRequest

        self.core, self.rows = llm.core, rows
        rng = random.Random(seed)
        params = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True, detokenize=False)
        self.names = [f"timeline-{seed}-{i}" for i in range(rows)]
        self.counts = dict.fromkeys(self.names, 0)
        for name in self.names:
            ids = [rng.randrange(1000, llm.model_config.vocab_size - 1000) for _ in range(n_in)]
            self.core.add_request(AddRequest(name, 0, ids, params, time.monotonic()))

    def __enter__(self):
        while min(self.counts.values()) < 8:
            self.step()
        return self

    def step(self):
        for output in self.core.step().get(0, ()):
            self.counts[output.request_id] += len(output.token_ids)

    def __exit__(self, *error):
        self.core.abort(self.names)
        while not self.core.idle:
            self.core.step()


def host_and_step(run, steps=60):
    """Microseconds a step: wall time, and the loop's parts (schedule, submit, wait for the device, emit)."""
    device = run.core.device_time
    before, start, busy, idle = dict(run.core._seconds), time.perf_counter(), device.busy, device.idle
    for _ in range(steps):
        run.step()
    wall = time.perf_counter() - start
    parts = {name: round((value - before[name]) / steps * 1e6, 1) for name, value in run.core._seconds.items()}
    busy, idle = device.busy - busy, device.idle - idle
    # By the engine's own events, without the profiler's cost: what kvern:gpu_idle_fraction shows.
    return {"step_us": round(wall / steps * 1e6, 1), **parts, "idle_metric": round(idle / max(busy + idle, 1e-9), 4)}


def kernels(call, steps):
    """[(name, launches a step, microseconds a step)], microseconds a step the device was busy and idle, and the longest
    pauses as (microseconds since the first kernel, microseconds, the kernel that ended it)."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    spans = [
        (float(e["ts"]), float(e["dur"]), e["name"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    spans.sort()
    total, count = defaultdict(float), defaultdict(int)
    busy, end, pauses = 0.0, spans[0][0], []
    for start, duration, name in spans:
        if start > end:
            pauses.append((round(end - spans[0][0], 1), round(start - end, 1), name[:60]))
        total[name] += duration
        count[name] += 1
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    wall = end - spans[0][0]
    rows = sorted(((name, count[name] / steps, us / steps) for name, us in total.items()), key=lambda row: -row[2])
    pauses = sorted(pauses, key=lambda pause: -pause[1])[:8]
    return rows, busy / steps, (wall - busy) / steps, sorted(pauses)


def by_group(found):
    """Microseconds of each group of kernels, the largest first."""
    groups = defaultdict(float)
    for name, _, us in found:
        groups[group_of(name)] += us
    return {name: round(us, 1) for name, us in sorted(groups.items(), key=lambda item: -item[1])}


def longest(found, count):
    """The first `count` kernels as (name, launches, microseconds)."""
    return [(name[:90], round(launches, 1), round(us, 1)) for name, launches, us in found[:count]]


def profile_lines(profile):
    """The functions that took the host longest, their files without the folders of this machine."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(18)
    return [line.strip() for line in text.getvalue().splitlines() if line.strip()][2:26]


def decode_timeline(llm, rows, n_in, steps=10):
    """One decode step with `rows` rows: see the module's docstring. A dict for a JSON line."""
    with Decoding(llm, rows, n_in, seed=rows) as run:
        for _ in range(10):
            run.step()
        host = host_and_step(run)
        try:
            found, busy, idle, _ = kernels(lambda: [run.step() for _ in range(steps)], steps)
        except Exception as error:  # no profiler here: the host's times are still worth having
            print(f"no kernel times: {error}")
            found, busy, idle = [], 0.0, 0.0
        context = n_in + min(run.counts.values())
        profile = cProfile.Profile()
        profile.runcall(lambda: [run.step() for _ in range(30)])
    return {
        "timeline": "decode",
        "rows": rows,
        "context": context,
        **host,
        "busy_us": round(busy, 1),
        "idle_us": round(idle, 1),
        "idle_share": round(idle / max(busy + idle, 1e-9), 4),
        "groups": by_group(found),
        "floors": floors(
            llm.model_config, rows, context, bool(llm.config.quantization), llm.config.kv_cache_dtype != "auto"
        ),
        "kernels": longest(found, 24),
        "host_profile": profile_lines(profile),
    }


def prompt_timeline(llm, n_in, rows=1):
    """One step that computes `rows` fresh prompts of `n_in` tokens."""
    from kvern_engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = random.Random(n_in)
    batches = [[{"prompt_token_ids": [rng.randrange(1000, 9000) for _ in range(n_in)]} for _ in range(rows)]
               for _ in range(4)]  # fmt: skip
    llm.generate(batches[0], params, use_tqdm=False)
    start = time.perf_counter()
    llm.generate(batches[1], params, use_tqdm=False)
    wall = time.perf_counter() - start
    found, busy, idle, pauses = kernels(lambda: llm.generate(batches[2], params, use_tqdm=False), 1)
    profile = cProfile.Profile()
    profile.runcall(lambda: llm.generate(batches[3], params, use_tqdm=False))
    return {
        "timeline": "prompt",
        "rows": rows,
        "tokens": n_in,
        "s": round(wall, 4),
        "busy_us": round(busy, 1),
        "idle_us": round(idle, 1),
        "pauses": pauses,
        "host_profile": profile_lines(profile),
        "groups": by_group(found),
        "kernels": longest(found, 16),
    }


def mixed_timeline(llm, requests, skip=60, steps=40):
    """Steps in the middle of `requests` ((token ids, tokens to generate), all submitted at once), prompts beside
    decodes."""
    from kvern_engine import SamplingParams
    from kvern_engine.ipc import AddRequest

    core, names = llm.core, []
    for i, (ids, count) in enumerate(requests):
        names.append(f"mixed-{i}")
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        core.add_request(AddRequest(names[-1], 0, [1001 + i % 7, *ids[1:]], params, time.monotonic()))
    try:
        for _ in range(skip):
            core.step()
        run = SimpleNamespace(core=core, step=core.step)
        before = llm.core.scheduler._step_tokens
        host = host_and_step(run, steps)
        tokens = (llm.core.scheduler._step_tokens - before) / steps
        found, busy, idle, _ = kernels(lambda: [core.step() for _ in range(steps)], steps)
    finally:
        core.abort(names)
        while not core.idle:
            core.step()
    return {
        "timeline": "mixed",
        "tokens_a_step": round(tokens, 1),
        **host,
        "busy_us": round(busy, 1),
        "idle_us": round(idle, 1),
        "idle_share": round(idle / max(busy + idle, 1e-9), 4),
        "groups": by_group(found),
        "kernels": longest(found, 16),
    }


def show(line):
    """A timeline as a few lines of text."""
    head = {key: value for key, value in line.items() if key not in ("kernels", "host_profile")}
    print(json.dumps(head))
    for name, count, us in line["kernels"][:14]:
        print(f"    {us:9.1f} us  {count:6.1f} x  {name[:70]}")
