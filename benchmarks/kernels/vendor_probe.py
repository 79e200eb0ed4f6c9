"""What torch's cuDNN attention can do for a prompt step: correctness of its masks, and what a new shape costs."""

import json
import time

import torch

HEADS, KV_HEADS, DIM = 32, 8, 128
op = torch.ops.aten._scaled_dot_product_cudnn_attention


def attend(q, k, v, causal):
    return op(q, k, v, None, True, 0.0, causal, False, scale=DIM**-0.5)[:2]


def reference(q, k, v, offset):
    k, v = k.float().repeat_interleave(HEADS // KV_HEADS, 1), v.float().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = q.float() @ k.transpose(2, 3) * DIM**-0.5
    if offset is not None:
        positions = torch.arange(q.shape[2], device="cuda")[:, None] + offset
        scores.masked_fill_(torch.arange(k.shape[2], device="cuda")[None] > positions, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def make(rows, queries, keys):
    q = torch.randn(rows, queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    k, v = (torch.randn(rows, KV_HEADS, keys, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return q, k, v


def say(**result):
    print(json.dumps(result), flush=True)


def error(got, expected):
    return float((got.float() - expected).norm() / expected.norm())


def main():
    for rows, queries, keys, causal in (
        (2, 512, 512, True),
        (1, 384, 1024, True),
        (1, 300, 777, False),
        (3, 77, 77, True),
    ):
        q, k, v = make(rows, queries, keys)
        try:
            out, lse = attend(q, k, v, causal)
        except Exception as reason:
            say(shape=[rows, queries, keys], causal=causal, failed=str(reason)[:200])
            continue
        for name, offset in (("start", 0), ("end", keys - queries)) if causal else (("none", None),):
            expected, expected_lse = reference(q, k, v, offset)
            say(shape=[rows, queries, keys], mask=name, error=error(out, expected), lse_shape=list(lse.shape),
                lse_error=error(lse.reshape(expected_lse.shape), expected_lse))  # fmt: skip
    for rows, queries, keys, causal in (
        (1, 1000, 1000, True), (1, 1300, 1300, True), (1, 5555, 5555, True), (2, 1300, 1300, True),
        (1, 2048, 6144, False),
        (1, 2048, 6160, False), (1, 2000, 4000, False),
    ):  # fmt: skip
        q, k, v = make(rows, queries, keys)
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            attend(q, k, v, causal)
            torch.cuda.synchronize()
            times.append(round((time.perf_counter() - start) * 1e3, 3))
        say(shape=[rows, queries, keys], causal=causal, first_second_third_ms=times)
    for rows, queries, keys, causal in (
        (1, 2048, 6144, False),
        (1, 2048, 2048, True),
        (1, 8192, 8192, True),
        (64, 1024, 1024, True),
    ):
        q, k, v = make(rows, queries, keys)
        for _ in range(3):
            attend(q, k, v, causal)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            attend(q, k, v, causal)
        end.record()
        end.synchronize()
        say(shape=[rows, queries, keys], causal=causal, us=start.elapsed_time(end) * 50)


main()
