#!/usr/bin/env python3
"""Latency of healthy requests while hostile clients are at the same server, against the same without: one JSON line.

Starts `kvern serve` on the simulated device (or, with --router, a router in front of it), sends healthy streams at a
fixed rate from one process and, in every second round, has 100 hostile clients at it from another: idle, slow to send
or to read, half-closed or gone, pipelining, with huge heads, bad framing, bodies of megabytes that are no JSON or too
much of it, requests beyond every limit, wrong keys. Each does its worst again and again, with a pause in between.

The clients run elsewhere in life; what they cost must not count as the server's. So the server (with its core, and the
router) has one half of the CPUs and the clients the other, in rounds with and without hostile clients alike, and
hostile clients run in the idle class of the scheduler: the healthy ones' clock never waits for them. `--unpinned`
leaves all of them on all CPUs, as the machine schedules them.

  hostile.py [--clients 100] [--seconds 20] [--rounds 4] [--rate 12] [--router] [--unpinned] [--only KIND ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "tests/engine/models_data/tiny-kjv"
KEY = "sk-healthy"
TEXT = "In the beginning God created the heaven and the earth. "
Address = tuple[str, int]


def request(body: Any, *headers: str, path: str = "/v1/completions", key: str = KEY) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", f"Authorization: Bearer {key}")
    return "\r\n".join((*lines, *headers, "", "")).encode() + content


def halves() -> tuple[set[int], set[int]]:
    """The CPUs of the server and those of the clients; all of them to both where there is one."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    return (set(cpus[:half]), set(cpus[half:])) if half else (set(cpus), set(cpus))


# ---------------------------------------------------------------- hostile clients


class Client:
    """One connection that does harm."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes, pause: float) -> None:
        for i in range(len(data)):
            await self.send(data[i : i + 1])
            await asyncio.sleep(pause)

    async def rest(self, seconds: float = 10.0) -> None:
        """Until the server ends it, or patience does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await self.reader.read(65536):
                    pass

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.close()


