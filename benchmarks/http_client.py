#!/usr/bin/env python3
"""Load an OpenAI-compatible server with the fixed workloads and report latency and throughput.

Streams /v1/completions with token ids as prompts (any server that takes them), EOS ignored, greedy.
One JSON object on stdout: throughput, TTFT, ITL and end-to-end percentiles in milliseconds, errors by kind.
Needs aiohttp. Sends to the address it is given and stops by itself.

  http_client.py --url http://127.0.0.1:8000 --model m --workload sharegpt_1000 --rate inf
  http_client.py --url ... --workload sharegpt_1000 --n 300 --rate 16        # Poisson arrivals a second
  http_client.py --url ... --workload decode_32 --concurrency 32
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time

import aiohttp

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from workloads import WORKLOADS  # noqa: E402


def percentiles(values):
    if not values:
        return None
    values = sorted(values)
    pick = lambda q: round(values[min(len(values) - 1, int(q * len(values)))] * 1e3, 2)  # noqa: E731
    return {"mean": round(statistics.fmean(values) * 1e3, 2), "p50": pick(0.5), "p90": pick(0.9), "p99": pick(0.99)}


async def one(session, url, model, prompt, n_out, out):
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": n_out,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = last = time.perf_counter()
    got = 0
    try:
        async with session.post(url + "/v1/completions", json=body) as r:
            if r.status != 200:
                out["errors"].append(f"{r.status} {(await r.text())[:200]}")
                return
            async for line in r.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                now = time.perf_counter()
                event = json.loads(line[5:])
                if "error" in event:
                    out["errors"].append(str(event["error"])[:200])
                    return
                if event.get("choices"):
                    if got == 0:
                        out["ttft"].append(now - start)
                    else:
                        out["itl"].append(now - last)
                    last = now
                    got += 1
                if event.get("usage"):
                    out["tokens_out"] += event["usage"]["completion_tokens"]
                    out["tokens_in"] += event["usage"]["prompt_tokens"]
        out["e2e"].append(time.perf_counter() - start)
    except Exception as e:  # counted and shown, never hidden
        out["errors"].append(repr(e)[:200])


async def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--url", default="http://127.0.0.1:8000")
    ap.add_argument("--model", default="m")
    ap.add_argument("--workload", default="sharegpt_1000", choices=sorted(WORKLOADS))
    ap.add_argument("--n", type=int, help="only the first N requests")
    ap.add_argument("--rate", default="inf", help="requests a second, Poisson; inf = all at once")
    ap.add_argument("--concurrency", type=int, help="at most this many at a time")
    ap.add_argument("--api-key")
    ap.add_argument(
        "--salt", type=int, default=1, help="another first token, so that nothing is cached from an earlier run"
    )
    ap.add_argument("--tag", default="")
    ap.add_argument("--max-id", type=int, help="fold token ids below this (a smaller vocabulary)")
    a = ap.parse_args()
    requests = WORKLOADS[a.workload]()[: a.n]
    out = {"ttft": [], "itl": [], "e2e": [], "errors": [], "tokens_out": 0, "tokens_in": 0}
    rng = random.Random(0)
    gate = asyncio.Semaphore(a.concurrency or len(requests))
    headers = {"Authorization": f"Bearer {a.api_key}"} if a.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers) as s:

        async def go(prompt, n_out):
            async with gate:
                await one(s, a.url, a.model, prompt, n_out, out)

        start = time.perf_counter()
        tasks = []
        for prompt, n_out in requests:
            prompt = [1000 + a.salt] + prompt[1:]
            if a.max_id:
                prompt = [t % a.max_id for t in prompt]
            tasks.append(asyncio.create_task(go(prompt, n_out)))
            if a.rate != "inf":
                await asyncio.sleep(rng.expovariate(float(a.rate)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "tag": a.tag,
                "w": a.workload,
                "n": len(requests),
                "rate": a.rate,
                "concurrency": a.concurrency,
                "s": round(seconds, 3),
                "out_tok_s": round(out["tokens_out"] / seconds, 1),
                "tot_tok_s": round((out["tokens_out"] + out["tokens_in"]) / seconds, 1),
                "ttft_ms": percentiles(out["ttft"]),
                "itl_ms": percentiles(out["itl"]),
                "e2e_ms": percentiles(out["e2e"]),
                "errors": len(out["errors"]),
                "first_error": out["errors"][0] if out["errors"] else None,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
