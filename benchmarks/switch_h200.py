#!/usr/bin/env python3
"""Two GPUs change from two engines to one and back while 64 streams run, and what the clients saw of it.

    PYTHONPATH=kernels:engine:operator python benchmarks/switch_h200.py --out benchmarks/results/h200_switch.jsonl

Llama-3-8B shapes with random weights behind the real server; half of the streams have 4,000 tokens of context. A JSON
line for each switch: `from`, `to`, `streams`, `failed`, the pause that streams saw (`pause_p50_s`, `pause_p99_s`: the
longest gap between two events of a stream from the call on), `recovered_s` (from the call until the rate of tokens is
again, for half a second, 95 % of what it is at the new layout in the end), the phases as the pod measured them. A last
line says whether greedy texts were those of a run without a switch; where not, the gap between the two likeliest tokens
at the first difference.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Thread

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from h200 import write_model
from http_h200 import write_tokenizer
from up_server import UpServer

CHARACTERS = 5  # of each token's text: a space and four letters
STREAMS, LONG = 64, 4000
PROCESSES = 8
AFTER = 5.5  # seconds that are looked at from a call on


def request(url, path, body=None, token=None, timeout=60):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def read_stream(url, index, tokens, logprobs, salt):
    """One stream: events as (time, tokens), the text, top two logprobs by token, and what went wrong."""
    length = LONG if index % 2 else 100
    prompt = [1000 + salt * 97 + index, *((index * 7919 + n * 31 + salt) % 120000 + 300 for n in range(length - 1))]
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body["seed"] = index  # what the simulated device goes by
    if logprobs:
        body["logprobs"] = 2
    events, text, gaps, error = [], [], [], None
    try:
        post = urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(post, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = json.dumps(event["error"])
                    break
                for choice in event["choices"]:
                    events.append((time.monotonic(), len(choice["text"]) // CHARACTERS))
                    text.append(choice["text"])
                    for found in (choice.get("logprobs") or {}).get("top_logprobs") or ():
                        best = sorted(found.values(), reverse=True)
                        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    except OSError as failed:
        error = repr(failed)
    done = sum(n for _, n in events)
    if error is None and done != tokens:
        error = f"ended after {done} of {tokens} tokens"
    return index, events, "".join(text), gaps, error


def _client(url, indices, tokens, logprobs, salt, pipe):
    found = []
    threads = [
        Thread(target=lambda i=i: found.append(read_stream(url, i, tokens, logprobs, salt)), daemon=True)
        for i in indices
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(found)


class Streams:
    """STREAMS streams in a few processes, since one could not read so many events."""

    def __init__(self, url, tokens, logprobs=False, salt=0):
        context, self._pipes = multiprocessing.get_context("fork"), []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            given = (url, range(number, STREAMS, PROCESSES), tokens, logprobs, salt, theirs)
            context.Process(target=_client, args=given, daemon=True).start()
            self._pipes.append(ours)

    def finish(self):
        """{index: (events, text, gaps, error)}."""
        return {found[0]: found[1:] for pipe in self._pipes for found in pipe.recv()}


class Server:
    """`kvern serve` on two GPUs, as two engines of one."""

    def __init__(self, folder, device, flags):
        token = Path(folder) / "token"
        token.write_text("secret")
        token.chmod(0o600)
        command = [sys.executable, "-m", "kvern_engine.cli", "serve", str(folder), "--device", device, "-dp", "2"]
        command += [
            "--port",
            "8123",
            "--admin-port",
            "8124",
            "--admin-token-file",
            str(token),
            "--load-format",
            "dummy",
        ]
        command += ["--served-model-name", "m", "--max-model-len", "8192", "--max-num-seqs", "256"]
        command += ["--gpu-memory-utilization", "0.9", "--api-server-count", "4", *flags]
        environ = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "KVERN_GPU_LAYOUT_SWITCH": "1"}
        self.url, self.admin, self.generation = "http://127.0.0.1:8123", "http://127.0.0.1:8124", 0
        self.process = subprocess.Popen(command, env={**os.environ, **environ})
        began = time.monotonic()
        while self.process.poll() is None:
            try:
                if request(self.url, "/ready", timeout=2)[0] == 200:
                    self.ready_after = time.monotonic() - began
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"the server ended with status {self.process.returncode}")

    def layout(self):
        return request(self.admin, "/admin/layout", token="secret")[1]

    def switch(self, tensor):
        """Ask and wait; the moment of the call and the record."""
        self.generation += 1
        called = time.monotonic()
        status, body = request(self.admin, "/admin/layout", {"tensor": tensor, "generation": self.generation}, "secret")
        if status != 202:
            raise SystemExit(f"POST /admin/layout: {status} {body}")
        while (found := self.layout())["phase"] != "Stable":
            time.sleep(0.05)
        return called, found["last"][0]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def rate(found, begin, end):
    """Tokens a second of all streams in a span of time."""
    return sum(n for events, *_ in found.values() for at, n in events if begin <= at < end) / (end - begin)


def seen(found, called, record, until):
    """What the clients saw of one switch; `until` is when the next one was asked for."""
    pauses, failed, alive = [], 0, 0
    for events, _, _, error in found.values():
        times = [at for at, _ in events]
        if not times or times[0] > called or (times[-1] < called and error is None):
            continue
        alive += 1
        failed += error is not None
        spans = zip(times, [*times[1:], time.monotonic()] if error is not None else times[1:], strict=False)
        pauses.append(max((b - a for a, b in spans if b > called and a < called + AFTER), default=0.0))
    pauses.sort()
    end = min(until, called + AFTER)
    after = rate(found, end - 2.0, end)
    steps = [called + n * 0.1 for n in range(int((end - called - 0.5) * 10))]
    back = next(
        (at for at in steps if at > called + record["pauseSeconds"] and rate(found, at, at + 0.5) >= 0.95 * after), None
    )
    return {
        "from": record["from"],
        "to": record["to"],
        "streams": alive,
        "failed": failed,
        "pause_p50_s": round(statistics.median(pauses), 3) if pauses else None,
        "pause_p99_s": round(pauses[int(0.99 * (len(pauses) - 1))], 3) if pauses else None,
        "recovered_s": round(back - called, 2) if back is not None else None,
        "tok_s_before": round(rate(found, called - 2.0, called)),
        "tok_s_after": round(after),
        "outcome": record["outcome"],
        "reason": record["reason"],
        "pod_pause_s": record["pauseSeconds"],
        "kept": record["kept"],
        "recomputed": record["recomputed"],
        "phases": record["seconds"],
    }


def under_load(server, rounds, tokens, write):
    """Switches while streams run; `rounds` sets of streams with three switches each."""
    for number in range(rounds):
        running, calls = Streams(server.url, tokens, salt=number + 1), []
        # Prompts are computed; the first ones meet graphs that are still to be captured.
        time.sleep(4.5 if number else 8.0)
        for _ in range(3):
            calls.append(server.switch(1 if server.layout()["current"] == 2 else 2))
            time.sleep(max(0.0, calls[-1][0] + AFTER - time.monotonic()))
        ends = [called for called, _ in calls[1:]] + [time.monotonic()]
        found = running.finish()
        for (called, record), until in zip(calls, ends, strict=True):
            write(seen(found, called, record, until))


def differences(alone, other):
    """(streams whose text is that of `alone`, gap between the two likeliest tokens at the first difference of the
    others)."""
    equal, gaps = 0, []
    for index, (_, text, _, error) in other.items():
        expected, own = alone[index][1], alone[index][2]
        if error is None and text == expected:
            equal += 1
        elif own:
            place = next((n for n, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), 0)
            gaps.append(round(own[min(place // CHARACTERS, len(own) - 1)], 4))
    return equal, sorted(gaps)


def same_text(server, tokens):
    """Greedy streams through switches against the same without any, and those against each other: random weights have
    many tokens that are nearly as likely as the first, and numbers in bfloat16 depend on the batch."""
    alone = Streams(server.url, tokens, logprobs=True, salt=50).finish()
    again = Streams(server.url, tokens, logprobs=True, salt=50).finish()
    running = Streams(server.url, tokens, logprobs=True, salt=50)
    time.sleep(1.0)  # prefixes are known: it decodes at once
    outcomes = [server.switch(1 if server.layout()["current"] == 2 else 2)[1]["outcome"] for _ in range(2)]
    through = running.finish()
    without, gaps_without = differences(alone, again)
    equal, gaps = differences(alone, through)
    return {
        "streams": STREAMS,
        "failed": sum(found[3] is not None for found in [*alone.values(), *through.values()]),
        "errors": [found[3] for found in through.values() if found[3]][:3],
        "switches": outcomes,
        "texts_equal": equal,
        "gap_at_first_difference": gaps,
        "texts_equal_without_switches": without,
        "gap_without_switches": gaps_without,
    }


def killed(server, phase):
    """A rank of one of two engines is killed in a phase of a switch: what streams, probes and pod say."""
    if server.layout()["current"] == 2:
        server.switch(1)
    running = Streams(server.url, 1500, salt=90)
    time.sleep(4.0)
    family = psutil.Process(server.process.pid).children(recursive=True)
    victim = next(p for p in family if p.cmdline()[-1:] == ["worker-1"])
    server.generation += 1
    size = 1 if server.layout()["current"] == 2 else 2
    request(server.admin, "/admin/layout", {"tensor": size, "generation": server.generation}, "secret")
    deadline = time.monotonic() + 30
    while (now := server.layout()["phase"]) != phase and time.monotonic() < deadline:
        time.sleep(0.002)
    victim.kill()
    began = time.monotonic()
    while server.layout()["phase"] != "Stable" and time.monotonic() < began + 120:
        time.sleep(0.05)
    took = time.monotonic() - began
    found = running.finish()
    record = server.layout()["last"][0]
    errors = [error for *_, error in found.values() if error]
    return {
        "killed": "worker 1",
        "phase": now,
        "over_after_s": round(took, 2),
        "outcome": record["outcome"],
        "reason": record["reason"],
        "streams": STREAMS,
        "failed": len(errors),
        "error": errors[0] if errors else None,
        "health": request(server.url, "/health")[0],
        "new_request": request(server.url, "/v1/completions", {"model": "m", "prompt": [5, 6], "max_tokens": 4})[0],
    }


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--rounds", type=int, default=2, help="sets of streams, three switches each")
    ap.add_argument("--tokens", type=int, default=3900, help="of each stream")
    ap.add_argument("--text-tokens", type=int, default=400, help="of each stream whose text is compared; 0: none")
    ap.add_argument("--up", action="store_true", help="behind kvern up: the manifest changes, and streams see a router")
    ap.add_argument("--kill", help="in the end, kill a rank in this phase of a switch, such as Resharding")
    ap.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim tries the benchmark itself")
    ap.add_argument(
        "--flags", nargs="*", default=[], help="more flags of kvern serve, without dashes: NAME or NAME=VALUE"
    )
    a = ap.parse_args()
    flags = [word for flag in a.flags for word in f"--{flag}".split("=", 1)]
    commit = os.environ.get("KVERN_COMMIT", "")
    commit = (
        commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as folder, a.out.open("a") as out:

        def write(line):
            engine = ("kvern-bf16" if a.device == "cuda" else "sim") + "-up" * a.up
            line = {"engine": engine, **({"flags": a.flags} if a.flags else {}), **line, "commit": commit}
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(json.dumps(line), flush=True)

        model = Path(folder) / "model"
        model.mkdir()
        write_model(model)
        write_tokenizer(model)
        server = UpServer(folder, a.device) if a.up else Server(model, a.device, flags)
        try:
            print(f"ready after {server.ready_after:.1f} s", flush=True)
            write({"idle": True, **seen({0: ([], "", [], None)}, *server.switch(2), time.monotonic())})
            write({"idle": True, **seen({0: ([], "", [], None)}, *server.switch(1), time.monotonic())})
            if a.text_tokens:
                write(same_text(server, a.text_tokens))
            under_load(server, a.rounds, a.tokens, write)
            write({"layout": server.layout()["feasible"]})
            if a.kill:
                write(killed(server, a.kill))
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
