"""Load as applications make it, kept up while things happen to the service: the openai client, `max_retries=0`.

    load.py reference URL MODEL --out FILE [--streams N] [--tokens N]
    load.py run URL MODEL --reference FILE... --name FILE_PREFIX [--streams N] [--tokens N] [--knock S] [--seconds S]

`run` keeps N streams open, each of at least `--tokens` tokens, none of which may end by itself (`ignore_eos`): when one
has ended the next begins, staggered, so that there are always some at each age. Beside them a short request every
`--knock` seconds tells what happens to who comes new. It goes on until PREFIX.stop exists (streams that run are seen
through), PREFIX.hold stops new ones only, and it writes PREFIX.status once a second and PREFIX.json, its report, at the
end. Every text is compared with an undisturbed one of the same request (`reference`; several files: each is right, a
mixture of them is not). The exit status is 0 where nothing failed, was truncated, doubled or differed.

Requests carry a seed and temperature 0: the text depends on the request alone, whoever answers it.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from openai import AsyncOpenAI, Timeout

PAUSE_SECONDS = 0.5  # shorter pauses are not listed
READ_SECONDS = 120.0  # a stream that says nothing for so long has failed
KNOCK_TOKENS = 4
KNOCK_SEEDS = 10
LOST_CHARACTER = "\ufffd"  # of a text cut within a character


@dataclass
class Row:
    """One request. Times are seconds since 1970; `outcome` is what `judged` says, or "failed".

    `pauses`: (when it began, seconds) of silences above PAUSE_SECONDS, the wait for the first token not among them.
    """

    kind: str  # long | knock
    seed: int
    start: float
    end: float = 0.0
    wanted: int = 0  # tokens
    got: int = 0
    first: float = 0.0  # seconds until the first token
    longest: float = 0.0  # pause between tokens, seconds
    pauses: list[tuple[float, float]] = field(default_factory=list)
    outcome: str = ""
    detail: str = ""


def prompt_of(seed: int) -> str:
    """A prompt for each seed; all of different beginnings."""
    return f"Verse {seed}. In the beginning God created the heaven and the earth"


def judged(text: str, references: list[str], got: int, wanted: int, finish: str | None) -> tuple[str, str]:
    """(outcome, detail): "right", "truncated", "duplicated" or "differs".

    `references` are longer than any text; which of them the text follows furthest is the one it is held against.
    """
    clean = text.rstrip(LOST_CHARACTER)
    best = max(references, key=lambda reference: common_prefix(clean, reference), default="")
    at = common_prefix(clean, best)
    if at < len(clean):
        after = clean[at : at + 24]
        where = f"at character {at} of {len(clean)}: {clean[max(at - 24, 0) : at]!r} is followed by {after!r}"
        again = best.find(after, max(at - 4000, 0), at + len(after) - 1)
        return "duplicated" if len(after) >= 4 and again >= 0 else "differs", where
    if finish is None or got < wanted:
        return "truncated", f"{got} of {wanted} tokens, finish_reason {finish}"
    if got > wanted:
        return "duplicated", f"{got} of {wanted} tokens"
    return "right", ""


def in_words(error: BaseException) -> str:
    """The error and what it came from: the client says "Connection error." of them all."""
    told, seen = [f"{type(error).__name__}: {error}"], {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
        told.append(repr(error))
    return " from ".join(told)


def common_prefix(one: str, other: str) -> int:
    """Length of what both begin with."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def summary(rows: list[Row]) -> dict[str, object]:
    """What the rows come to."""
    counts = {
        name: sum(row.outcome == name for row in rows)
        for name in ("right", "failed", "truncated", "duplicated", "differs")
    }
    wrong = [row for row in rows if row.outcome != "right"]
    return {
        "requests": len(rows),
        **counts,
        "tokens": sum(row.got for row in rows),
        "longest_pause": round(max((row.longest for row in rows), default=0.0), 3),
        "longest_wait_for_first_token": round(max((row.first for row in rows), default=0.0), 3),
        "first_wrong": [f"{row.kind} {row.seed}: {row.outcome}: {row.detail}" for row in wrong[:5]],
    }


