"""The simulated cluster around the real decisions."""

import copy
import math
from dataclasses import replace
from statistics import fmean, pvariance

import pytest

from kvern_engine.worker.sim_profile import load_profile
from kvern_operator.autoscale.layout import Sizes
from kvern_operator.autoscale.signals import Scrape
from kvern_simulator.__main__ import SETS, main
from kvern_simulator.bounds import Clairvoyant, least_hours, needs
from kvern_simulator.compare import (
    Comparison,
    Score,
    at_attainment,
    best_clairvoyant,
    best_static,
    compare,
    most_layouts,
    reversals,
    run,
    score,
)
from kvern_simulator.controllers import Hpa, Kvern, Static
from kvern_simulator.fluid import Request
from kvern_simulator.report import grid_table, held_to, table, verdict
from kvern_simulator.sets import CHAT, RAG, fleet, large, layouts, usual
from kvern_simulator.traces import Trace, Trouble, requests_of
from kvern_simulator.world import Held, Seen, Setting, Wanted, World

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
    assert [n.split()[0] for n in found] == ["Kvern", "HPA", "HPA", "static", "clairvoyant"]
    text = table(made, traces)
    assert "| b (held out) |" in text
    whole = score("", found["Kvern"], traces)
    assert f"**{whole.attainment:.2%}, {whole.gpu_hours:.2f} h**" in text.splitlines()[-1]
    assert all(s.gpu_hours > 0 for scores in made.grids.values() for s in scores)
    assert verdict(made, traces)[0].startswith(f"Kvern keeps the SLO of {whole.attainment:.2%} of all")
    assert grid_table(made).count("(best on the training half)") == 2
    assert held_to(made, traces)[0].startswith("Removals within 300 s after an addition: Kvern 0, ")
    assert best_static(traces[0], SETTING, 0.9).gpu_seconds == pytest.approx(300.0, abs=2.0)


def test_hours_at_an_attainment_lie_between_the_targets_beside_it():
    grid = [Score("a", 0.90, 10.0, 0.0), Score("b", 0.98, 20.0, 0.0), Score("worse", 0.97, 30.0, 0.0)]
    assert at_attainment(grid, 0.94) == pytest.approx(15.0)
    assert at_attainment(grid, 0.90) == 10.0
    assert at_attainment(grid, 0.5) == 10.0
    assert at_attainment(grid, 0.99) is None


