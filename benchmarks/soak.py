"""A soak at the edge of the pool: more requests than the KV cache holds, for as long as you like, and nothing may be
left of them: blocks, memory, descriptors, threads, processes and tasks of the event loop are as at the start.

    python benchmarks/soak.py [--device sim|cpu] [--seconds 1800] [--clients 24] [-- FLAGS of kvern serve]

Clients come and go: short and long prompts, with shared beginnings or none, answers that are streamed, read to the end,
given up in the middle or never read, several choices, stop strings, logprobs of prompts, requests that can never run or
end within their body. One in eight is a canary, whose answer is known: it must always be the same.

Prints one JSON line. What the numbers are compared with is taken at rest after `--warm-up` seconds of the same load, by
when everything that is loaded or made at first use is there, and for memory at half time. The exit status is 1 where
something is left or an answer was wrong. With --device sim it takes about a fifth of a processor.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from pods import Pod, wait_for

# 1,024 tokens in blocks of 16, where sequences may have 512: two long ones fill the pool.
LONGEST, VOCABULARY = 512, 2048
FLAGS = ["--num-gpu-blocks-override", "64", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
FLAGS += ["--max-model-len", str(LONGEST)]
OF_DEVICE = {"sim": ["--sim-speed", "0.25"], "cpu": []}
CANARY = {"prompt": [9, 8, 7, 6, 5, 4, 3, 2] * 3, "max_tokens": 24, "temperature": 0, "seed": 1, "ignore_eos": True}
RSS_SLACK = 24 << 20  # bytes a process may have more of: what an allocator keeps differs from time to time


@dataclass
class Counts:
    """What happened to the requests: by kind, and what should not have happened, in words."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0


@dataclass
class State:
    """A pod at rest: per process by name, and of the engine."""

    rss: dict[str, int]
    fds: dict[str, int]
    threads: dict[str, int]
    tasks: int
    blocks_held: int
    busy: dict[str, float]


