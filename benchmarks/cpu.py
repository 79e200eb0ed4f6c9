#!/usr/bin/env python3
"""What Kvern promises on two CPU cores, measured: JSON lines, each with the promise and whether it is kept.

    python benchmarks/cpu.py --out results/cpu.jsonl             # all, about fifteen minutes on two cores
    python benchmarks/cpu.py --only batch1 batch32

batch1       one request against transformers' generate, same weights, dtype and threads, in turns     >= 1.2x
batch32      32 requests at once against one: tokens a second                                          >= 8x
prefix64     64 prompts that share 1,500 tokens, 16 out: with prefix caching against without           >= 7x
long_prompt  a 6,000-token prompt beside 8 streams: ITL p99 <= 3x, its TTFT <= 2x its time alone
scheduler    scheduler and block pool a step at 64 running requests                                    < 100 us
http2000     2,000 requests in flight over HTTP at one engine with --device sim, none lost

Exit status: the number of promises not kept.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODEL = "builtin://smollm2-135m"
REPO = Path(__file__).parents[1]
TINY = REPO / "tests/engine/models_data/tiny-kjv"


def load(dtype, **engine_args):
    from kvern_engine import LLM

    return LLM(MODEL, dtype=dtype, device="cpu", **engine_args)


# ---------------------------------------------------------------- beside transformers


def transformers_model(llm, dtype):
    """transformers' Llama with the same dequantized weights as `llm` computes with."""
    import torch
    import transformers

    from kvern_engine.loading.resolve import resolve_model
    from kvern_engine.loading.weights import iter_weights

    c = llm.model_config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta, tie_word_embeddings=c.tie_word_embeddings,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(iter_weights(resolve_model(MODEL), c)), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(getattr(torch, dtype)).eval()


def batch1(a):
    """Turns of our engine and of transformers, so that both see the same machine."""
    import torch

    from kvern_engine.bench import random_requests, run_once

    with load(a.dtype, max_model_len=2048) as llm:
        peer = transformers_model(llm, a.dtype)
        ((ids, n_out),) = requests = random_requests(1, 64, 128, llm.model_config.vocab_size, seed=5)

        def peer_once(salt):
            prompt = torch.tensor([[100 + salt, *ids[1:]]])
            start = time.perf_counter()
            with torch.inference_mode():
                out = peer.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                    max_new_tokens=n_out, min_new_tokens=n_out, pad_token_id=0,
                )  # fmt: skip
            assert out.shape[1] == len(ids) + n_out
            return time.perf_counter() - start

        run_once(llm, requests, 0), peer_once(0)
        ours, theirs = [], []
        for salt in range(1, a.runs + 1):
            ours.append(run_once(llm, requests, salt))
            theirs.append(peer_once(salt))
        s, peer_s = statistics.median(ours), statistics.median(theirs)
        yield {
            "w": "batch1", "s": round(s, 3), "out_tok_s": round(n_out / s, 1), "transformers_s": round(peer_s, 3),
            "transformers_out_tok_s": round(n_out / peer_s, 1), "ratio": round(peer_s / s, 2),
            "promise": ">= 1.2", "kept": peer_s / s >= 1.2,
        }  # fmt: skip


def batch32(a):
    from kvern_engine.bench import measure, random_requests

    with load(a.dtype, max_model_len=2048) as llm:
        vocab = llm.model_config.vocab_size
        one = measure(llm, random_requests(1, 64, 128, vocab, seed=5), a.runs)
        many = measure(llm, random_requests(32, 64, 128, vocab, seed=6), a.runs)
        ratio = many["out_tok_s"] / one["out_tok_s"]
        yield {
            "w": "batch32", **many, "one_out_tok_s": one["out_tok_s"], "ratio": round(ratio, 2), "promise": ">= 8",
            "kept": ratio >= 8,
        }  # fmt: skip


def prefix64(a):
    from kvern_engine.bench import measure, random_requests

    found = {}
    for caching in (True, False):
        with load(a.dtype, max_model_len=2048, enable_prefix_caching=caching) as llm:
            requests = random_requests(64, 8, 16, llm.model_config.vocab_size, seed=2, prefix=1500)
            # Without caching one run takes minutes and differs by little: one after no warm-up run is enough.
            found[caching] = measure(llm, requests, a.runs) if caching else _single(llm, requests)
    ratio = found[False]["s"] / found[True]["s"]
    yield {
        "w": "prefix64", **found[True], "s_without": found[False]["s"], "ratio": round(ratio, 2), "promise": ">= 7",
        "kept": ratio >= 7,
    }  # fmt: skip


