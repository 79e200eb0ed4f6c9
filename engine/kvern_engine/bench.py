"""`kvern bench`: the same few measurements on any model and any machine, one JSON object a line.

    kvern bench builtin://smollm2-135m --workload single batch_32 prefix_64 long_prompt scheduler

Each line holds `engine` (a name for this configuration), `w` (the workload), `s` (median wall time of the timed runs),
`out_tok_s`, `tot_tok_s` and `commit`; the first one holds `start_s`; some workloads add their own keys. Prompts are
random token ids, EOS is ignored, sampling is greedy, and the first token of every prompt changes from run to run, so
that no run finds the last one's prefix cached. Comparisons with other engines are in `benchmarks/`, not here.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from kvern_engine import __version__
from kvern_engine.config import EngineConfig
from kvern_engine.flags import FlagError, add_engine_flags, make_parser, parse_args
from kvern_engine.llm import LLM
from kvern_engine.request import SamplingParams

Request = tuple[list[int], int]  # prompt token ids, tokens to generate
_FIRST_ID = 100  # below it tokenizers keep their special tokens


def random_requests(count: int, n_in: int, n_out: int, vocab_size: int, seed: int, prefix: int = 0) -> list[Request]:
    """`count` prompts of `n_in` random ids, after `prefix` ids that all of them share."""
    rng = random.Random(seed)
    low = min(_FIRST_ID, vocab_size // 2)
    head = [rng.randrange(low, vocab_size) for _ in range(prefix)]
    return [(head + [rng.randrange(low, vocab_size) for _ in range(n_in)], n_out) for _ in range(count)]


def commit() -> str:
    """The revision being measured: KVERN_COMMIT, that of the checkout, or the version."""
    if os.environ.get("KVERN_COMMIT"):
        return os.environ["KVERN_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return __version__


# ---------------------------------------------------------------- throughput


def run_once(llm: LLM, requests: Sequence[Request], salt: int) -> float:
    """Seconds to answer all requests, submitted at once. Raises RuntimeError where a token is missing."""
    vocab_size = llm.model_config.vocab_size
    # The first id differs for each run; requests that share a prefix within a run still do.
    first = min(_FIRST_ID, vocab_size // 2) + salt % max(1, vocab_size - _FIRST_ID)
    prompts = [{"prompt_token_ids": [first, *ids[1:]]} for ids, _ in requests]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for result, (_, expected) in zip(results, requests, strict=True):
        got = len(result.outputs[0].token_ids)
        if got != expected:
            raise RuntimeError(f"request {result.request_id} has {got} of {expected} tokens")
    return seconds


def measure(llm: LLM, requests: Sequence[Request], runs: int, salt: int = 0) -> dict[str, Any]:
    """Median of `runs` timed runs after a warm-up run: s, min, max, out_tok_s, tot_tok_s."""
    times = [run_once(llm, requests, salt + i) for i in range(runs + 1)][1:]
    seconds = statistics.median(times)
    out = sum(n for _, n in requests)
    total = out + sum(len(ids) for ids, _ in requests)
    return {
        "s": round(seconds, 4),
        "min": round(min(times), 4),
        "max": round(max(times), 4),
        "out_tok_s": round(out / seconds, 1),
        "tot_tok_s": round(total / seconds, 1),
    }


# ---------------------------------------------------------------- latency beside a long prompt


class _Streams:
    """Requests driven step by step, with the time of every token."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.core
        self.times: dict[str, list[float]] = {}
        self.began: dict[str, float] = {}

    def add(self, name: str, ids: list[int], n_out: int) -> None:
        from kvern_engine.ipc import AddRequest

        params = SamplingParams(temperature=0.0, max_tokens=n_out, ignore_eos=True, detokenize=False)
        self.times[name], self.began[name] = [], time.perf_counter()
        self._core.add_request(AddRequest(name, 0, ids, params, time.monotonic()))

    def step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for output in self._core.step().get(0, ()):
                if output.error:
                    raise RuntimeError(output.error)
                self.times[output.request_id] += [time.perf_counter()] * len(output.token_ids)

    def ttft(self, name: str) -> float:
        return self.times[name][0] - self.began[name]

    def gaps(self, names: Iterable[str], start: float, end: float) -> list[float]:
        """Seconds between tokens that came after `start` and no later than `end`."""
        found = []
        for name in names:
            times = self.times[name]
            found += [b - a for a, b in itertools.pairwise(times) if start < b <= end]
        return sorted(found)

    def end(self) -> None:
        self._core.abort(list(self.times))
        while not self._core.idle:
            self._core.step()


