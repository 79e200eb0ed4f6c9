"""The coarse engine against the real scheduler and block pool, and what it must never do."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_engine.core.plan import StepPlan
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.sim_profile import load_profile
from kvern_simulator.fluid import FluidEngine, Request, step_cost
from kvern_simulator.real import RealEngine

H200 = load_profile("h200-llama3-8b")
TIGHT = replace(H200, memory_bytes=30_000_000_000)  # room for 88,000 tokens instead of 925,000


def load(rate: float, seconds: float, inputs: int = 3000, outputs: int = 300) -> list[Request]:
    rng, at, found = random.Random(3), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Request(at, int(rng.uniform(0.5, 1.5) * inputs), int(rng.uniform(0.5, 1.5) * outputs)))
    return found


def driven(kind, profile, requests: list[Request], seconds: float):
    """(the engine, mean KV usage) after so long; requests are told as they come."""
    engine, coming, usage, now = kind(profile, Layout(), 0.0, 256), list(requests), [], 0.0
    while now < seconds:
        now += 0.25
        while coming and coming[0].arrival < now:
            engine.add(coming.pop(0))
        engine.advance(now)
        usage.append(engine.used_tokens / engine.kv_tokens)
    return engine, sum(usage) / len(usage)


def figures(requests: list[Request]) -> tuple[int, float, float]:
    done = [r for r in requests if r.end < math.inf]
    itl = sum((r.end - r.first) / max(r.outputs - 1, 1) for r in done) / len(done)
    ttft = sum(r.first - r.arrival for r in done) / len(done)
    return len(done), itl, ttft


@pytest.mark.parametrize(
    ("profile", "rate"),
    [(H200, 4.0), (H200, 8.0), (TIGHT, 8.0)],
    ids=["at ease", "prompts saturate it", "its memory is full"],
)
def test_the_coarse_engine_does_what_the_real_one_does(profile, rate):
    seconds = 40.0
    coarse, real = load(rate, seconds), load(rate, seconds)
    _, coarse_usage = driven(FluidEngine, profile, coarse, seconds)
    _, real_usage = driven(RealEngine, profile, real, seconds)
    (n, itl, ttft), (real_n, real_itl, real_ttft) = figures(coarse), figures(real)
    assert n == pytest.approx(real_n, rel=0.08)
    assert itl == pytest.approx(real_itl, rel=0.15)
    assert ttft == pytest.approx(real_ttft, rel=0.25, abs=0.05)
    assert coarse_usage == pytest.approx(real_usage, rel=0.2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_costs_what_the_profile_says(tensor):
    layout = Layout(tensor=tensor)
    whole, token, context = step_cost(H200, layout)
    plan = StepPlan(0, [], [], [], [], [0, 1], [4000, 100], [1, 512], [True, True])
    # context counts the tokens of the step as well; they are in the cost of a token here
    assert whole + token * 513 + context * 4100 == pytest.approx(H200.seconds(plan, layout), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 7000), st.integers(2, 1000)), min_size=1, max_size=40),
    st.sampled_from([H200, TIGHT]),
)
def test_every_request_ends_once_and_everything_is_given_back(asked, profile):
    requests = [Request(at, inputs, outputs) for at, inputs, outputs in sorted(asked)]
    engine, _ = driven(FluidEngine, profile, requests, 25.0)
    engine.advance(400.0)
    assert all(r.arrival <= r.first <= r.end < math.inf for r in requests)
    assert engine.counters.finished == len(requests)
    assert engine.in_flight == 0
    assert engine.used_tokens == pytest.approx(0.0, abs=1.0)