LONG = {"prompt": [9] * 50, "max_tokens": 1500, "ignore_eos": True}
STREAM = {**LONG, "stream": True}
MEGABYTES = 16 << 20
# What each sends; the pause after it in seconds.
RAW: dict[str, tuple[bytes, float]] = {
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200, 1),
    "two framings": (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
        1,
    ),
    "bad chunks": (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", 1),
    "a head of a megabyte": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (1 << 20) + b"\r\n\r\n", 1),
    "a thousand headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000 + b"\r\n", 1),
    "thirty at once": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 30, 1),
    "no UTF-8": (request(b'{"prompt": "\xff\xfe"}', "Connection: close"), 1),
    "no number": (request(b'{"prompt": "x", "temperature": NaN}', "Connection: close"), 1),
    "deep JSON": (request(b"[" * 200_000, "Connection: close"), 1),
    "a wrong type": (request({"prompt": "x"}, "Content-Type: text/plain", "Connection: close"), 1),
    "a wrong key": (request({"prompt": "x"}, "Connection: close", key="sk-guess"), 1),
    "beyond the limits": (
        request({"prompt": ["a"] * 5000, "n": 9999, "stop": ["x"] * 99999, "logprobs": 99}, "Connection: close"),
        1,
    ),
    "16 MB of objects": (request(b'{"prompt":[' + b"{}," * (MEGABYTES // 3 - 10) + b"1]}", "Connection: close"), 5),
    "16 MB of numbers": (request(b'{"prompt":[' + b"1," * (MEGABYTES // 2 - 10) + b"1]}", "Connection: close"), 5),
    "16 MB of text": (request(b'{"prompt":"' + b"a" * (MEGABYTES - 20) + b'"}', "Connection: close"), 5),
    "20 MB": (request(b"x" * (20 << 20), "Connection: close"), 5),
    "a megabyte to tokenize": (
        request({"prompt": TEXT * (1_000_000 // len(TEXT))}, "Connection: close", path="/tokenize"),
        10,
    ),
}


async def _idle(client: Client) -> None:
    await client.rest(15)


async def _slow_head(client: Client) -> None:
    await client.drip(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20, 0.2)


async def _slow_body(client: Client) -> None:
    await client.drip(request(LONG)[:-1], 0.1)


async def _slow_reader(client: Client) -> None:
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(request({**STREAM, "n": 4}))
    await asyncio.sleep(15)


async def _half_closed(client: Client) -> None:
    await client.send(request({**STREAM, "max_tokens": 100}))
    client.writer.write_eof()
    await client.rest()


async def _gone(client: Client) -> None:
    await client.send(request(LONG))
    await asyncio.sleep(0.2)


async def _reset(client: Client) -> None:
    await client.send(request(STREAM))
    await client.reader.readline()
    client.reset()


async def _half_closed_and_gone(client: Client) -> None:
    await client.send(request(LONG))
    client.writer.write_eof()
    await asyncio.sleep(0.2)


BEHAVIOURS: dict[str, tuple[Callable[[Client], Awaitable[None]], float]] = {
    "idle": (_idle, 0.5),
    "a slow head": (_slow_head, 0.5),
    "a slow body": (_slow_body, 0.5),
    "a slow reader": (_slow_reader, 1),
    "half-closed": (_half_closed, 1),
    "gone": (_gone, 1),
    "reset": (_reset, 1),
    "half-closed and gone": (_half_closed_and_gone, 1),
}
KINDS = [*BEHAVIOURS, *RAW]


async def _once(kind: str, address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    client = Client(reader, writer)
    try:
        if kind in BEHAVIOURS:
            await BEHAVIOURS[kind][0](client)
        else:
            await client.send(RAW[kind][0])
            client.writer.write_eof()
            await client.rest()
    finally:
        writer.close()


async def _hostile(kind: str, address: Address, rng: random.Random, done: Counter[str]) -> None:
    pause = (BEHAVIOURS.get(kind) or RAW[kind])[1]
    await asyncio.sleep(rng.random() * pause)
    while True:
        with contextlib.suppress(OSError):  # it was cut off: what it deserves
            await _once(kind, address)
        done[kind] += 1
        await asyncio.sleep(pause * (0.5 + rng.random()))


def hostile_process(address: Address, clients: int, kinds: list[str], unpinned: bool, commands: Any) -> None:
    """A process of hostile clients: `start` and `stop` come through the pipe, counts go back."""

    async def phase(done: Counter[str]) -> None:
        rng = random.Random(1)
        tasks = [asyncio.create_task(_hostile(kinds[i % len(kinds)], address, rng, done)) for i in range(clients)]
        await asyncio.to_thread(commands.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not unpinned:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while commands.recv() == "start":
        done: Counter[str] = Counter()
        asyncio.run(phase(done))
        commands.send(dict(done))


# ---------------------------------------------------------------- healthy clients


async def _healthy(address: Address, out: dict[str, list[float]], errors: list[str]) -> None:
    began = last = time.perf_counter()
    gaps: list[float] = []
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            body = {"prompt": TEXT * 4, "max_tokens": 64, "ignore_eos": True, "stream": True}
            writer.write(request(body, "Connection: close"))
            status = (await reader.readline()).split()[1]
            if status != b"200":
                raise OSError(f"status {status.decode()}")
            ended = False
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                gaps.append(now - last)
                last, ended = now, line.startswith(b"data: [DONE]")
            writer.close()
            if not ended:
                raise OSError("the stream was cut")
    except (OSError, TimeoutError) as error:
        errors.append(str(error) or type(error).__name__)
        return
    out["ttft"].append(gaps[0])
    out["itl"] += gaps[1:]
    out["e2e"].append(last - began)


async def healthy(address: Address, seconds: float, rate: float, seed: int) -> tuple[dict[str, list[float]], list[str]]:
    """Streams of 64 tokens, Poisson arrivals."""
    rng = random.Random(seed)
    out: dict[str, list[float]] = {"ttft": [], "itl": [], "e2e": []}
    errors: list[str] = []
    tasks = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        tasks.append(asyncio.create_task(_healthy(address, out, errors)))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks)
    return out, errors


def quantiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(values[min(len(values) - 1, int(q * len(values)))] * 1e3, 2) for name, q in at.items()}


# ---------------------------------------------------------------- the server


class Server:
    """`kvern serve`, and a router before it where one is wanted."""

    def __init__(self, folder: str, router: bool) -> None:
        here = Path(sys.executable).parent
        environ = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        flags = ["--device", "sim", "--port", "0", "--api-key", KEY, "--slow-client-seconds", "10"]
        command = [str(here / "kvern"), "serve", str(MODEL), *flags]
        self._processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)]
        self.engine = self.address = self._address(self._processes[0], r"msg=ready url=http://(\S+)")
        if router:
            replicas = Path(folder, "replicas.json")
            url = "http://{}:{}".format(*self.engine)
            entry = {"name": "r0", "url": url, "state": "ready"}
            replicas.write_text(json.dumps({"model": "tiny-kjv", "replicas": [entry]}))
            command = [str(here / "kvern-router"), "--listen", "127.0.0.1:0", "--replicas-file", str(replicas)]
            command += ["--no-access-log", "--idle-timeout-seconds", "10"]
            self._processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            self.address = self._address(self._processes[1], r"listening on http://([^,\s]+)")

    @staticmethod
    def _address(process: subprocess.Popen[str], pattern: str) -> Address:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(pattern, line):
                host, _, port = found[1].rpartition(":")
                # Read on: a full pipe would stop the process that writes to it.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return host, int(port)
        raise SystemExit("the server did not start")

    def memory(self) -> int:
        """Resident MiB of the engine's processes."""
        import psutil

        parent = psutil.Process(self._processes[0].pid)
        return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)]) >> 20

    def in_flight(self) -> float:
        import urllib.request

        text = urllib.request.urlopen("http://{}:{}/metrics".format(*self.engine)).read().decode()
        return sum(float(x) for x in re.findall(r"^kvern:requests_in_flight\S* (\S+)$", text, re.MULTILINE))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="of one round")
    parser.add_argument("--rounds", type=int, default=4, help="half of them with hostile clients")
    parser.add_argument("--rate", type=float, default=12, help="healthy requests a second")
    parser.add_argument("--router", action="store_true", help="all of it through a router")
    parser.add_argument("--unpinned", action="store_true", help="server and clients on the same CPUs")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="of these kinds only")
    a = parser.parse_args()
    samples: dict[bool, dict[str, list[float]]] = {h: {"ttft": [], "itl": [], "e2e": []} for h in (False, True)}
    failed: dict[bool, list[str]] = {False: [], True: []}
    done: Counter[str] = Counter()
    servers, clients = halves()
    with tempfile.TemporaryDirectory() as folder:
        if not a.unpinned:
            os.sched_setaffinity(0, servers)  # the server's processes inherit it
        server = Server(folder, a.router)
        if not a.unpinned:
            os.sched_setaffinity(0, clients)
        ours, theirs = multiprocessing.Pipe()
        attackers = multiprocessing.Process(
            target=hostile_process, args=(server.address, a.clients, a.only, a.unpinned, theirs), daemon=True
        )
        attackers.start()
        try:
            asyncio.run(healthy(server.address, 3, a.rate, 0))  # warm
            before = server.memory()
            for number in range(a.rounds):
                hostile = number % 2 == 1
                if hostile:
                    ours.send("start")
                    time.sleep(2)
                out, errors = asyncio.run(healthy(server.address, a.seconds, a.rate, number + 1))
                for name, values in out.items():
                    samples[hostile][name] += values
                failed[hostile] += errors
                if hostile:
                    ours.send("stop")
                    done.update(ours.recv())
                    time.sleep(12)  # the last slow readers are cut off
            left, after = server.in_flight(), server.memory()
        finally:
            ours.send("end")
            attackers.join(10)
            server.stop()
    calm, beside = ({n: quantiles(v) for n, v in samples[h].items()} for h in (False, True))
    print(
        json.dumps(
            {
                "bench": "hostile",
                "through": "router" if a.router else "engine",
                "hostile_clients": a.clients,
                "cpus": None if a.unpinned else {"server": sorted(servers), "clients": sorted(clients)},
                "requests": {"without": len(samples[False]["e2e"]), "with": len(samples[True]["e2e"])},
                "errors": {"without": len(failed[False]), "with": len(failed[True])},
                "first_error": next(iter(failed[True] + failed[False]), None),
                "without_ms": calm,
                "with_ms": beside,
                "ratio_p99": {n: round(beside[n]["p99"] / calm[n]["p99"], 2) for n in calm},
                "ratio_p50": {n: round(beside[n]["p50"] / calm[n]["p50"], 2) for n in calm},
                "mean_itl_ms": [round(statistics.fmean(samples[h]["itl"]) * 1e3, 2) for h in (False, True)],
                "hostile_acts": dict(done),
                "memory_mib": [before, after],
                "left_in_flight": left,
            }
        )
    )


if __name__ == "__main__":
    main()