class Load:
    """`clients` clients that each send one request after another until `stop` is set."""

    def __init__(self, url: str, seed: int, canary: str | None = None) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._random = random.Random(seed)
        self._canary = canary
        self.counts = Counts()
        self._prefixes = [self._ids(200) for _ in range(4)]
        self._kinds: list[tuple[int, str, Callable[[], Awaitable[None]]]] = [
            (8, "answered", self._answered),
            (5, "streamed", self._streamed),
            (4, "given up in a stream", self._given_up),
            (3, "given up before an answer", self._not_awaited),
            (3, "several choices", self._choices),
            (2, "logprobs", self._logprobs),
            (2, "stop strings", self._stop_strings),
            (1, "refused", self._refused),
            (1, "cut within the body", self._half_sent),
            (4, "canary", self._canaries),
        ]

    async def run(self, clients: int, seconds: float) -> Counts:
        stop = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, stop) for number in range(clients)))
        return self.counts

    async def _client(self, number: int, stop: float) -> None:
        weights, names, sends = zip(*self._kinds, strict=True)
        chosen = number % len(sends)  # so that every kind comes, however short a run is
        await asyncio.sleep(self._random.random())
        while time.monotonic() < stop:
            self.counts.kinds[names[chosen]] += 1
            try:
                await sends[chosen]()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self._wrong(f"{names[chosen]}: {error!r}")
                await asyncio.sleep(0.2)
            (chosen,) = self._random.choices(range(len(sends)), weights)

    # ------------------------------------------------------------ requests

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]

    def _body(self, **more: Any) -> dict[str, Any]:
        """A random request that fits: two of three begin like others, and few are long."""
        rest = self._ids(1 + int(self._random.paretovariate(1.1) * 4) % 150)
        prompt = self._random.choice(self._prefixes)[: self._random.randrange(16, 200)] + rest
        if self._random.random() < 0.33:
            prompt = rest
        most = min(1 + int(self._random.expovariate(1 / 50)), LONGEST - len(prompt))
        return {"prompt": prompt, "max_tokens": most, "ignore_eos": True, "temperature": 0.8, **more}

    async def _answered(self) -> None:
        body = self._body()
        answer = await self._ask(body)
        self.counts.tokens += answer["usage"]["completion_tokens"]
        if answer["usage"]["completion_tokens"] != body["max_tokens"]:
            self._wrong(f"{answer['usage']} where {body['max_tokens']} tokens were asked for")

    async def _streamed(self) -> None:
        text = (await self._exchange(self._body(stream=True))).decode()
        if "data: [DONE]" not in text or '"error"' in text:
            self._wrong(f"a stream ended with {text[-200:]!r}")

    async def _given_up(self) -> None:
        await self._cut_after(self._body(stream=True, max_tokens=200), events=self._random.randrange(1, 12))

    async def _not_awaited(self) -> None:
        await self._cut_after(self._body(max_tokens=200), seconds=self._random.random())

    async def _choices(self) -> None:
        n = self._random.randrange(2, 5)
        if self._random.random() < 0.3:
            await self._cut_after(self._body(n=n, stream=True, max_tokens=100), events=n)
            return
        body = self._body(n=n)
        answer = await self._ask(body | {"max_tokens": min(body["max_tokens"], 60)})
        if len(answer["choices"]) != n:
            self._wrong(f"{len(answer['choices'])} choices where {n} were asked for")

    async def _logprobs(self) -> None:
        body = self._body(logprobs=2, prompt_logprobs=1, echo=self._random.random() < 0.5)
        answer = await self._ask(body | {"max_tokens": min(body["max_tokens"], 20)})
        found = answer["choices"][0]["prompt_logprobs"]
        if self._canary is not None and len(found) != len(body["prompt"]):
            self._wrong(f"prompt_logprobs of {len(found)} tokens where the prompt has {len(body['prompt'])}")

    async def _stop_strings(self) -> None:
        await self._ask(self._body(stop=["e", "the "], include_stop_str_in_output=True))

    async def _refused(self) -> None:
        status, _ = _parse(await self._exchange({"prompt": self._ids(600), "max_tokens": 5}))
        if status != 400:
            self._wrong(f"{status} for a prompt that is too long")

    async def _half_sent(self) -> None:
        raw = _request({"prompt": self._ids(50)})
        _, writer = await asyncio.open_connection(*self._address)
        writer.write(raw[: len(raw) // 2])
        await writer.drain()
        await asyncio.sleep(self._random.random() * 0.2)
        writer.transport.abort()

    async def _canaries(self) -> None:
        answer = await self._ask(CANARY)
        if self._canary is not None and answer["choices"][0]["text"] != self._canary:
            self._wrong(f"the canary said {answer['choices'][0]['text']!r}")

    # ------------------------------------------------------------ connections

    def _wrong(self, what: str) -> None:
        if len(self.counts.wrong) < 100:
            self.counts.wrong.append(what)

    async def _ask(self, body: dict[str, Any]) -> Any:
        status, content = _parse(await self._exchange(body))
        if status != 200:
            raise ValueError(f"{status} {content[:200]!r}")
        return json.loads(content)

    async def _exchange(self, body: dict[str, Any]) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(_request(body))
            async with asyncio.timeout(600):
                return await reader.read(-1)
        finally:
            writer.close()

    async def _cut_after(self, body: dict[str, Any], *, events: int = 0, seconds: float = 0.0) -> None:
        """Leave with a reset after so many events of the stream, or so long."""
        body["max_tokens"] = min(body["max_tokens"], LONGEST - len(body["prompt"]))
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(_request(body))
        await writer.drain()
        seen = b""
        while events and seen.count(b"data: ") < events and (data := await reader.read(65536)):
            seen += data
        await asyncio.sleep(seconds)
        writer.transport.abort()


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    return (head + "Content-Type: application/json\r\n\r\n").encode() + content


def _parse(raw: bytes) -> tuple[int, bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        raise ValueError("the connection was closed without an answer")
    return int(head.split()[1]), body


def metrics_of(pod: Pod) -> dict[str, float]:
    """The sum over all series of each name, and of blocks by state."""
    _, text = pod.get("/metrics")
    found: dict[str, float] = {}
    for line in str(text).splitlines():
        if match := re.fullmatch(r"([\w:]+)(\{.*\})? (\S+)", line):
            state = re.search(r'state="(\w+)"', match[2] or "")
            name = match[1] + (f"/{state[1]}" if state else "")
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def _busy(seen: dict[str, float]) -> dict[str, float]:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvern:requests_in_flight")
    held = seen["kvern:blocks/total"] - seen["kvern:blocks/free"]
    return {name: value for name, value in [*((n, seen[n]) for n in names), ("blocks held", held)] if value}


def state_of(pod: Pod, seconds: float = 30.0) -> State:
    """The pod at rest; what is still busy after `seconds` is in `busy`."""
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not _busy(metrics_of(pod)), seconds)
    time.sleep(0.5)  # connections that are being closed
    seen = metrics_of(pod)
    everybody = {"main": psutil.Process(pod.process.pid)} | {p.cmdline()[-1].split("=")[0]: p for p in pod.children()}
    return State(
        rss={name: p.memory_info().rss for name, p in everybody.items()},
        fds={name: p.num_fds() for name, p in everybody.items()},
        threads={name: p.num_threads() for name, p in everybody.items()},
        tasks=int(seen["kvern:asyncio_tasks"]),
        blocks_held=int(seen["kvern:blocks/total"] - seen["kvern:blocks/free"]),
        busy=_busy(seen),
    )


def differences(start: State, end: State, half: State | None = None) -> list[str]:
    """What is left at the end, in words. Memory is compared with that at `half` time where given: a CPU's worker keeps
    a kernel for each of the first thousand shapes of products that it meets."""
    found = [f"{name} {value:g} at rest" for name, value in end.busy.items()]
    if start.rss.keys() != end.rss.keys():
        found.append(f"processes {sorted(end.rss)} where there were {sorted(start.rss)}")
        return found
    for name, before in (half or start).rss.items():
        if end.rss[name] - before > RSS_SLACK:
            found.append(f"{name} has {end.rss[name] - before} bytes more")
        for what in ("fds", "threads"):
            earlier, later = getattr(start, what)[name], getattr(end, what)[name]
            if later > earlier:
                found.append(f"{name} has {later} {what} where it had {earlier}")
    if end.tasks > start.tasks:
        found.append(f"{end.tasks} asyncio tasks where there were {start.tasks}")
    return found


def soak(device: str, seconds: float, warm_up: float, clients: int, *flags: str) -> dict[str, Any]:
    """Runs the whole thing; `left` and `wrong` of the result are empty where all is well."""
    pod = Pod(*FLAGS, *OF_DEVICE[device], *flags, device=device).wait_ready()
    try:
        _, alone = pod.complete(CANARY["max_tokens"], CANARY["prompt"])
        canary = str(alone["choices"][0]["text"])
        asyncio.run(Load(pod.url, 1, canary).run(clients, warm_up))
        start, before = state_of(pod), metrics_of(pod)
        began = time.monotonic()
        load = Load(pod.url, 2, canary)
        asyncio.run(load.run(clients, seconds / 2))
        half = state_of(pod)
        counts = asyncio.run(load.run(clients, seconds / 2))
        took = time.monotonic() - began
        end, after = state_of(pod), metrics_of(pod)
        status = pod.stop()
    finally:
        if pod.process.poll() is None:
            pod.process.kill()
    left = differences(start, end, half) + [f"left over: {what}" for what in pod.left_over()]
    if status != 0:
        left.append(f"exit status {status}")

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    return {
        "device": device,
        "seconds": round(took, 1),
        "clients": clients,
        "requests": sum(counts.kinds.values()),
        "kinds": dict(counts.kinds),
        "preemptions": grown("vllm:num_preemptions_total"),
        "generated_tokens": grown("vllm:generation_tokens_total"),
        "prompt_tokens": grown("vllm:prompt_tokens_total"),
        "cached_tokens": grown("vllm:prompt_tokens_cached_total"),
        "start": asdict(start),
        "half": asdict(half),
        "end": asdict(end),
        "left": left,
        "wrong": counts.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(OF_DEVICE), default="sim")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("flags", nargs="*", help="further flags of kvern serve, behind --")
    given = parser.parse_args()
    result = soak(given.device, given.seconds, given.warm_up, given.clients, *given.flags)
    print(json.dumps(result))
    return 1 if result["left"] or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
