"""Services that share the GPUs of a namespace, and layouts that pods cannot change by themselves: the planner's size
comes with other pods, beside the old ones or in their place. No client sees an error.

Fake GPUs and the simulated device. Full runs only.
"""

from collections.abc import Callable

import kit
import pytest
import streams
from busy import Show
from kit import Client, Object, Service, condition_of, eventually, kubectl
from streams import Load
from test_8_autoscale import (
    LAID,
    LONGEST,
    STEPPED,
    ended,
    has_told_of_size_two,
    known_texts,
    ready,
    reasons,
    scaling,
    size_proves_itself,
    story,
)

Make = Callable[..., Service]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.full]

BUDGET = 4  # GPUs of the namespace; a replica has one
STREAMS = 22  # three replicas' worth


class Held:
    """GPUs that the engine pods of services have, counted whenever somebody looks."""

    def __init__(self, *services: Service) -> None:
        self.services, self.most = services, 0

    def __call__(self) -> int:
        pods = [pod for one in self.services for pod in one.pods()]
        now = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
        self.most = max(self.most, now)
        return now


def test_the_namespaces_gpus_go_to_the_higher_priority(service: Make, client: Client, show: Show) -> None:
    """Four GPUs. The lower service takes three, one is kept for the other's minimum; when that one gets its load, two
    of them change hands, never more than four are in use, and the streams of both are answered."""
    gpu = kit.merged(STEPPED, {"resources": {"gpusPerPod": 1}})
    low = service("load", **kit.merged(gpu, {"autoscaling": {"priority": 0}}))
    kubectl("-n", low.namespace, "create", "configmap", "kvern-budget", f"--from-literal=gpus={BUDGET}")
    high = service("urgent", **kit.merged(gpu, {"autoscaling": {"priority": 10}}))
    held = Held(low, high)
    loads = [Load(client, one, f"{one.name}-{one.namespace}", streams=STREAMS, tokens=100) for one in (low, high)]
    known_texts(loads[0], low.namespace, engine={"args": streams.FAST})
    loads[1].references = loads[0].references  # the same model and requests
    low.wait_ready()
    high.wait_ready()
    try:
        loads[0].start(240)
        eventually("three replicas of the lower one", lambda: held() and ready(low) == 3, 240, every=2)
        assert scaling(high)["desired"] == 1
        loads[1].start(300)
        eventually("three replicas of the higher one", lambda: held() and ready(high) == 3, 300, every=2)
        eventually("one of the lower one", lambda: held() and ready(low) == 1, 60, every=2)
        last = scaling(low)["lastDecision"]
        assert last["limitedBy"] == "namespaceBudget", last
        assert "ScalingLimited" in reasons(low)
        for load in loads:
            ended(load)
        assert held.most == BUDGET
        story(low, show)
        story(high, show)
    finally:
        for load in loads:
            load.stop()


# A pipeline of two stages: no pod changes its tensor size by itself. Each rank has the KV cache of half of the layers.
STAGED: Object = {
    "replicas": 2,
    "resources": {"gpusPerPod": 4},
    "parallelism": {"pipeline": {"size": 2}},
    "engine": {
        "maxModelLen": LONGEST,
        "args": {**streams.PACE, "kv-cache-memory-bytes": str(LONGEST * 131_072 // 2)},
    },
}
# By strategy: its bounds, then the most pods and the fewest ready ones that there may be on the way.
ROLLOUTS = {
    "Surge": ({"maxSurge": 1, "maxUnavailable": 0}, 3, 2),
    "DrainSwap": ({"maxSurge": 0, "maxUnavailable": 1}, 2, 1),
}


@pytest.mark.parametrize("strategy", list(ROLLOUTS))
def test_the_planners_size_comes_with_other_pods(service: Make, client: Client, show: Show, strategy: str) -> None:
    """Requests that hardly fit an engine: the planner wants size 2, which takes other pods, one at a time."""
    bounds, most, least = ROLLOUTS[strategy]
    spec = kit.merged(kit.merged(LAID, STAGED), {"rollout": {"strategy": strategy, **bounds}})
    one = service("load", **spec)
    load = Load(client, one, f"{strategy.lower()}-{one.namespace}", streams=2, tokens=200, knock=5)
    known_texts(load, one.namespace, engine={"args": streams.FAST})
    one.wait_ready()
    eventually("both replicas are ready", lambda: ready(one) == 2, 120)
    before = {pod["metadata"]["uid"] for pod in one.pods()}
    seen: list[tuple[int, int]] = []

    def has_size() -> bool:
        pods = one.pods()
        seen.append((len(pods), sum(condition_of(pod, "Ready") == "True" for pod in pods)))
        status = one.object()["status"]
        return bool(status["parallelism"]["current"] == 2 and len(pods) == 2 and status["readyReplicas"] == 2)

    try:
        load.start()
        eventually("size 2 in place on both", has_size, 6 * streams.STREAM_SECONDS + 240, every=1)
        size_proves_itself(one)
        ended(load)
        after = {pod["metadata"]["uid"] for pod in one.pods()}
        assert not before & after
        assert max(pods for pods, _ in seen) == most, seen
        assert min(good for _, good in seen) >= least, seen
        has_told_of_size_two(one, show)
    finally:
        load.stop()
