"""The loop over several services: a namespace's GPUs shared, what is not known, whose answer counts."""

import math
from dataclasses import replace
from itertools import pairwise

from kvern_operator.api.types import KIND
from kvern_operator.autoscale.budgets import gpus_of_orphans, gpus_of_others
from kvern_operator.autoscale.latency import Fit
from kvern_operator.autoscale.layout import Sizes
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.scrape import Round, Target
from kvern_operator.autoscale.signals import Scrape
from kvern_operator.autoscale.subject import SeenReplica, Subject
from kvern_operator.autoscale.terms import Full, Limits
from kvern_operator.mirror import Mirror

WALL = 1_700_000_000.0


class Counted:
    def __init__(self) -> None:
        self.failures = 0

    def decided(self, kind: str, cause: str) -> None: ...

    def scraped(self, answers: int, failures: int, seconds: float) -> None:
        self.failures += failures

    def became_ready(self, seconds: float) -> None: ...


class Space:
    """Two or more services of one namespace, every one as busy as `used` of each replica and `waiting` say."""

    def __init__(self, budget: int | None) -> None:
        self.budgets: dict[str, int | None] = {"team": budget}
        self.complaint = ""
        self.now, self.jumped, self.silent = 100.0, 0.0, set()
        self.used: dict[str, float] = {}
        self.loop = Autoscaler(
            self._scrape,
            self,
            Counted(),
            lambda key: None,
            clock=lambda: self.now,
            wall=lambda: WALL + self.now + self.jumped,
        )

    async def read(self, namespaces):
        return self.budgets

    def wrong(self, namespace: str) -> str:
        return self.complaint

    async def _scrape(self, targets) -> Round:
        engines, failures = {}, {}
        for target in targets:
            if target.uid in self.silent:
                failures[target.uid] = "no answer in time"
                continue
            used = self.used.get(target.name.split("-")[0], 0.0)
            over = max(used - 1000.0, 0.0)
            engines[target.uid] = Scrape(target.uid, self.now, 1000.0, min(used, 1000.0), 1.0, over / 512)
        return Round(engines, {}, failures)

    def put(self, name: str, current: int, ready: int | None = None, held: int | None = None, **more: object) -> None:
        ready = current if ready is None else ready
        limits = Limits(minimum=1, maximum=8, gpus=1)
        targets = [Target(f"{name}{i}", f"{name}-r{i}-0", "h:1") for i in range(current)]
        replicas = tuple(
            SeenReplica(t.uid, i < ready, WALL, False, t if i < ready else None) for i, t in enumerate(targets)
        )
        fields = {"priority": 0, "limits": limits, **more}
        subject = Subject(
            f"uid-{name}", "team", True, sizes=Sizes(), current=current, replicas=replicas, routed=False,
            held=current if held is None else held, **fields,
        )  # fmt: skip
        self.loop.watch(("team", name), subject)

    async def cycle(self, times: int = 1) -> dict[str, int]:
        for _ in range(times):
            self.now += 5.0
            await self.loop.cycle()
        return {key[1]: made.both.replicas.target for key, made in self.loop._made.items()}


async def test_the_higher_priority_is_served_first_and_the_budget_is_kept():
    space = Space(budget=6)
    space.used = {"high": 8000.0, "low": 8000.0}
    space.put("high", 1, priority=10)
    space.put("low", 1)
    made = await space.cycle()
    assert made["high"] > 1 and sum(made.values()) <= 6
    assert made == {"high": 5, "low": 1}
    limited = space.loop._made[("team", "low")].both.replicas
    assert limited.limited_by == "namespaceBudget" and limited.wanted > 1


async def test_equals_end_up_alike():
    space = Space(budget=6)
    space.used = {"one": 8000.0, "two": 8000.0}
    space.put("one", 1)
    space.put("two", 1)
    assert await space.cycle() == {"one": 3, "two": 3}


