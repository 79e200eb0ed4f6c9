"""From scrapes to loads, traffic and the fitted ITL."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.autoscale.latency import KEPT, Fit
from kvern_operator.autoscale.signals import STALE, Scrape, Signals, held_of, quantile
from kvern_operator.autoscale.terms import Held, Step


def scrape(at: float, uid: str = "a", **more: float) -> Scrape:
    return replace(Scrape(uid, at, 100_000.0, 40_000.0, 10.0, 2.0), **more)  # type: ignore[arg-type]


def test_a_quantile_is_interpolated_as_prometheus_does():
    buckets = [(1.0, 10.0), (2.0, 30.0), (math.inf, 40.0)]
    assert quantile(0.5, buckets) == pytest.approx(1.5)
    assert quantile(0.95, buckets) == 2.0  # beyond the last finite bound nothing is known
    assert quantile(0.5, []) is None
    assert quantile(0.5, [(1.0, 0.0), (math.inf, 0.0)]) is None


def test_a_load_is_the_mean_of_two_and_old_answers_are_none():
    signals = Signals()
    signals.add(scrape(100.0, waiting=0.0))
    signals.add(scrape(105.0, waiting=4.0, preemptions=3.0))
    load = signals.load("a", 106.0)
    assert load is not None
    assert (load.waiting, load.preempted, load.preempting) == (2.0, 2.0, True)
    assert signals.load("a", 105.0 + STALE) is not None
    assert signals.load("a", 105.1 + STALE) is None
    assert signals.load("b", 106.0) is None


def test_how_long_no_request_has_come():
    signals = Signals()
    signals.add(scrape(100.0, running=0.0, waiting=0.0))
    signals.add(scrape(105.0, running=0.0, waiting=0.0, finished=1.0, output_tokens=5.0))  # within one interval
    signals.add(scrape(110.0, running=0.0, waiting=0.0, finished=1.0, output_tokens=5.0))
    traffic = signals.traffic(112.0)
    assert traffic is not None and (traffic.quiet, traffic.rate > 0) == (7.0, True)
    signals.add(scrape(115.0, running=1.0, waiting=0.0, finished=1.0, output_tokens=5.0))
    assert signals.traffic(115.0).quiet == 0.0
    signals.add(scrape(120.0, running=0.0, waiting=0.0, finished=2.0, output_tokens=9.0))  # it ends: none has come
    assert signals.traffic(120.0).quiet == 5.0


def test_a_pod_of_the_same_name_is_another_and_the_dead_are_forgotten():
    signals = Signals()
    signals.add(scrape(100.0))
    signals.keep(["b"])
    assert signals.load("a", 101.0) is None


def test_a_restarted_process_counts_from_zero():
    signals = Signals()
    for at, done in ((100.0, 1000.0), (105.0, 1010.0), (110.0, 3.0), (115.0, 13.0)):
        signals.add(scrape(at, finished=done, input_tokens=done * 100, output_tokens=done * 10))
    traffic = signals.traffic(115.0)
    assert traffic is not None
    assert (traffic.input_tokens, traffic.output_tokens) == (100.0, 10.0)
    assert traffic.rate == pytest.approx(20 / 30.0)  # before and after, over no less than 30 s


def test_traffic_of_the_last_minute():
    signals = Signals()
    for step in range(25):
        at, done = 100.0 + 5 * step, 20.0 * step
        signals.add(
            scrape(
                at,
                finished=done,
                input_tokens=done * 1000,
                output_tokens=done * 200,
                prefix_queries=done * 1000,
                prefix_hits=done * 250,
                prefill_seconds=done * 0.2,
                itl_seconds=done * 2.0,
                itl_count=done * 200,
                itl=((0.01, done * 100), (0.02, done * 200), (math.inf, done * 200)),
                ttft=((0.5, done), (math.inf, done)),
                inputs=((1000.0, done), (math.inf, done)),
                outputs=((200.0, done), (math.inf, done)),
            )
        )
    traffic = signals.traffic(220.0)
    assert traffic is not None
    assert traffic.rate == pytest.approx(4.0)
    assert (traffic.prefix_hits, traffic.prefill_seconds) == (pytest.approx(0.25), pytest.approx(0.2))
    assert traffic.itl == pytest.approx(0.019)
    assert traffic.ttft == pytest.approx(0.475)
    assert traffic.longest == pytest.approx(0.999 * 1200)
    assert signals.fit.line() is None  # one batch size says nothing of a slope


def test_the_fit_learns_a_line_and_forgets_it():
    fit = Fit()
    for running in (1, 4, 16, 64, 128):
        for _ in range(30):
            fit = fit.add(running, 0.005 + 0.0001 * running, 100.0)
    line = fit.line()
    assert line is not None
    assert (line.base, line.slope) == (pytest.approx(0.005, rel=0.01), pytest.approx(0.0001, rel=0.01))
    assert line.running_at(0.020) == pytest.approx(150, rel=0.01)
    later = fit.add(64, 0.5, 101.0 + KEPT)
    assert later.line() is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0.001, 1.0)), max_size=40))
def test_whatever_is_seen_more_load_is_never_predicted_to_be_faster(samples):
    fit = Fit()
    for at, (running, itl) in enumerate(samples):
        fit = fit.add(running, itl, float(at))
    line = fit.line()
    if line is not None:
        assert line.slope >= 0
        assert line.base >= -1e-12


def test_steps_are_what_the_pods_say():
    signals = Signals()
    signals.add(replace(scrape(100.0), step=Step(64, 2048, 2)))
    assert signals.step(101.0) == Step(64, 2048, 2)


def test_what_routers_hold_is_known_only_from_all_of_them():
    assert held_of([(2.0, 500.0), (1.0, 100.0)]) == Held(3.0, 600.0)
    assert held_of([(2.0, 500.0), None]) is None
    assert held_of([]) == Held(0.0, 0.0)


def test_the_share_of_answers_that_kept_the_slo():
    signals = Signals()
    assert signals.attainment(0.05, 1.0, 0.0) is None
    itl, ttft = ((0.05, 0.0), (0.1, 0.0), (math.inf, 0.0)), ((0.5, 0.0), (1.0, 0.0), (math.inf, 0.0))
    signals.add(scrape(0.0, itl=itl, ttft=ttft))
    itl, ttft = ((0.05, 60.0), (0.1, 100.0), (math.inf, 100.0)), ((0.5, 9.0), (1.0, 9.0), (math.inf, 10.0))
    signals.add(scrape(5.0, itl=itl, ttft=ttft))
    assert signals.attainment(0.05, None, 5.0) == pytest.approx(0.6)
    assert signals.attainment(0.075, None, 5.0) == pytest.approx(0.8)  # half of its bucket
    assert signals.attainment(0.075, 1.0, 5.0) == pytest.approx(0.8)
    assert signals.attainment(0.1, 2.0, 5.0) == pytest.approx(0.9)  # beyond the last bound nothing is known to be kept
    assert signals.attainment(None, None, 5.0) is None
    assert signals.attainment(0.05, 1.0, 5.1 + STALE) is None


def test_preemptions_a_request():
    signals = Signals()
    signals.add(scrape(0.0, preemptions=5.0, finished=100.0))
    signals.add(scrape(10.0, preemptions=9.0, finished=140.0))
    assert signals.preempted(10.0) == pytest.approx(0.1)
    assert signals.preempted(10.1 + STALE) == 0.0
