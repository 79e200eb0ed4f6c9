"""Prometheus' text of a pod -> what the decisions want of it. Pure.

Of an engine: vLLM's names, which Kvern's own has as well, and Kvern's where there is no vLLM one. Series of the engines
of a pod are added up; a usage counts by its engine's tokens. Of a router: what it holds.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvern_operator.autoscale.signals import Buckets, Scrape
from kvern_operator.autoscale.terms import Step


@dataclass(frozen=True)
class Target:
    """A pod to ask; `address` is host:port of its API."""

    uid: str
    name: str
    address: str
    routing: bool = False  # a router


@dataclass(frozen=True)
class Round:
    """What came of asking everybody once: by UID what an engine says, what a router holds (at, requests, tokens), and
    why somebody gave no answer."""

    engines: Mapping[str, Scrape]
    routers: Mapping[str, tuple[float, float, float]]
    failures: Mapping[str, str]


POD_HEADER = "X-Kvern-Pod"  # in which a pod says who it is
HELD = ("kvern_router_held_requests", "kvern_router_held_input_tokens")
_CONFIG, _USAGE = "vllm:cache_config_info", "vllm:kv_cache_usage_perc"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_COUNTERS = {
    "vllm:num_preemptions_total": "preemptions",
    "kvern:step_tokens_total": "step_tokens",
    "vllm:request_generation_tokens_count": "finished",
    "vllm:request_prompt_tokens_sum": "input_tokens",
    "vllm:request_generation_tokens_sum": "output_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:request_prefill_time_seconds_sum": "prefill_seconds",
    "vllm:inter_token_latency_seconds_sum": "itl_seconds",
    "vllm:inter_token_latency_seconds_count": "itl_count",
}
_HISTOGRAMS = {
    "vllm:inter_token_latency_seconds_bucket": "itl",
    "vllm:time_to_first_token_seconds_bucket": "ttft",
    "vllm:request_prompt_tokens_bucket": "inputs",
    "vllm:request_generation_tokens_bucket": "outputs",
}
ENGINE_SERIES = (_CONFIG, _USAGE, _RUNNING, _WAITING, *_COUNTERS, *_HISTOGRAMS)
_READ = {*ENGINE_SERIES, *HELD}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """(name, labels as text, value) of each line that is a sample. Raises ValueError for a line that is none, and for
    a value of what is read here that no count can have (NaN, Inf, below 0): nothing could be decided with it."""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if "{" in line:
            name, _, rest = line.partition("{")
            labels, found, value = rest.rpartition("}")
            if not found:
                raise ValueError(f"no sample: {line[:80]!r}")
        else:
            name, _, value = line.partition(" ")
            labels = ""
        number = float(value.split()[0] if value.strip() else "none")
        if name in _READ and not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number}")
        yield name, labels, number


def _labels(text: str) -> dict[str, str]:
    return dict(_LABEL.findall(text))


def read_engine(uid: str, at: float, text: str) -> Scrape:
    """The scrape of an engine pod at `at` seconds. Raises ValueError where that is no text of metrics, or lacks what
    load is told by: a half-read answer is none."""
    tokens: dict[str, float] = {}
    usage: dict[str, float] = {}
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS.values()}
    steps: list[Mapping[str, str]] = []
    for name, labels, value in _samples(text):
        if name in _HISTOGRAMS:
            shelf, bound = buckets[_HISTOGRAMS[name]], float(_labels(labels)["le"])
            shelf[bound] = shelf.get(bound, 0.0) + value
        elif name == _CONFIG:
            found = _labels(labels)
            tokens[found.get("engine", "")] = float(found["num_gpu_blocks"]) * float(found["block_size"])
            steps.append(found)
        elif name == _USAGE:
            usage[_labels(labels).get("engine", "")] = value
        elif name in _COUNTERS or name in (_RUNNING, _WAITING):
            sums[name] = sums.get(name, 0.0) + value
    if not 0 < sum(tokens.values()) < math.inf or not usage or _RUNNING not in sums or _WAITING not in sums:
        raise ValueError("no engine has said what it holds")
    return Scrape(
        uid=uid,
        at=at,
        kv_tokens=sum(tokens.values()),
        used_tokens=sum(share * tokens.get(engine, 0.0) for engine, share in usage.items()),
        running=sums[_RUNNING],
        waiting=sums[_WAITING],
        step=_step(steps),
        **{field: sums.get(name, 0.0) for name, field in _COUNTERS.items()},  # type: ignore[arg-type]
        **{field: _sorted(shelf) for field, shelf in buckets.items()},  # type: ignore[arg-type]
    )


def _sorted(shelf: Mapping[float, float]) -> Buckets:
    return tuple(sorted(shelf.items()))


def _step(engines: list[Mapping[str, str]]) -> Step:
    """What the engines say of the limits of their steps; others than Kvern's say nothing."""
    usual, said = Step(), engines[0]
    seqs, batched = said.get("max_num_seqs", ""), said.get("max_num_batched_tokens", "")
    return Step(
        max_num_seqs=int(seqs) if seqs.isdecimal() else usual.max_num_seqs,
        max_num_batched_tokens=int(batched) if batched.isdecimal() else usual.max_num_batched_tokens,
        engines=len(engines),
    )


def read_router(text: str) -> tuple[float, float]:
    """(requests held, their input tokens). Raises ValueError where that is not said."""
    found = {name: value for name, _, value in _samples(text) if name in HELD}
    if HELD[0] not in found:
        raise ValueError("it does not say how many requests it holds")
    return found[HELD[0]], found.get(HELD[1], 0.0)
