"""Figures that no pod should give, and a service whose decision fails: neither keeps the others from theirs."""

import pytest

from kvern_operator.autoscale import cycle
from kvern_operator.autoscale.layout import Sizes
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.readings import read_engine, read_router
from kvern_operator.autoscale.scrape import Round, Target
from kvern_operator.autoscale.signals import Scrape
from kvern_operator.autoscale.subject import SeenReplica, Subject
from kvern_operator.autoscale.terms import Limits

TEXT = """vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:num_preemptions_total{engine="0"} 1.0
"""


@pytest.mark.parametrize(
    ("said", "instead", "words"),
    [
        ('perc{engine="0"} 0.25', 'perc{engine="0"} NaN', "vllm:kv_cache_usage_perc is nan"),
        ('running{engine="0"} 3.0', 'running{engine="0"} +Inf', "vllm:num_requests_running is inf"),
        ('preemptions_total{engine="0"} 1.0', 'preemptions_total{engine="0"} -1', "vllm:num_preemptions_total is -1"),
        ('num_gpu_blocks="100"', 'num_gpu_blocks="nan"', "no engine has said what it holds"),
        ('num_gpu_blocks="100"', 'num_gpu_blocks="0"', "no engine has said what it holds"),
    ],
)
def test_a_figure_that_cannot_be_is_no_answer(said: str, instead: str, words: str) -> None:
    assert said in TEXT
    with pytest.raises(ValueError, match=words):
        read_engine("u", 0.0, TEXT.replace(said, instead))


def test_what_is_not_read_may_be_anything() -> None:
    assert read_engine("u", 0.0, TEXT + 'go_gc_seconds{quantile="0.5"} NaN\n').running == 3.0
    with pytest.raises(ValueError, match="kvern_router_held_requests is nan"):
        read_router("kvern_router_held_requests NaN\n")


class Tally:
    def decided(self, kind: str, cause: str) -> None: ...

    def scraped(self, answers: int, failures: int, seconds: float) -> None: ...

    def became_ready(self, seconds: float) -> None: ...


class Budgets:
    async def read(self, namespaces):
        return dict.fromkeys(namespaces, 6)


async def test_a_decision_that_fails_holds_up_nobody_else(monkeypatch, caplog) -> None:
    """AIBrix 1032: one bad pod blocks scaling. Beside a shared budget, where each service's wish counts for all."""

    async def scrape(targets) -> Round:
        return Round({t.uid: Scrape(t.uid, 100.0, 1000.0, 1000.0, 1.0, 8.0) for t in targets}, {}, {})

    loop = Autoscaler(scrape, Budgets(), Tally(), lambda key: None, clock=lambda: 100.0, wall=lambda: 1_700_000_000.0)
    for name in ("bad", "good"):
        target = Target(f"uid-{name}-0", f"{name}-r0-0", "h:1")
        seen = SeenReplica(target.uid, True, 1_700_000_000.0, False, target)
        limits = Limits(minimum=1, maximum=8, gpus=1, queue_target=20 if name == "bad" else 5)
        subject = Subject(
            f"uid-{name}", "team", True, sizes=Sizes(), current=1, replicas=(seen,), routed=False, held=1,
            priority=0, limits=limits,
        )  # fmt: skip
        loop.watch(("team", name), subject)
    decide = cycle.decide

    def odd(limits, *rest):
        if limits.queue_target == 20:
            raise ZeroDivisionError("nobody foresaw this")
        return decide(limits, *rest)

    monkeypatch.setattr(cycle, "decide", odd)
    await loop.cycle()
    assert loop._made.keys() == {("team", "good")}
    assert loop._made[("team", "good")].both.replicas.target > 1
    assert "nothing is decided for team/bad" in caplog.text and "nobody foresaw this" in caplog.text
