#!/usr/bin/env python3
"""Kvern's server under the HTTP client of the baseline, on one GPU: JSON lines with throughput, latencies and the CPU
time of each process.

    PYTHONPATH=kernels:engine:operator python benchmarks/http_h200.py --out results/h200_http.jsonl

Llama-3-8B shapes with random weights and a made-up tokenizer in which every id has a text, so that each token is an
event of its own. The settings are those of `h200.py`. Workloads are WORKLOAD[:REQUESTS[:RATE]].
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from h200 import PRECISIONS, write_model
from workloads import LLAMA3_8B

HERE = Path(__file__).parent

LETTERS = "abcdefghijklmnopqrst"


def write_tokenizer(folder, size=LLAMA3_8B["vocab_size"]):
    """A byte-level tokenizer.json of `size` words, each a space and four letters or more."""
    import tokenizers

    words = (
        "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(4)) for number in range(size)
    )
    vocabulary = {f"Ġ{word}": number for number, word in enumerate(words)}
    assert len(vocabulary) == size
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="Ġaaaa"))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(Path(folder) / "tokenizer.json"))


def start(folder, port, engine_args):
    """The server's process and the seconds until it answers /ready."""
    flags = ["--port", str(port), "--load-format", "dummy", "--served-model-name", "m", "--max-model-len", "8192"]
    flags += ["--max-num-seqs", "256", "--gpu-memory-utilization", "0.9", "--max-waiting-requests", "2000"]
    for name, value in engine_args.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    began = time.perf_counter()
    server = subprocess.Popen([sys.executable, "-m", "kvern_engine.cli", "serve", folder, *flags])
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return server, time.perf_counter() - began
        except OSError:
            time.sleep(0.1)


def cpu_seconds(server):
    """CPU seconds of each process of the server so far, by the first words of its name."""
    found = {}
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        try:
            times = process.cpu_times()
            found[f"{process.pid} {' '.join(process.cmdline())[-40:]}"] = times.user + times.system
        except psutil.Error:
            continue
    return found


def client_seconds():
    """CPU seconds of the clients that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("workloads", nargs="*", default=["decode_32", "sharegpt_1000", "sharegpt_1000:600:32"])
    ap.add_argument("--precision", default="bf16", choices=sorted(PRECISIONS))
    ap.add_argument("--engine-args", type=json.loads, default={}, help='JSON, for example {"api_server_count": 4}')
    ap.add_argument("--port", type=int, default=8123)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--tag", default="")
    a = ap.parse_args()
    engine_args = {"api_server_count": 4, **PRECISIONS[a.precision], **a.engine_args}
    tag = f"kvern-http-{a.precision}{a.tag}"
    with tempfile.TemporaryDirectory() as folder, a.out.open("a") as out:
        write_model(folder)
        write_tokenizer(folder)
        server, ready = start(folder, a.port, engine_args)

        def write(line):
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(json.dumps(line), flush=True)

        try:
            write({"tag": tag, "ready_after_s": round(ready, 2), "settings": engine_args})
            for number, workload in enumerate(["decode_32", *a.workloads]):
                name, count, rate = [*workload.split(":"), None, None][:3]
                command = [sys.executable, str(HERE / "http_client.py"), "--url", f"http://127.0.0.1:{a.port}"]
                command += ["--workload", name, "--tag", tag, "--salt", str(number + 1)]
                command += ["--n", count] if count else []
                command += ["--rate", rate] if rate else []
                before, began = cpu_seconds(server) | {"client": client_seconds()}, time.perf_counter()
                run = subprocess.run(command, capture_output=True, text=True)
                wall = time.perf_counter() - began
                if run.returncode:
                    print(run.stderr[-2000:], file=sys.stderr)
                    continue
                after = cpu_seconds(server) | {"client": client_seconds()}
                used = {k: round((v - before.get(k, 0)) / wall, 2) for k, v in after.items()}
                busy = {k: v for k, v in used.items() if v >= 0.02}
                if number:  # the first one only warms up
                    write({**json.loads(run.stdout), "cpus": busy, "commit": os.environ.get("KVERN_COMMIT")})
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
