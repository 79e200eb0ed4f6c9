"""The simulated cluster around the real decisions."""

from dataclasses import replace

import pytest

from kvern_engine.worker.sim_profile import load_profile
from kvern_operator.autoscale.layout import Sizes
from kvern_operator.autoscale.signals import Scrape
from kvern_simulator.compare import (
    Comparison,
    Score,
    at_attainment,
    best_static,
    compare,
    grid_table,
    reversals,
    run,
    score,
    table,
    verdict,
)
from kvern_simulator.controllers import Hpa, Kvern, Static
from kvern_simulator.fluid import Request
from kvern_simulator.traces import CHAT, Trace, Trouble, all_traces, requests_of
from kvern_simulator.world import Held, Seen, Setting, World

SETTING = Setting(load_profile("h200-llama3-8b"), replicas=1)


def trace(rate: float, seconds: float = 600.0, trouble: tuple[Trouble, ...] = (), begin: float = 0.0) -> Trace:
    requests = tuple(Request(begin + i / rate, 4000, 250) for i in range(int((seconds - begin) * rate)))
    return Trace("made", seconds, requests, 60.0, trouble)


def test_one_replica_that_is_enough_keeps_every_slo_and_costs_its_time():
    result = run(trace(2.0), SETTING, "one", Static(1))
    assert (result.attainment, result.requests) == (1.0, 1200)
    assert result.gpu_seconds == pytest.approx(600.0, abs=2.0)


def test_kvern_adds_what_is_missing_and_twice_gives_the_same():
    heavy = trace(9.0)
    first, second = (run(heavy, SETTING, "Kvern", Kvern(SETTING, 60.0)) for _ in range(2))
    assert first.moves == second.moves
    assert first.moves[0][0] <= 30.0
    assert first.curve[-1][1] >= 2
    assert first.attainment > run(heavy, SETTING, "one", Static(1)).attainment
    assert reversals(first) == 0


def test_pods_that_find_no_gpu_are_given_up_and_come_when_there_is_one():
    short = trace(9.0, 900.0, (Trouble(0.0, 500.0, gpus=1),))
    result = run(short, SETTING, "Kvern", Kvern(SETTING, 60.0))
    assert any(after < before and at < 500 for at, before, after in result.moves)
    assert max(ready for _, _, ready, _ in result.curve) >= 2


def test_lost_metrics_move_nothing():
    blind = trace(2.0, 900.0, (Trouble(0.0, 900.0, lost=1.0),))
    setting = replace(SETTING, replicas=3)
    assert run(blind, setting, "Kvern", Kvern(setting, 60.0)).changes == 0


def seen(values: list[float], current: int, now: float = 0.0, **more: float) -> Seen:
    scrapes = {f"p{i}": Scrape(f"p{i}", now, 100.0, 100.0 * v, 1.0, v) for i, v in enumerate(values)}
    pods = tuple(_Pod() for _ in range(current))
    return Seen(now, current, pods, scrapes, Held(), 1, ((1, 100),), None, 0.0)  # type: ignore[arg-type]


class _Pod:
    def ready(self, now: float) -> bool:
        return True


def test_an_hpa_does_what_kubernetes_documents():
    hpa = Hpa(SETTING, "kv", 0.5)
    assert hpa.decide(seen([0.52, 0.5], 2)).replicas == 2  # within the tolerance of 10 %
    assert hpa.decide(seen([0.9, 0.9], 2, 15.0)).replicas == 4  # ceil(2 x 1.8)
    assert hpa.decide(seen([0.1] * 4, 4, 30.0)).replicas == 4  # 300 s of less have not passed
    assert hpa.decide(seen([0.1] * 4, 4, 331.0)).replicas == 1
    assert Hpa(SETTING, "kv", 0.5).decide(seen([0.9], 2)).replicas == 2  # the silent one counts as empty on the way up
    assert Hpa(SETTING, "queue", 1.0).decide(seen([9.0], 1)).replicas == 5  # at most four more at a time


def test_the_comparison_is_whole_and_its_table_adds_up():
    traces = [replace(trace(3.0, 300.0), name="a", training=True), replace(trace(7.0, 300.0), name="b")]
    made = compare(SETTING, traces, lambda text: None)
    found = made.found
    assert [n.split()[0] for n in found] == ["Kvern", "HPA", "HPA", "static"]
    text = table(found, traces)
    assert "| b (held out) |" in text
    whole = score("", found["Kvern"], traces)
    assert f"**{whole.attainment:.2%}, {whole.gpu_hours:.2f} h**" in text.splitlines()[-1]
    assert all(s.gpu_hours > 0 for scores in made.grids.values() for s in scores)
    assert verdict(made, traces)[0].startswith(f"Kvern keeps the SLO of {whole.attainment:.2%} of all")
    assert grid_table(made).count("(best on the training half)") == 2
    assert best_static(traces[0], SETTING, 0.9, 0).gpu_seconds == pytest.approx(300.0, abs=2.0)


def test_hours_at_an_attainment_lie_between_the_targets_beside_it():
    grid = [Score("a", 0.90, 10.0, 0.0), Score("b", 0.98, 20.0, 0.0), Score("worse", 0.97, 30.0, 0.0)]
    assert at_attainment(grid, 0.94) == pytest.approx(15.0)
    assert at_attainment(grid, 0.90) == 10.0
    assert at_attainment(grid, 0.5) == 10.0
    assert at_attainment(grid, 0.99) is None


def test_half_of_the_traces_are_held_out():
    traces = all_traces(0.05)
    assert sum(t.training for t in traces) * 2 == len(traces)
    assert len({t.name for t in traces}) == len(traces)
    assert all(a.arrival <= b.arrival for t in traces for a, b in zip(t.requests, t.requests[1:], strict=False))


def test_plots_hold_every_controller(tmp_path):
    pytest.importorskip("matplotlib")
    from kvern_simulator.plots import draw

    made = replace(trace(2.0, 120.0), name="short")
    found = {"one": [run(made, SETTING, "one", Static(1))], "two": [run(made, SETTING, "two", Static(2))]}
    grids = {"kv": [Score("HPA kv 0.1", 0.9, 2.0, 0.0)]}
    found["HPA kv 0.1"] = found["one"]
    for path in draw(Comparison(found, grids), [made], tmp_path):
        text = path.read_text()
        assert text.count("<path") > 10 and "HPA" in text


def test_the_planner_changes_the_size_once_where_one_request_is_too_slow_and_that_helps():
    """A strict ITL that size 1 cannot keep for prompts that interrupt answers; random arrivals, 8 a second."""
    setting = replace(SETTING, gpus=2, sizes=(1, 2), itl_slo=0.0058, maximum=4)
    requests = tuple(requests_of("strict", 1200.0, lambda t: 8.0, 8.0, lambda t: CHAT))
    made = replace(trace(1.0), name="strict", seconds=1200.0, requests=requests, maximum=4)
    auto, fixed = (
        World(made, setting, Kvern(setting, 60.0, Sizes(mode, 1, 2)), mode).run() for mode in ("Auto", "Fixed")
    )
    assert len(auto.layouts) == 1 and not fixed.layouts
    assert auto.attainment > fixed.attainment