class Load:
    """What `run` does."""

    def __init__(self, given: argparse.Namespace, references: list[dict[str, str]]) -> None:
        self.given, self.references = given, references
        self.rows: list[Row] = []
        self.running: set[int] = set()  # ids of rows that have had a token
        self.begun = 0
        self.client = make_client(given.url)
        self.ends_at = time.monotonic() + given.seconds

    def file(self, suffix: str) -> Path:
        return Path(f"{self.given.name}.{suffix}")

    @property
    def stopping(self) -> bool:
        return time.monotonic() > self.ends_at or self.file("stop").exists()

    @property
    def holding(self) -> bool:
        return self.stopping or self.file("hold").exists()

    async def run(self) -> dict[str, object]:
        """The report."""
        started = time.time()
        told = asyncio.create_task(self._tell())
        knocks = asyncio.create_task(self._knocks())
        await asyncio.gather(*(self._worker(number) for number in range(self.given.streams)), knocks)
        told.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await told
        ends = {"started": started, "ended": time.time(), "streams": self.given.streams}
        return {**ends, **summary(self.rows), "rows": [asdict(row) for row in self.rows]}

    async def _worker(self, number: int) -> None:
        """One stream after the other. The first ones are of different lengths, so that they do not end together."""
        streams, tokens = self.given.streams, self.given.tokens
        length = tokens + tokens * number // streams
        await asyncio.sleep(number * 0.02)
        while not self.stopping:
            if self.holding:
                await asyncio.sleep(0.2)
                continue
            row = await self.request("long", number, length)
            length = tokens
            if row.outcome == "failed":
                await asyncio.sleep(1.0)  # a service that refuses at once is not asked a thousand times a second

    async def _knocks(self) -> None:
        """Short requests, each when it is due, however long the others take."""
        tasks, number = set(), 0
        while not self.stopping:
            if not self.holding and self.given.knock:
                task = asyncio.create_task(self.request("knock", 1000 + number % KNOCK_SEEDS, KNOCK_TOKENS))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                number += 1
            await asyncio.sleep(self.given.knock or 0.5)
        await asyncio.gather(*tasks)

    async def request(self, kind: str, seed: int, tokens: int) -> Row:
        """One streamed completion, judged."""
        row = Row(kind, seed, time.time(), wanted=tokens)
        pieces: list[str] = []
        finish: str | None = None
        last = time.monotonic()
        self.begun += 1
        try:
            stream = await self.client.completions.create(**arguments(self.given.model, seed, tokens), stream=True)
            async for chunk in stream:
                if chunk.usage is not None:
                    row.got = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.text:
                        pieces.append(choice.text)
                        last = self._heard(row, last)
            known = [reference[str(seed)] for reference in self.references if str(seed) in reference]
            row.outcome, row.detail = judged("".join(pieces), known, row.got, tokens, finish)
        except Exception as error:  # a stream breaks off with errors of the HTTP library below the client, too
            row.outcome, row.detail = "failed", f"{in_words(error)} (after {len(pieces)} chunks)"[:600]
        self._heard(row, last, ended=True)
        row.end = time.time()
        self.running.discard(id(row))
        self.rows.append(row)
        return row

    def _heard(self, row: Row, last: float, ended: bool = False) -> float:
        """Note the silence since `last`; returns the present moment of the monotonic clock, seconds."""
        now = time.monotonic()
        silence = now - last
        if not row.first:
            row.first = round(silence, 3)
            self.running.add(id(row))
        else:
            row.longest = max(row.longest, round(silence, 3))
            if silence > PAUSE_SECONDS:
                row.pauses.append((round(time.time() - silence, 3), round(silence, 3)))
        return now

    async def _tell(self) -> None:
        while True:
            self.write("status", self._status())
            await asyncio.sleep(1.0)

    def _status(self) -> dict[str, object]:
        wrong = [row for row in self.rows if row.outcome != "right"]
        said = [f"{row.kind} {row.seed}: {row.outcome}: {row.detail}" for row in wrong[:3]]
        state = {"at": time.time(), "running": len(self.running), "ended": len(self.rows), "wrong": len(wrong)}
        return {**state, "first_wrong": said}

    def write(self, suffix: str, what: dict[str, object]) -> None:
        """A file whole or not at all: others read it meanwhile."""
        part = self.file(suffix + ".part")
        part.write_text(json.dumps(what))
        part.replace(self.file(suffix))


def make_client(url: str) -> AsyncOpenAI:
    """max_retries=0: what fails, fails."""
    timeout = Timeout(connect=10.0, read=READ_SECONDS, write=10.0, pool=None)
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=timeout)


def arguments(model: str, seed: int, tokens: int) -> dict[str, object]:
    """Of completions.create: greedy, seeded, and no end before `tokens`."""
    return {
        "model": model,
        "prompt": prompt_of(seed),
        "max_tokens": tokens,
        "temperature": 0,
        "seed": seed,
        "extra_body": {"ignore_eos": True, "stream_options": {"include_usage": True}},
    }


async def reference(given: argparse.Namespace) -> dict[str, str]:
    """The undisturbed texts of all requests that `run` makes, by seed."""
    client = make_client(given.url)

    async def one(seed: int, tokens: int) -> tuple[str, str]:
        wanted = arguments(given.model, seed, tokens)
        answer = await client.completions.create(**{**wanted, "extra_body": {"ignore_eos": True}})
        if answer.usage is None or answer.usage.completion_tokens != tokens:
            raise SystemExit(f"the undisturbed answer to seed {seed} has {answer.usage} instead of {tokens} tokens")
        return str(seed), answer.choices[0].text

    # The first streams are up to twice as long as the others.
    seeds = [(seed, 2 * given.tokens + 8) for seed in range(given.streams)]
    seeds += [(1000 + number, KNOCK_TOKENS + 8) for number in range(KNOCK_SEEDS)]
    return dict(await asyncio.gather(*(one(*pair) for pair in seeds)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Load by the openai client, and what became of each request.")
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("reference", "run"):
        action = actions.add_parser(name)
        action.add_argument("url")
        action.add_argument("model")
        action.add_argument("--streams", type=int, default=50)
        action.add_argument("--tokens", type=int, default=1200)
    actions.choices["reference"].add_argument("--out", required=True)
    more = actions.choices["run"].add_argument
    more("--reference", action="append", default=[], metavar="FILE")
    more("--name", required=True, metavar="PREFIX")
    more("--knock", type=float, default=0.5, metavar="S")
    more("--seconds", type=float, default=7200.0, metavar="S", help="end after so long without being told to")
    given = parser.parse_args()
    if given.action == "reference":
        texts = asyncio.run(reference(given))
        Path(given.out).write_text(json.dumps(texts))
        print(json.dumps({"texts": len(texts), "characters": sum(map(len, texts.values()))}))
        return 0
    load = Load(given, [json.loads(Path(name).read_text()) for name in given.reference])
    report = asyncio.run(load.run())
    load.write("json", report)
    load.write("status", {"running": 0, "done": True})
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    return 0 if report["requests"] == report["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
