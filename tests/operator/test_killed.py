"""The operator is killed (SIGKILL) after each single write of what it does, and another process goes on: what comes of
it is the same. Against the API server in this process; the rest of a cluster is `turn`. An ordinary run tries every
fourth write; KVERN_TEST_FULL=1 each.
"""

import copy
import json
import os

import pytest
from effects import SERVICE_PATH, Bench, path

from kvern_operator.desired import meta

TURNS = 40
EACH = 1 if os.environ.get("KVERN_TEST_FULL") == "1" else 4


class Killed(BaseException):
    """No `except Exception` of the operator may get hold of it: SIGKILL is not handled either."""


def kill_after(bench: Bench, writes: int) -> None:
    """The process dies as soon as the API server has answered its write number `writes`."""
    left = [writes]

    def wrote(verb: str, where: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            bench.client.may_write = lambda: False  # whatever else is on its way
            raise Killed

    bench.client.wrote = wrote


def turn(bench: Bench) -> None:
    """Controllers and kubelets: StatefulSets have their pod, which is ready; pods of what is gone go."""
    api, wanted = bench.api, {"smol-router-abc"} if "smol-router" in bench.api.of("deployments") else set()
    wanted |= {f"{name}-0" for name in api.of("statefulsets")}
    for name in set(api.of("pods")) - wanted:
        api.remove(path("Pod", name))
    for name in sorted(wanted - set(api.of("pods"))):
        bench.run_pod(name)
    bench.pump()


def desired_state(bench: Bench) -> dict[str, object]:
    """Everything but what differs between two runs of the same: versions, UIDs, times, who was there before."""
    found = {}
    for where, obj in bench.api.objects.items():
        kind = obj["kind"]
        if kind in ("Event", "Pod", "Lease"):
            continue
        bare = copy.deepcopy(obj)
        for name in ("resourceVersion", "uid", "annotations", "generation"):
            bare["metadata"].pop(name, None)
        if where.endswith("configmaps/smol-router"):
            listed = json.loads(bare["data"]["replicas.json"])["replicas"]
            bare["data"] = [{**entry, "uid": ""} for entry in listed]
        if kind == "InferenceService":
            status = bare["status"]
            status.pop("autoscaling"), status.pop("startup", None)
            for condition in status["conditions"]:
                condition.pop("lastTransitionTime")
        found[where] = bare
    text = json.dumps(found, sort_keys=True)
    # Numbers of replicas may differ: what is compared is how many there are, and of which revision.
    for i, name in enumerate(sorted(bench.api.of("statefulsets"))):
        text = text.replace(f"{name}-", f"REPLICA{i}-").replace(f'{name}"', f'REPLICA{i}"')
    return json.loads(text)


async def until_settled(bench: Bench) -> int:
    """Passes until one writes nothing. Returns how many writes there were; raises Killed."""
    first = len(bench.api.writes())
    for _ in range(TURNS):
        turn(bench)
        before = len(bench.api.writes())
        await bench.work()
        turn(bench)
        if len(bench.api.writes()) == before and not leaving(bench):
            return before - first
    raise AssertionError(f"not settled: {bench.api.writes()[-10:]}")


def leaving(bench: Bench) -> bool:
    return any(meta.annotation(o, meta.DRAINING_SINCE) for o in bench.api.of("statefulsets").values())


async def fresh(bench: Bench) -> Bench:
    """The next process: nothing but what the API server knows."""
    await bench.close()
    again = Bench(bench.api)
    again.pump()
    return again


AT_ONCE = {"rollout": {"drainTimeoutSeconds": 0}}
NEXT = {"engine": {"maxModelLen": 512}}
STORIES = {
    "created": ({"replicas": 0}, {"replicas": 2}),
    "scaled down": ({"replicas": 3}, {"replicas": 1}),
    "rolled out": ({"replicas": 2}, {"replicas": 2, **NEXT}),
    "swapped": ({"replicas": 2}, {"replicas": 2, **NEXT, "rollout": {"strategy": "DrainSwap", **AT_ONCE["rollout"]}}),
    "suspended": ({"replicas": 2}, {"replicas": 2, "suspend": True}),
    "without router": ({"replicas": 1}, {"replicas": 1, "router": {"mode": "None"}}),
}


@pytest.mark.parametrize("story", list(STORIES))
async def test_killed_after_any_write_the_end_is_the_same(api, story):
    before, after = STORIES[story]
    bench = Bench(api)
    bench.create({**AT_ONCE, **before})
    await until_settled(bench)
    start = copy.deepcopy(api.objects)
    bench.create({**AT_ONCE, **after}, generation=2)
    writes = await until_settled(bench)
    wanted = desired_state(bench)
    assert writes > 3
    deaths, tried = 0, range(1 + len(story) % EACH, writes + 1, EACH)
    for k in tried:
        for where in set(api.objects) - set(start):
            api.remove(where)
        for where, obj in start.items():
            api.put(where, {**obj, "metadata": {**obj["metadata"]}})
        bench = await fresh(bench)
        bench.create({**AT_ONCE, **after}, generation=2)
        kill_after(bench, k)
        try:
            await until_settled(bench)
        except Killed:
            deaths += 1
        bench = await fresh(bench)
        await until_settled(bench)
        assert desired_state(bench) == wanted, f"killed after write {k} of {writes}"
    assert deaths > len(tried) // 2
    await bench.close()


async def test_an_operator_that_dies_after_every_single_write_gets_there(api):
    bench = Bench(api)
    bench.create({**AT_ONCE, "replicas": 2})
    deaths = 0
    for _ in range(100):
        kill_after(bench, 1)
        try:
            await until_settled(bench)
            break
        except Killed:
            deaths += 1
            bench = await fresh(bench)
    # A pass applies what does not depend on each other at once, so that the last of such writes still arrive.
    assert deaths > 2 and set(api.of("statefulsets")) == {"smol-r0", "smol-r1"}
    assert bench.condition("Ready") == ("True", "AllReplicasReady")
    assert bench.forgotten == [] and api.objects[SERVICE_PATH]["status"]["replicas"] == 2
    await bench.close()
