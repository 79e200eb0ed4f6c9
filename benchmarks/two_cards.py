#!/usr/bin/env python3
"""Data parallelism on two GPUs, offline: sharegpt_1000 on one, then on both at once, each with its own 1,000 requests.

    PYTHONPATH=kernels:engine:operator python benchmarks/two_cards.py --out h200.jsonl

An engine is a process with a GPU of its own (offline, data parallelism is one LLM an engine). A JSON line: tokens a
second of each alone and of both, and `times`: how many times one card's throughput both have.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from h200 import PRECISIONS, write_model
from workloads import sharegpt_like

SETTINGS = {"max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.9, "load_format": "dummy"}


def engine(card, folder, precision, commands, answers):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(card)
    from kvern_engine import LLM
    from kvern_engine.bench import run_once

    requests = sharegpt_like(seed=1 + card)
    with LLM(folder, device="cuda", **SETTINGS, **PRECISIONS[precision]) as llm:
        run_once(llm, requests, 0)
        answers.put((card, sum(n for _, n in requests)))
        while (salt := commands.get()) is not None:
            answers.put((card, run_once(llm, requests, salt)))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--precision", default="bf16", choices=sorted(PRECISIONS))
    ap.add_argument("--runs", type=int, default=2)
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        commands, answers = [context.Queue() for _ in range(2)], context.Queue()
        given = [(card, write_model(folder), a.precision, commands[card], answers) for card in range(2)]
        processes = [context.Process(target=engine, args=each) for each in given]
        for process in processes:
            process.start()
        tokens = dict(answers.get(timeout=300) for _ in range(2))
        rate = {}  # output tokens a second
        salts = itertools.count(1)  # the first token of every prompt, so that no run finds another one's prefixes
        for _ in range(a.runs):
            for cards in ([0], [1], [0, 1]):
                salt = next(salts)
                for card in cards:
                    commands[card].put(salt)
                seconds = max(answers.get(timeout=300)[1] for _ in cards)
                rate.setdefault(tuple(cards), []).append(sum(tokens[card] for card in cards) / seconds)
        for queue in commands:
            queue.put(None)
        for process in processes:
            process.join(60)
    best = {cards: max(found) for cards, found in rate.items()}
    alone = (best[0,] + best[1,]) / 2
    line = {
        "engine": f"kvern-{a.precision}-dp2",
        "w": "sharegpt_1000 x 2",
        "out_tok_s": round(best[0, 1], 1),
        "out_tok_s_alone": [round(best[card,], 1) for card in range(2)],
        "times": round(best[0, 1] / alone, 3),
        "commit": os.environ.get("KVERN_COMMIT", ""),
    }
    print(json.dumps(line))
    with a.out.open("a") as file:
        print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