def _p99(values: Sequence[float]) -> float:
    return values[min(len(values) - 1, int(0.99 * len(values)))]


def long_prompt(llm: LLM, streams: int = 8, n_in: int = 6000, seed: int = 7) -> dict[str, Any]:
    """What a long prompt does to running streams and they to it: ITL p99 and TTFT with and without each other."""
    vocab = llm.model_config.vocab_size
    n_in = min(n_in, llm.max_model_len - 2)
    prompts = [ids for ids, _ in random_requests(3, n_in, 1, vocab, seed)]
    alone = _Streams(llm)
    alone.add("warm-up", prompts[0], 1)
    alone.step_until(lambda: bool(alone.times["warm-up"]))
    alone.add("long", prompts[1], 1)
    alone.step_until(lambda: bool(alone.times["long"]))
    ttft_alone = alone.ttft("long")
    alone.end()

    both = _Streams(llm)
    names = [f"stream-{i}" for i in range(streams)]
    for name, (ids, _) in zip(names, random_requests(streams, 64, 1, vocab, seed + 1), strict=True):
        both.add(name, ids, llm.max_model_len - 64)
    both.step_until(lambda: all(len(both.times[name]) >= 8 for name in names))
    start = time.perf_counter()
    count = len(both.times[names[0]]) + 100
    both.step_until(lambda: len(both.times[names[0]]) >= count)
    quiet = both.gaps(names, start, time.perf_counter())
    start = time.perf_counter()
    both.add("long", prompts[2], 1)
    both.step_until(lambda: bool(both.times["long"]))
    busy = both.gaps(names, start, time.perf_counter())
    ttft_beside = both.ttft("long")
    both.end()
    return {
        "s": round(ttft_beside, 4),
        "ttft_alone_s": round(ttft_alone, 4),
        "ttft_ratio": round(ttft_beside / ttft_alone, 3),
        "itl_p99_alone_ms": round(_p99(quiet) * 1e3, 2),
        "itl_p99_beside_ms": round(_p99(busy) * 1e3, 2),
        "itl_p99_ratio": round(_p99(busy) / _p99(quiet), 3),
        "streams": streams,
        "n_in": n_in,
    }


# ---------------------------------------------------------------- scheduler alone


def scheduler_micros(running: int = 64, steps: int = 2000, block_size: int = 16) -> dict[str, Any]:
    """Microseconds of scheduler and block pool a decode step with `running` requests; nothing is computed."""
    from kvern_engine.core.block_pool import BlockPool
    from kvern_engine.core.limits import SchedulerConfig
    from kvern_engine.core.plan import StepResult
    from kvern_engine.core.scheduler import Scheduler
    from kvern_engine.ipc import AddRequest

    length = 256 + steps + 2
    pool = BlockPool(running * (length // block_size + 2), block_size)
    limits = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=length)
    scheduler = Scheduler(limits, pool)
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, detokenize=False)
    for i, (ids, _) in enumerate(random_requests(running, 256, 1, 32000, seed=3)):
        scheduler.add(AddRequest(str(i), 0, ids, params, 0.0))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter() - start
        if plan is None:
            break
        rows = [row for row, sampled in zip(plan.rows, plan.samples, strict=True) if sampled]
        result = StepResult(plan.step, rows, [[7] for _ in rows], seconds=0.005)
        start = time.perf_counter()
        scheduler.update(result)
        if len(rows) == running and plan.num_tokens == running:
            times.append(planned + time.perf_counter() - start)
    times.sort()
    return {
        "s": round(sum(times), 4),
        "us_per_step": round(statistics.fmean(times) * 1e6, 1),
        "us_p50": round(statistics.median(times) * 1e6, 1),
        "us_p99": round(_p99(times) * 1e6, 1),
        "running": running,
        "steps": len(times),
    }