async def test_nothing_is_given_before_another_has_let_go():
    space = Space(budget=6)
    space.used = {"high": 8000.0, "low": 300.0}
    space.put("high", 1, priority=10)
    space.put("low", 5)
    made = await space.cycle()
    assert made["low"] == 1 and made["high"] == 1  # the lower one gives way; its replicas still hold their devices
    space.put("low", 1, held=3)
    made = await space.cycle()
    assert made["high"] == 3  # two drain still
    space.put("high", 3, priority=10)
    space.put("low", 1)
    assert (await space.cycle())["high"] == 5


async def test_whose_number_others_decide_comes_first():
    space = Space(budget=6)
    space.used = {"mine": 8000.0}
    space.put("mine", 1, priority=10)
    space.put("fixed", 4, limits=Limits(mode="External", replicas=4, minimum=1, maximum=8, gpus=1))
    assert (await space.cycle())["mine"] == 2


async def test_without_the_budgets_word_nothing_is_decided():
    space = Space(budget=None)
    space.used = {"one": 8000.0}
    space.budgets = {}
    space.put("one", 1)
    space.put("cpu", 1, limits=Limits(minimum=1, maximum=8, gpus=0))
    space.used["cpu"] = 8000.0
    made = await space.cycle()
    assert "one" not in made and made["cpu"] == 8
    space.budgets = {"team": None}  # there is none
    assert (await space.cycle())["one"] == 8


async def test_a_budget_that_is_no_number_is_said_where_people_look():
    space = Space(budget=None)
    space.budgets, space.complaint = {}, 'ConfigMap kvern-budget: gpus: "many" is not a whole number of GPUs'
    space.put("one", 2)
    assert await space.cycle() == {"one": 2}
    made = space.loop._made[("team", "one")].both.replicas
    assert (made.kind, made.limited_by) == ("hold", "namespaceBudget") and space.complaint in made.reason


async def test_in_a_namespace_with_a_budget_fewer_go_for_their_own_reason_and_one_at_a_time():
    """What a service gives up by itself is no bound of the budget's: its words, its time between two."""
    space = Space(budget=6)
    space.used = {"one": 100.0}
    current, downs = 4, []
    while space.now < 700.0:
        space.put("one", current)
        await space.cycle()
        made = space.loop._made[("team", "one")].both.replicas
        if made.target < current:
            downs.append((space.now, made.kind, made.limited_by))
        current = made.target
    assert [(kind, limit) for _, kind, limit in downs] == [("down", None)] * 3
    assert all(after[0] - before[0] >= 30.0 for before, after in pairwise(downs))


async def test_what_has_been_decided_is_not_given_to_another_before_it_is_made():
    space = Space(budget=6)
    space.used = {"low": 8000.0}
    space.put("high", 1, priority=10)
    space.put("low", 1)
    assert await space.cycle() == {"high": 1, "low": 5}
    space.put("low", 5, ready=1, held=1)  # decided, and on its way
    space.used["high"] = 8000.0
    assert await space.cycle() == {"high": 1, "low": 1}
    space.put("low", 1)
    assert (await space.cycle())["high"] == 5


async def test_what_no_pass_has_reached_yet_is_not_given_away():
    """A new leader has been through one of two services: what the other one holds is not free for that."""
    documents = {
        ("team", "two"): {"status": {"capacity": {"gpus": 4}}},
        ("other", "three"): {"status": {"capacity": {"gpus": 9}}},
        ("team", "new"): {},
    }
    space = Space(budget=6)
    space.loop._unseen = lambda known: gpus_of_others(documents, documents.get, known)
    space.used = {"one": 8000.0}
    space.put("one", 1)
    assert await space.cycle() == {"one": 2}
    space.put("two", 1, held=1)  # has been reached, and let go
    assert (await space.cycle())["one"] == 5