def _single(llm, requests):
    from kvern_engine.bench import run_once

    return {"s": round(run_once(llm, requests, 0), 3)}


def long_prompt(a):
    from kvern_engine.bench import long_prompt as measure_long

    with load(a.dtype, serving=True, max_model_len=8192, enable_prefix_caching=False) as llm:
        line = measure_long(llm)
        kept = line["itl_p99_ratio"] <= 3 and line["ttft_ratio"] <= 2
        yield {"w": "long_prompt", **line, "promise": "ITL p99 <= 3, TTFT <= 2", "kept": kept}


def scheduler(a):
    from kvern_engine.bench import scheduler_micros

    line = scheduler_micros()
    yield {"w": "scheduler", **line, "promise": "< 100 us", "kept": line["us_per_step"] < 100}


# ---------------------------------------------------------------- over HTTP


def start_server(*flags):
    """A `kvern serve` process on a free port; returns it and its URL once it is ready."""
    command = [sys.executable, "-c", "import sys; from kvern_engine.cli import main; sys.exit(main(sys.argv[1:]))"]
    server = subprocess.Popen([*command, "serve", *flags, "--port", "0"], stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"msg=ready .*?url=(\S+)", line):
            # Somebody must go on reading, or the server's log fills the pipe.
            subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
            return server, found.group(1)
    raise RuntimeError(f"the server ended with status {server.wait()}")


async def _one_stream(session, url, body, state):
    start = last = time.perf_counter()
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            state["errors"].append(f"{response.status} {(await response.text())[:200]}")
            return
        state["open"] += 1
        state["most"] = max(state["most"], state["open"])
        async for line in response.content:
            if line.startswith(b"data:") and b'"choices":[{' in line:
                now = time.perf_counter()
                (state["itl"] if last != start else state["ttft"]).append(now - last)
                last = now
            if b'"usage":{' in line:
                state["tokens"] += json.loads(line[5:])["usage"]["completion_tokens"]
        state["open"] -= 1


async def _in_flight(url, count, n_out):
    import aiohttp

    state = {"open": 0, "most": 0, "tokens": 0, "errors": [], "ttft": [], "itl": []}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()

        async def one(i):
            body = {
                "model": "sim", "prompt": [100 + i % 1000, *range(10, 25)], "max_tokens": n_out, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            await _one_stream(session, url, body, state)

        results = await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)
        state["errors"] += [repr(r)[:200] for r in results if isinstance(r, BaseException)]
        return state, time.perf_counter() - start


def http2000(a, count=2000, n_out=128):
    # A slow device, so that the first answers have not ended when the last request comes: 2,000 streams are open at
    # once, at a rate of tokens that two cores, the client on one of them, can carry.
    server, url = start_server(
        str(TINY), "--served-model-name", "sim", "--device", "sim", "--max-num-seqs", "2048",
        "--num-gpu-blocks-override", "40000", "--sim-speed", "0.06",
    )  # fmt: skip
    try:
        state, seconds = asyncio.run(_in_flight(url, count, n_out))
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    itl = sorted(state["itl"]) or [0.0]
    complete = state["tokens"] == count * n_out and not state["errors"] and status == 0
    yield {
        "w": "http2000", "s": round(seconds, 2), "out_tok_s": round(state["tokens"] / seconds, 1), "n": count,
        "most_open": state["most"], "errors": len(state["errors"]), "first_error": (state["errors"] or [None])[0],
        "itl_p50_ms": round(itl[len(itl) // 2] * 1e3, 1), "itl_p99_ms": round(itl[int(0.99 * len(itl))] * 1e3, 1),
        "promise": "2,000 open at once, no token lost", "kept": complete and state["most"] == count,
    }  # fmt: skip


MEASURES = {f.__name__: f for f in (batch1, batch32, prefix64, long_prompt, scheduler, http2000)}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", nargs="+", choices=list(MEASURES))
    ap.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--out", type=Path, help="append the lines to this file too")
    a = ap.parse_args()
    from kvern_engine.bench import commit, write_line

    missed = 0
    for name in a.only or MEASURES:
        for line in MEASURES[name](a):
            line = {"engine": f"kvern-cpu-{a.dtype}", **line, "cores": len(os.sched_getaffinity(0)), "commit": commit()}
            missed += not line["kept"]
            write_line(sys.stdout, line)
            if a.out:
                a.out.parent.mkdir(parents=True, exist_ok=True)
                with a.out.open("a") as out:
                    write_line(out, line)
    return missed


if __name__ == "__main__":
    sys.exit(main())