# ---------------------------------------------------------------- the command


def _throughput(count: int, n_in: int, n_out: int, prefix: int = 0) -> Callable[[LLM, int], dict[str, Any]]:
    def run(llm: LLM, runs: int) -> dict[str, Any]:
        return measure(llm, random_requests(count, n_in, n_out, llm.model_config.vocab_size, 11, prefix), runs)

    return run


WORKLOADS: dict[str, Callable[[LLM, int], dict[str, Any]]] = {
    "single": _throughput(1, 64, 128),
    "batch_8": _throughput(8, 64, 128),
    "batch_32": _throughput(32, 64, 128),
    "prefix_64": _throughput(64, 8, 16, prefix=1500),
    "long_prompt": lambda llm, runs: long_prompt(llm),
    "scheduler": lambda llm, runs: scheduler_micros(),
}

_SERVING = {"long_prompt"}  # measured with the scheduling of a server


def write_line(out: IO[str], line: dict[str, Any]) -> None:
    """One JSON object, on disk at once: a run that is cut off keeps what it has measured."""
    out.write(json.dumps(line) + "\n")
    out.flush()


def _parse(argv: list[str]) -> tuple[EngineConfig, list[str], int, str | None, str | None]:
    parser = make_parser("kvern bench", "Measure a model on this machine; one JSON object a line on standard output.")
    own = parser.add_argument_group("Benchmark")
    own.add_argument("--workload", nargs="+", action="extend", metavar="NAME", help="Of " + ", ".join(WORKLOADS) + ".")
    own.add_argument(
        "--runs", default="3", metavar="N", help="Timed runs after the warm-up; their median counts. Default: 3."
    )
    own.add_argument("--out", metavar="FILE", help="Append the lines to this file too.")
    own.add_argument("--engine-name", metavar="NAME", help="Value of `engine` in the lines. Default: kvern-DTYPE.")
    add_engine_flags(parser)
    config, options = parse_args(parser, argv, os.environ)
    names = options.workload or list(WORKLOADS)
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise FlagError([f"--workload: {unknown[0]!r} is not one of {', '.join(WORKLOADS)}"])
    if not options.runs.isdigit() or int(options.runs) < 1:
        raise FlagError([f"--runs: {options.runs!r} is not a whole number at least 1"])
    return config, names, int(options.runs), options.out, options.engine_name


def main(argv: list[str]) -> int:
    """Run `kvern bench`; raises FlagError and ValueError for the user's mistakes."""
    config, names, runs, path, engine = _parse(argv)
    outputs: list[IO[str]] = [sys.stdout]
    if path is not None:
        outputs.append(Path(path).open("a"))  # noqa: SIM115 (open until the process ends)

    def write(line: dict[str, Any]) -> None:
        for out in outputs:
            write_line(out, line)

    for serving in (False, True):
        group = [name for name in names if (name in _SERVING) == serving]
        if not group:
            continue
        with LLM(serving=serving, **config.model_dump(exclude_unset=True)) as llm:
            common = {"engine": engine or f"kvern-{llm.worker_ready.dtype}", "commit": commit()}
            device = {"device": llm.worker_ready.device, "model": config.model, "serving": serving}
            write({**common, "start_s": round(llm.start_seconds, 2), **device})
            for name in group:
                write({**common, "w": name, **WORKLOADS[name](llm, runs)})
    return 0