def test_pods_that_drain_after_their_service_was_deleted_have_their_gpus():
    """An object without a service: its pods are there for as long as they drain."""

    def pod(uid: str, phase: str = "Running", node: str | None = "n1", gpus: str = "2") -> dict:
        metadata = {"name": uid, "namespace": "team", "uid": uid, "resourceVersion": "1"}
        metadata["labels"] = {"kvern.dev/service": "gone"}
        containers = [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": gpus}}}, {"name": "side"}]
        spec = {"nodeName": node, "containers": containers}
        return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}

    mirror = Mirror()
    for one in (pod("a"), pod("b", gpus="4"), pod("c", phase="Failed"), pod("d", phase="Pending", node=None)):
        mirror.put("Pod", one)
    assert gpus_of_orphans(mirror.orphans(), mirror.pods) == {("team", "gone"): 6}
    mirror.remove("Pod", "b")
    assert gpus_of_orphans(mirror.orphans(), mirror.pods) == {("team", "gone"): 2}
    metadata = {"name": "gone", "namespace": "team", "uid": "s", "resourceVersion": "2"}
    mirror.put(KIND, {"metadata": metadata, "spec": {}})  # of that name again: what it holds is its own
    assert mirror.orphans() == []


async def test_the_figures_of_the_old_size_are_forgotten_when_the_last_replica_has_the_new_one():
    space = Space(budget=None)
    space.put("one", 2, size=2)
    await space.cycle()
    known = space.loop._known[("team", "one")]
    for size, kept in ((2, True), (None, True), (4, False)):  # None: they differ
        known.signals.fit, known.memory = Fit().add(8.0, 0.01, space.now), replace(known.memory, full=(Full(1.0, 1.0),))
        space.put("one", 2, size=size)
        await space.cycle()
        assert (bool(known.signals.fit.bins), bool(known.memory.full)) == (kept, kept), size


async def test_time_in_which_a_service_was_suspended_is_no_idle_time():
    space = Space(budget=None)
    space.put("one", 1)
    await space.cycle()
    suspended = space.loop._subjects[("team", "one")]
    space.loop.watch(("team", "one"), Subject(**{**suspended.__dict__, "live": False}))
    await space.cycle(500)
    space.put("one", 1, ready=0, limits=Limits(minimum=0, maximum=8, gpus=1))
    assert await space.cycle() == {"one": 1}


async def test_an_answer_counts_for_the_pod_that_gave_it_alone():
    space = Space(budget=None)
    space.used = {"one": 8000.0}
    space.put("one", 1)
    await space.cycle(2)
    signals = space.loop._known[("team", "one")].signals
    assert signals.load("one0", space.now) is not None
    subject = space.loop._subjects[("team", "one")]
    replaced = SeenReplica("another", True, WALL, False, Target("another", "one-r0-0", "h:1"))
    space.silent = {"another"}
    space.loop.watch(("team", "one"), Subject(**{**subject.__dict__, "replicas": (replaced,)}))
    await space.cycle()
    assert signals.load("one0", space.now) is None and signals.load("another", space.now) is None
    made = space.loop._made[("team", "one")].both.replicas
    assert made.kind == "hold" and made.limited_by == "missingMetrics"


async def test_a_service_that_is_gone_is_forgotten():
    space = Space(budget=None)
    space.put("one", 1)
    await space.cycle()
    space.loop.watch(("team", "one"), None)
    assert await space.cycle() == {} and not space.loop._known and not space.loop.figures()


async def test_what_is_shown():
    space = Space(budget=None)
    space.used = {"one": 600.0}
    space.put("one", 2)
    await space.cycle(2)
    found = space.loop.figures()[("team", "one")]
    assert (found.desired, found.ready) == (2, 2) and found.demand == 1200.0
    assert found.capacity is not None and math.isclose(found.capacity, 1600.0)


async def test_a_clock_that_jumps_makes_no_replica_late():
    """One that loads is late when it takes far longer than usual, by this process's clock."""
    decisions = []
    for jump in (0.0, 7200.0, -7200.0):
        space = Space(budget=None)
        space.used = {"one": 8000.0}
        space.put("one", 2, ready=1)
        await space.cycle()
        space.jumped = jump
        await space.cycle()
        decisions.append(space.loop._made[("team", "one")].both.replicas)
    assert decisions[0] == decisions[1] == decisions[2]