@pytest.mark.parametrize("name", list(SETS))
def test_the_command_writes_what_it_says(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    only = {"usual": "steady", "large": "1000-chat", "layouts": "strict", "fleet": "fleet-0001"}[name]
    assert main(["--set", name, "--hours", "0.01", "--only", only, "--jobs", "1", "--out", str(tmp_path)]) == 0
    text = (tmp_path / f"table{SETS[name].suffix}.md").read_text()
    assert f"| {only}" in text and "| least |" in text and text.strip() in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.svg"))) == 1 + SETS[name].draws


def test_a_trace_that_is_not_there_is_said(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nonsense", "--hours", "0.001"])
    assert "no trace of the set usual begins with 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("make", [usual, large, layouts, lambda hours: fleet(40, hours)])
def test_half_of_the_traces_are_held_out(make):
    traces = make(0.02)
    assert sum(t.training for t in traces) * 2 == len(traces)
    assert len({t.name for t in traces}) == len(traces)
    assert all(a.arrival <= b.arrival for t in traces for a, b in zip(t.requests, t.requests[1:], strict=False))


def test_a_trace_gets_to_another_process_as_it_is():
    (made,) = [t for t in layouts(0.02) if t.name == "small-cards"]
    again = copy.copy(made)
    assert again == made and again.requests is not made.requests and again.service.sizes == (1, 2, 4)


# ---------------------------------------------------------------- each k-th request and pod


def test_of_many_arrivals_each_kth_is_as_irregular_as_the_whole():
    """A count fluctuates by its root: that of a tenth, times ten, must do so as the whole does and not by its own."""
    for scale in (1, 10):
        arrivals = requests_of(f"s{scale}", 2000.0, lambda t: 50.0, 50.0, lambda t: CHAT, scale)
        counts = [0] * 200
        for request in arrivals:
            counts[int(request.arrival / 10)] += scale
        assert fmean(counts) == pytest.approx(500, rel=0.02)
        assert pvariance(counts) == pytest.approx(500, rel=0.35)


@pytest.mark.parametrize("lengths", [CHAT, RAG], ids=["chat", "rag"])
def test_a_scaled_down_service_is_decided_and_fares_like_the_whole(lengths):
    """Some sixty replicas, simulated one by one and in fives: rising load, the same decisions within a few percent."""
    high = 360.0 if lengths == CHAT else 150.0

    def rate(t: float) -> float:
        return high * min(0.5 + t / 400, 1.0)

    found = []
    for scale in (1, 5):
        requests = tuple(requests_of("rising", 240.0, rate, high, lambda t: lengths, scale))
        made = Trace("rising", 240.0, requests, 60.0, (), False, 200, 40, scale)
        setting = SETTING.of(made)
        found.append(World(made, setting, Kvern(setting, 60.0), "Kvern").run())
    whole, fifth = found
    assert fifth.requests == pytest.approx(whole.requests, rel=0.03)
    assert fifth.gpu_seconds == pytest.approx(whole.gpu_seconds, rel=0.10)
    assert fifth.attainment == pytest.approx(whole.attainment, abs=0.03)
    assert max(m[2] for m in fifth.moves) == pytest.approx(max(m[2] for m in whole.moves), rel=0.10)


def test_controllers_see_every_replica_that_a_pod_stands_for():
    made = replace(trace(4.0, 60.0), scale=10, maximum=40, replicas=25)
    seen_pods = []

    class Looks(Static):
        def decide(self, seen: Seen):
            seen_pods.append((len(seen.pods), len(seen.scrapes), len({p.uid for p in seen.pods})))
            return super().decide(seen)

    setting = SETTING.of(made)
    result = World(made, setting, Looks(25, 5.0), "looks").run()
    assert set(seen_pods) == {(25, 25, 25)}
    assert result.requests == 2400
    assert result.gpu_seconds == pytest.approx(30 * 60.0, rel=0.02)  # three pods of ten: whole pods are paid for


# ---------------------------------------------------------------- what nobody can do better


def test_nobody_keeps_the_slo_with_less_than_the_least():
    made = trace(9.0, 300.0)
    setting = SETTING.of(made)
    least, kept = least_hours(made, setting), best_static(made, SETTING, 1.0)
    knowing = best_clairvoyant(made, SETTING, 0.99)
    assert kept.attainment > 0.99 and knowing.attainment > 0.98
    assert least < knowing.gpu_seconds / 3600 <= kept.gpu_seconds / 3600 * 1.05
    assert max(needs(made, setting, 1)) == pytest.approx(9.0 * least * 3600 / 300 / 9.0, rel=0.1)


def test_a_clairvoyant_has_started_what_is_needed_when_it_is_needed():
    needed = [1, 1, 1, 1, 4, 4, 1, 1, 1, 1]
    knowing = Clairvoyant(needed, start=60.0)
    at = {now: knowing.decide(seen([0.1], 1, now)).replicas for now in (0.0, 55.0, 60.0, 170.0, 200.0, 230.0)}
    assert at == {0.0: 1, 55.0: 4, 60.0: 4, 170.0: 4, 200.0: 4, 230.0: 1}


def test_the_real_scheduler_in_each_engine_gives_about_the_same():
    made = trace(3.0, 120.0)
    coarse, exact = (
        World(made, setting, Kvern(setting, 60.0), "Kvern").run() for setting in (SETTING, replace(SETTING, exact=True))
    )
    assert exact.requests == coarse.requests
    assert exact.attainment == pytest.approx(coarse.attainment, abs=0.03)
    assert exact.gpu_seconds == pytest.approx(coarse.gpu_seconds, rel=0.1)


@pytest.mark.parametrize("exact", [False, True])
def test_layouts_change_one_pod_after_the_other_and_nothing_is_lost(exact):
    made = trace(3.0, 60.0)
    setting = replace(SETTING, gpus=2, sizes=(1, 2), replicas=3, exact=exact, change_seconds=4.0)
    away = []

    class Changes(Static):
        def decide(self, seen: Seen):
            away.append(sum(not p.ready(seen.now) for p in seen.pods))
            return Wanted(3, 2 if seen.now >= 20 else 1)

    world = World(made, setting, Changes(3, 1.0), "changes")
    result = world.run()
    assert max(away) == 1 and sum(away) >= 9  # three times four seconds, but for rounding
    assert {e.layout.tensor for p in world._pods for e in p.engines} == {2}
    assert all(r.end < math.inf for r in world._all) and result.layouts == [20.0]


def test_layout_changes_within_two_hours_are_counted():
    result = run(trace(1.0, 10.0), SETTING, "one", Static(1))
    assert most_layouts(result) == 0
    result.layouts = [0.0, 100.0, 7200.0, 7250.0]
    assert most_layouts(result) == 3


def test_plots_hold_every_controller(tmp_path):
    pytest.importorskip("matplotlib")
    from kvern_simulator.plots import draw

    made = replace(trace(2.0, 120.0), name="short")
    found = {"one": [run(made, SETTING, "one", Static(1))], "two": [run(made, SETTING, "two", Static(2))]}
    grids = {"kv": [Score("HPA kv 0.1", 0.9, 2.0, 0.0)]}
    found["HPA kv 0.1"] = found["one"]
    for path in draw(Comparison(found, grids, [0.1]), [made], tmp_path):
        text = path.read_text()
        assert text.count("<path") > 10 and "HPA" in text
    (alone,) = draw(Comparison(found, grids, [0.1]), [made], tmp_path, "-x", panels=False)
    assert alone.name == "totals-x.svg"


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
