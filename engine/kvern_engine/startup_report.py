"""What `kvern serve` tells while it starts and when it is ready: a few lines for a person, log fields for a collector.

Only words: it decides nothing. A person sees each phase with its seconds (the current one rewritten in place); a
collector gets one structured line an event.
"""

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable
from typing import TextIO

from kvern_engine import __version__, logs
from kvern_engine.ipc import CoreReady

log = logging.getLogger(__name__)

_WORDS = {
    "resolve": "finding the model",
    "weights": "loading weights",
    "profile": "trying a step",
    "graphs": "capturing graphs",
    "kv_cache": "laying out the KV cache",
    "products": "choosing kernels",
    "attention": "planning attention",
}


def count(number: float) -> str:
    """A number in three or four digits: 134M, 16.1G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            digits = number / limit
            return f"{digits:.1f}{unit}" if digits < 100 else f"{digits:.0f}{unit}"
    return f"{number:.0f}"


def capacity(ready: CoreReady) -> str:
    """`65,536 tokens (4,096 blocks of 16); 8.0 requests of 8,192 tokens at once`."""
    tokens = ready.num_blocks * ready.block_size
    at_once = tokens / ready.max_model_len
    return (
        f"{tokens:,} tokens ({ready.num_blocks:,} blocks of {ready.block_size}); "
        f"{at_once:.1f} requests of {ready.max_model_len:,} tokens at once"
    )


def curl_line(url: str, name: str, keyed: bool) -> str:
    """A first request to try, as a shell takes it; completions, since not every model has a chat template."""
    body = json.dumps({"model": name, "prompt": "Once upon a time"}, ensure_ascii=False)
    parts = ["curl", "-s"]
    if url.startswith("unix:"):
        parts += ["--unix-socket", shlex.quote(url.removeprefix("unix:"))]
        url = "http://localhost"
    parts += [f"{url}/v1/completions", "-H 'Content-Type: application/json'"]
    parts += ['-H "Authorization: Bearer $API_KEY"'] if keyed else []
    return " ".join([*parts, "-d", shlex.quote(body)])


class StartupReport:
    """Call `begin`, `progress`, `engine_ready`, `ready` in that order; `clock` is in seconds."""

    def __init__(self, human: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._human, self._stream, self._clock = human, stream or sys.stderr, clock
        self._start = clock()
        self._phases: dict[int, tuple[str, float, int]] = {}  # rank -> phase, when it began, percent shown
        self._open_line = False

    def _write(self, text: str, keep: bool) -> None:
        self._stream.write("\r\x1b[K" * self._open_line + text + "\n" * keep)
        self._stream.flush()
        self._open_line = not keep

    def begin(self, model: str, url: str, engines: int) -> None:
        if self._human:
            several = f", {engines} engines" if engines > 1 else ""
            self._write(f"Kvern {__version__}: {model}{several}", keep=True)
            self._write("  starting processes", keep=False)
        else:
            log.info("starting", extra=logs.fields(model=model, url=url, engines=engines, version=__version__))

    def progress(self, rank: int, phase: str, fraction: float, several: bool) -> None:
        """A worker has got on with its phase; a new phase closes the last one."""
        now, percent = self._clock(), int(fraction * 100)
        last = self._phases.get(rank)
        if last is None or last[0] != phase:
            self._close(rank, several)
            self._phases[rank] = (phase, now, -1)
        if self._human and percent != self._phases[rank][2]:
            self._phases[rank] = (phase, self._phases[rank][1], percent)
            self._write(f"  {self._label(rank, phase, several)} {percent:3d} %", keep=False)

    def _label(self, rank: int, phase: str, several: bool) -> str:
        return f"{f'worker {rank}: ' if several else ''}{_WORDS.get(phase, phase)}"

    def _close(self, rank: int, several: bool) -> None:
        if rank not in self._phases:
            return
        phase, began, _ = self._phases.pop(rank)
        seconds = self._clock() - began
        if self._human:
            if seconds >= 0.05:  # shorter ones are of no interest to anybody
                self._write(f"  {self._label(rank, phase, several):<32} {seconds:5.1f} s", keep=True)
        else:
            log.debug("phase done", extra=logs.fields(worker=rank, phase=phase, seconds=seconds))

    def engine_ready(self, ready: CoreReady, several: bool) -> None:
        for rank in list(self._phases) if not several else [r for r in self._phases if r == ready.engine]:
            self._close(rank, several)
        if not self._human:
            known = {"engine": ready.engine, "kv_tokens": ready.num_blocks * ready.block_size}
            log.info("engine ready", extra=logs.fields(**known, max_model_len=ready.max_model_len, **ready.info))

    def ready(self, url: str, admin_url: str | None, name: str, engines: list[CoreReady], keyed: bool = False) -> None:
        """`keyed`: clients need an API key."""
        seconds = self._clock() - self._start
        if not self._human:
            extra = {"admin_url": admin_url} if admin_url else {}
            log.info("ready", extra=logs.fields(url=url, model=name, seconds=seconds, **extra))
            return
        for ready in engines:
            which = f"engine {ready.engine}: " if len(engines) > 1 else ""
            where = " ".join(str(ready.info[key]) for key in ("device", "dtype") if key in ready.info)
            weights = count(float(ready.info.get("weight_bytes", 0)))
            self._write(f"  {which}{where}, weights {weights}B, KV cache {capacity(ready)}", keep=True)
        admin = f", admin port {admin_url}" if admin_url else ""
        shown = url if url.startswith("unix:") else f"{url}/v1"
        self._write(f"Ready in {seconds:.1f} s: {shown}  (model {name}{admin}; Ctrl-C stops)", keep=True)
        self._write(f"  {curl_line(url, name, keyed)}", keep=True)

    def say(self, text: str) -> None:
        """A line of its own for a person; collectors get log lines instead."""
        if self._human:
            self._write(text, keep=True)
