#!/usr/bin/env python3
"""What the router adds and what it carries, measured from outside it: JSON lines on stdout.

Three processes: a backend and a client that share a core, and `kvern-router` on a core of its own. Rows:
  latency      p50/p99 of the same request sent to the backend and through the router, and the difference at p50
  chunks       SSE chunks/s through the router: streams that a backend feeds one chunk at a time, each chunk a write
               `paced`: a fixed rate over all streams (is it carried?), `flat out`: as fast as it goes
               user and system are the router process's own CPU time; chunks_per_cpu_s what one core carries of it

  router.py [--streams 200] [--seconds 5] [--rate 20000] [--requests 2000] [--limits]

--limits: with API keys and limits that count every token (and are never reached).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVENT = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "m"}
CHOICE = {"index": 0, "text": " token", "logprobs": None}
CHUNK = b"data: " + json.dumps({**EVENT, "choices": [CHOICE]}).encode() + b"\n\n"
FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = json.dumps({**EVENT, "choices": [{"text": "x" * 800}]}).encode()
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
LAST = b"0\r\n\r\n"


class Backend(asyncio.Protocol):
    """Answers POST /stream?seconds=S&rate=R (0: flat out) with chunks and everything else at once."""

    def connection_made(self, transport):
        self.transport, self.data, self.may_write = transport, b"", asyncio.Event()
        self.may_write.set()
        transport.set_write_buffer_limits(high=8192)

    def data_received(self, data):
        self.data += data
        head, end, rest = self.data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if not end or len(rest) < int(length or 0):
            return
        self.data = b""
        if head.startswith(b"POST /stream"):
            seconds, rate = (float(part.split(b"=")[1]) for part in head.split()[1].split(b"?")[1].split(b"&"))
            self.task = asyncio.get_running_loop().create_task(self.stream(seconds, rate))
        else:
            self.transport.write(PLAIN)

    def pause_writing(self):
        self.may_write.clear()

    def resume_writing(self):
        self.may_write.set()

    async def stream(self, seconds, rate):
        self.transport.write(SSE_HEAD)
        start = time.monotonic()
        sent = 0
        while (now := time.monotonic()) - start < seconds:
            await self.may_write.wait()
            self.transport.write(FRAMED)
            sent += 1
            await asyncio.sleep(max(0.0, start + sent / rate - now) if rate else 0)
        self.transport.write(LAST)


class StreamClient(asyncio.Protocol):
    """Counts chunks of one stream, and the reads it took to get them."""

    def __init__(self, request, done):
        self.request, self.done, self.chunks, self.reads, self.tail = request, done, 0, 0, b""

    def connection_made(self, transport):
        transport.write(self.request)

    def data_received(self, data):
        self.last = time.monotonic()
        if not self.reads:
            self.first = self.last
        self.reads += 1
        self.chunks += (self.tail + data).count(b"\n\n\r\n")
        self.tail = data[-3:]
        if data.endswith(LAST) and not self.done.done():
            self.done.set_result(True)

    def connection_lost(self, exc):
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the stream was cut"))


def request(path, body=b""):
    fields = f"host: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    fields += "authorization: Bearer sk-bench-0\r\n"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n"
    return head.encode() + body


BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 200}], "stream": False}).encode()


async def streams(port, count, seconds, rate):
    loop = asyncio.get_running_loop()
    clients = []
    per_stream = rate / count
    for _ in range(count):
        client = StreamClient(request(f"/stream?seconds={seconds}&rate={per_stream}", BODY), loop.create_future())
        await loop.create_connection(lambda c=client: c, "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    wall = max(c.last for c in clients) - min(c.first for c in clients)
    return sum(c.chunks for c in clients), sum(c.reads for c in clients), wall


def latency(port, count):
    """Seconds of `count` requests in turn on one connection."""
    message = request("/v1/chat/completions", BODY)
    out = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            start = time.perf_counter()
            sock.sendall(message)
            got = b""
            while not got.endswith(ANSWER):
                got += sock.recv(65536)
            out.append(time.perf_counter() - start)
    return out


def pin(cores):
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, cores)


def cpu_seconds(pid):
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(fields[i]) / os.sysconf("SC_CLK_TCK") for i in (11, 12)]


def start_backend(cores):
    command = [sys.executable, __file__, "--backend"]
    ours = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: pin(cores))
    return ours, int(ours.stdout.readline())


def start_router(port, folder, cores, replicas, limits):
    file = Path(folder) / "replicas.json"
    entries = [{"name": f"r{i}", "url": f"http://127.0.0.1:{port}"} for i in range(replicas)]
    document = {"model": "m", "replicas": entries}
    flags = ["--listen", "127.0.0.1:0", "--replicas-file", str(file), "--no-access-log"]
    if limits:
        document["limits"] = {"requestsPerMinute": 10**9, "tokensPerMinute": 10**12}
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"tenant-{i}: sk-bench-{i}\n" for i in range(20)))
        flags += ["--api-keys-file", str(keys)]
    file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "kvern_router.main", *flags]
    router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: pin(cores))
    for line in router.stderr:
        if "listening on http://" in line:
            return router, int(line.split("http://")[1].split(",")[0].rsplit(":", 1)[1])
    raise SystemExit("the router did not start")


async def backend():
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def runner():
    with contextlib.suppress(ImportError):
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()


def row(**values):
    print(json.dumps(values), flush=True)


def measure_latency(direct, routed, count):
    for port in (direct, routed):
        latency(port, 200)
    samples = {direct: [], routed: []}
    for _ in range(5):  # in turn, so that a busy moment of the machine meets both
        for port in (direct, routed):
            samples[port] += latency(port, count // 5)
    p50 = {port: statistics.median(values) * 1e3 for port, values in samples.items()}
    p99 = {port: sorted(values)[int(0.99 * len(values))] * 1e3 for port, values in samples.items()}
    row(
        bench="latency",
        requests=count,
        direct_p50_ms=round(p50[direct], 3),
        routed_p50_ms=round(p50[routed], 3),
        direct_p99_ms=round(p99[direct], 3),
        routed_p99_ms=round(p99[routed], 3),
        added_p50_ms=round(p50[routed] - p50[direct], 3),
    )


def measure_chunks(name, router, port, args, rate):
    before = cpu_seconds(router.pid)
    with runner() as run:
        chunks, reads, wall = run.run(streams(port, args.streams, args.seconds, rate))
    user, system = (after - earlier for after, earlier in zip(cpu_seconds(router.pid), before, strict=True))
    cpu = user + system
    row(
        bench="chunks",
        load=name,
        streams=args.streams,
        chunks=chunks,
        wall_s=round(wall, 2),
        chunks_per_s=round(chunks / wall),
        asked_per_s=rate or None,
        client_reads=reads,
        router_user_s=round(user, 2),
        router_system_s=round(system, 2),
        chunks_per_cpu_s=round(chunks / cpu),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=20000.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=4, help="entries in the replicas file; all are the one backend")
    parser.add_argument("--limits", action="store_true", help="with API keys and limits")
    parser.add_argument("--backend", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        with runner() as run:
            run.run(backend())
        return
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = ({cores[0]}, {cores[-1]})
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            server, direct = start_backend(ours)
            processes.append(server)
            router, routed = start_router(direct, folder, theirs, args.replicas, args.limits)
            processes.append(router)
            pin(ours)
            measure_latency(direct, routed, args.requests)
            measure_chunks("paced", router, routed, args, args.rate)
            measure_chunks("flat out", router, routed, args, 0.0)
        finally:
            for process in processes:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
