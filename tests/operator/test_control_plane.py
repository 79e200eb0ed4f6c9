"""The operator as a process against a real API server: killed, frozen, doubled, cut off, set back in time, upgraded.

What a fake API server might have got wrong: conflicts, preconditions, watches, garbage collection, terminating pods.
Some minutes: with KVERN_TEST_FULL=1, where `e2e/cluster/offline/binaries.sh control` has been run.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import time
from datetime import UTC, datetime

import pytest
import yaml
from control_plane import CRD, CRDS, ROOT, Plane, World, load_apiserver

from kvern_operator.api.status import AutoscalingStatus, Decision, InferenceServiceStatus
from kvern_operator.apply import Executor
from kvern_operator.kube import ApiError, path_of
from kvern_operator.mirror import Mirror

TOOLS = load_apiserver().TOOLS
MISSING = [n for n in ("etcd", "kube-apiserver", "kube-controller-manager") if not (TOOLS / n).exists()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.environ.get("KVERN_TEST_FULL") != "1", reason="takes minutes: KVERN_TEST_FULL=1"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not in {TOOLS}: e2e/cluster/offline/binaries.sh control"
    ),
]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    plane = Plane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.stop()


@pytest.fixture
async def world(plane):
    async with World(plane, f"team-{next(_numbers)}") as world:
        yield world


def writes_of_operators(plane: Plane, namespace: str) -> list[str]:
    """From the API server's audit log: what was written in a namespace by kvern-operator."""
    found = []
    for line in (plane.folder / "audit.log").read_text().splitlines():
        event = json.loads(line)
        about = event.get("objectRef", {})
        ours = event.get("userAgent", "").startswith("kvern-operator")
        if ours and about.get("namespace") == namespace and about.get("resource") not in ("leases", "events"):
            found.append(f"{event['verb']} {about['resource']}/{about.get('name')} {event['responseStatus']['code']}")
    return found


async def test_a_service_comes_up_and_then_nothing_is_written(plane, world):
    world.operator()
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    await asyncio.sleep(3)
    before = writes_of_operators(plane, world.namespace)
    assert before
    await asyncio.sleep(12)  # a resync
    assert writes_of_operators(plane, world.namespace) == before


async def test_a_decision_without_numbers_follows_one_with_them(plane, world):
    """Maps of a status: what server-side apply makes of one whose entries are all gone must be valid, too."""
    await world.apply()
    executor = Executor(world.client, Mirror(), None)
    for inputs, reason in (({"demandTokens": "12"}, "numbers"), ({}, "spec.replicas is 2"), ({"a": "1"}, "again")):
        document = await world.service()
        made = Decision(time=datetime.now(UTC), from_=1, to=2, reason=reason, inputs=inputs)
        status = InferenceServiceStatus(autoscaling=AutoscalingStatus(last_decision=made, history=[made]))
        await executor.write_status((world.namespace, "smol"), document, status)
        found = (await world.service())["status"]["autoscaling"]
        assert found["lastDecision"]["reason"] == reason
        assert found["lastDecision"].get("inputs", {}) == inputs
        assert found["history"][0].get("inputs", {}) == inputs


async def test_on_one_gpu_the_new_pod_is_made_when_the_old_one_is_gone(plane, world):
    """A pod that is terminating holds its GPU: no pod of ours ever waits for a node here."""
    world.gpus, world.linger = 1, 3.0
    await world._heartbeat()
    world.operator()
    await world.apply(replicas=1)
    await world.until(world.is_settled)
    await world.apply(replicas=1, engine={"maxModelLen": 512})
    await world.until(lambda: _says(world, "Progressing", "once smol-r0-0 has ended"))
    await world.until(world.is_settled)
    assert (world.most_engines, world.overbooked) == (1, [])


async def test_with_a_gpu_to_spare_nobody_is_missed(plane, world):
    world.gpus = 3
    await world._heartbeat()
    world.operator()
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    world.least_ready = 2
    await world.apply(replicas=2, engine={"maxModelLen": 512})
    await world.until(world.is_settled)
    assert (world.least_ready, world.most_held, world.overbooked) == (2, 3, [])


async def _says(world: World, type_: str, words: str) -> bool:
    conditions = (await world.service())["status"]["conditions"]
    return any(c["type"] == type_ and words in c["message"] for c in conditions)


async def test_a_bad_revision_stops_and_the_old_spec_brings_back_what_never_left(plane, world):
    world.operator()
    world.bad = lambda pod: "513" in pod["spec"]["containers"][0].get("args", ())
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    before = {p["metadata"]["uid"] for p in await world.pods()}
    await world.apply(replicas=2, engine={"maxModelLen": 513})
    await world.until(lambda: _says(world, "Progressing", "stalled: engine smol-r2-0: "))
    await asyncio.sleep(4)
    found = (await world.service())["status"]
    conditions = {c["type"]: c for c in found["conditions"]}
    assert conditions["Available"]["status"] == "True" and "ValueError: no such layer" in conditions["Ready"]["message"]
    assert before <= {p["metadata"]["uid"] for p in await world.pods()}
    events = await world.items("/apis/events.k8s.io/v1/{ns}/events")
    said = [e for e in events if e["regarding"]["kind"] == "InferenceService" and e["type"] == "Warning"]
    assert any("no such layer" in e["note"] for e in said), said
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    assert {p["metadata"]["uid"] for p in await world.pods()} == before


async def test_a_drain_waits_for_what_is_in_flight_and_is_taken_back(plane, world):
    world.operator()
    await world.apply(replicas=2, rollout={"drainTimeoutSeconds": 60})
    await world.until(world.is_settled)
    world.in_flight = {"smol-r0-0": 5, "smol-r1-0": 2}
    await asyncio.sleep(6)  # it is asked every five seconds
    await world.apply(replicas=1, rollout={"drainTimeoutSeconds": 60})
    await world.until(lambda: _says(world, "Progressing", "1 draining (smol-r1 until "))
    await world.until(lambda: any(world.draining.values()))
    await asyncio.sleep(3)
    assert len(await world.pods()) == 2
    await world.apply(replicas=2, rollout={"drainTimeoutSeconds": 60})
    await world.until(world.is_settled)
    assert not any(world.draining.values())
    await world.apply(replicas=1, rollout={"drainTimeoutSeconds": 60})
    await world.until(lambda: any(world.draining.values()))
    world.in_flight = {"smol-r0-0": 5}
    await world.until(world.is_settled)
    assert [p["metadata"]["name"] for p in await world.pods()] == ["smol-r0-0"]


async def test_killed_again_and_again_it_gets_there(plane, world):
    """SIGKILL at random moments while a service is made, scaled, revised and scaled down."""
    operator, chance, kills = world.operator(), random.Random(7), 0
    steps = [
        {"replicas": 2},
        {"replicas": 3, "engine": {"maxModelLen": 512}},
        {"replicas": 1, "engine": {"maxModelLen": 512}},
        {"replicas": 2, "engine": {"maxModelLen": 1024}},
    ]
    for step in steps:
        await world.apply(**step)
        for _ in range(5):
            await asyncio.sleep(chance.uniform(0.8, 3.0))
            operator.signal(signal.SIGKILL)
            kills += 1
            await world.until(lambda n=kills: len(operator.exits) == n and operator.process.poll() is None)
        await world.until(world.is_settled, 120)
    assert operator.exits == [-signal.SIGKILL] * kills
    assert len(await world.items("/apis/apps/v1/{ns}/statefulsets")) == 2


async def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes_up(plane, world):
    """Two operators for a moment: the other one has taken over, and scaled meanwhile."""
    first = world.operator("op-1")
    await world.apply(replicas=1)
    await world.until(world.is_settled)
    first.signal(signal.SIGSTOP)
    second = world.operator("op-2")
    await world.apply(replicas=2, engine={"maxModelLen": 512})
    await world.until(world.is_settled, 120)
    await world.apply(replicas=3, engine={"maxModelLen": 512})
    first.signal(signal.SIGCONT)
    await world.until(world.is_settled, 120)
    await world.until(lambda: first.exits == [1])
    assert second.exits == [] and "the lease is lost" in first.log


async def test_an_api_server_that_hangs_and_one_that_is_gone(plane, world):
    operator = world.operator()
    await world.apply(replicas=1)
    await world.until(world.is_settled)
    plane.signal("kube-apiserver", signal.SIGSTOP)
    await asyncio.sleep(20)
    plane.signal("kube-apiserver", signal.SIGCONT)
    await world.apply(replicas=2)
    await world.until(world.is_settled, 120)
    assert operator.exits == [1]  # its lease has run out: what starts next knows nothing old
    plane.end("kube-apiserver")
    await asyncio.sleep(5)
    plane.begin("kube-apiserver")
    await plane.answers()
    await world.apply(replicas=1)
    await world.until(world.is_settled, 120)
    assert all(p["metadata"]["name"].startswith("smol-r") for p in await world.pods())


async def test_etcd_restored_from_a_backup(plane, world):
    """Taken when there were two replicas of another revision: that is fulfilled, by an operator that exits first."""
    operator = world.operator()
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    backup = plane.backup()
    await world.apply(replicas=3, engine={"maxModelLen": 512})
    await world.until(world.is_settled, 120)
    for i in range(60):  # versions that the restored one will not have for a while
        await world.apply("other", replicas=0, engine={"maxModelLen": 512 + i})
    await plane.restore(backup)
    await world.until(lambda: operator.exits and set(operator.exits) == {1}, 60)
    await world.until(world.is_settled, 180)
    assert (await world.service())["spec"]["replicas"] == 2
    await world.apply(replicas=1)  # and it hears of changes
    await world.until(world.is_settled, 60)


async def test_without_its_status_a_service_keeps_its_replicas_until_there_is_one(plane, world):
    operator = world.operator()
    await world.apply(replicas=3)
    await world.until(world.is_settled)
    operator.kept = False
    operator.signal(signal.SIGKILL)
    operator.process.wait()
    where = path_of("InferenceService", world.namespace, "smol")
    await world.client.request(
        "PATCH", f"{where}/status", body={"status": None}, content_type="application/merge-patch+json"
    )
    before = {p["metadata"]["uid"] for p in await world.pods()}
    operator.start()
    await world.until(world.is_settled)
    assert {p["metadata"]["uid"] for p in await world.pods()} == before
    decision = (await world.service())["status"]["autoscaling"]["lastDecision"]
    assert (decision["from"], decision["to"]) == (3, 3)


async def test_a_crd_upgraded_and_rolled_back_touches_nothing(plane, world):
    operator = world.operator()
    await world.apply(replicas=1)
    await world.until(world.is_settled)
    await asyncio.sleep(2)
    children = {w for w in writes_of_operators(plane, world.namespace) if "inferenceservices" not in w}
    document = yaml.safe_load(CRD.read_text())
    newer = json.loads(json.dumps(document))
    schema = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"]["properties"]["fromTheFuture"] = {"type": "string", "maxLength": 10}
    schema["status"]["properties"]["fromTheFuture"] = {"type": "string", "maxLength": 10}
    where = f"{CRDS}/{document['metadata']['name']}"

    async def install(crd: dict) -> None:
        version = (await world.client.request("GET", where))["metadata"]["resourceVersion"]
        crd["metadata"]["resourceVersion"] = version
        await world.client.request("PUT", where, body=crd)

    await install(newer)
    status = {"status": {"fromTheFuture": "x"}}  # as a newer operator has written it
    service = path_of("InferenceService", world.namespace, "smol")

    async def written() -> dict:
        return await world.client.request(
            "PATCH", f"{service}/status", body=status, content_type="application/merge-patch+json"
        )

    await world.until(lambda: _has(written(), "fromTheFuture"))
    await world.until(world.is_settled)
    await install(document)
    await asyncio.sleep(3)
    await world.until(world.is_settled)
    assert {w for w in writes_of_operators(plane, world.namespace) if "inferenceservices" not in w} == children
    assert operator.exits == []
    await world.apply(replicas=2)  # and it still hears
    await world.until(world.is_settled)


async def _has(answer, name: str) -> bool:
    return name in (await answer)["status"]


async def test_an_operator_upgraded_and_rolled_back_restarts_no_pod(plane, world, tmp_path):
    """A version that builds other templates from the same spec and knows a status field more."""
    newer = tmp_path / "newer"
    shutil.copytree(ROOT / "operator", newer, ignore=shutil.ignore_patterns("__pycache__"))
    file = newer / "kvern_operator" / "desired" / "engine.py"
    text = file.read_text()
    assert text.count('"enableServiceLinks": False,') == 1
    file.write_text(text.replace('"enableServiceLinks": False,', '"enableServiceLinks": False, "hostname": "newer",'))
    first = world.operator("op-1")
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    before = {p["metadata"]["uid"]: p["metadata"]["name"] for p in [*await world.pods(), *await world.pods("router")]}
    for operator in (newer, None):
        world.operators[-1].stop()
        world.operator(f"op-{len(world.operators) + 1}", operator)
        await asyncio.sleep(8)
        await world.until(world.is_settled)
        after = {
            p["metadata"]["uid"]: p["metadata"]["name"] for p in [*await world.pods(), *await world.pods("router")]
        }
        assert after == before
    assert first.exits == []
    await world.apply(replicas=3)
    await world.until(world.is_settled)
    assert before.keys() <= {p["metadata"]["uid"] for p in [*await world.pods(), *await world.pods("router")]}


@pytest.mark.parametrize("with_operator", [True, False])
async def test_a_namespace_is_deleted_with_an_operator_and_without(plane, world, with_operator):
    operator = world.operator()
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    if not with_operator:
        operator.stop()
    where = f"/api/v1/namespaces/{world.namespace}"
    await world.client.request("DELETE", where)

    async def gone() -> bool:
        return await world.find(where) is None

    await world.until(gone, 90)
    assert "Traceback" not in operator.log


async def test_an_evicted_pod_is_replaced_while_it_finishes_and_one_at_a_time(plane, world):
    world.operator()
    await world.apply(replicas=2)
    await world.until(world.is_settled)
    world.in_flight = {"smol-r0-0": 3}
    budget = f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets/smol-engines"

    async def allowed() -> bool:
        return (await world.find(budget))["status"].get("disruptionsAllowed") == 1

    await world.until(allowed)
    pods = f"/api/v1/namespaces/{world.namespace}/pods"

    async def evict(name: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": world.namespace}}
        await world.client.request("POST", f"{pods}/{name}/eviction", body=body)

    began = time.monotonic()
    await evict("smol-r0-0")
    with pytest.raises(ApiError) as refused:
        await evict("smol-r1-0")
    assert refused.value.status == 429

    async def replaced() -> bool:
        ready = {p["metadata"]["name"] for p in await world.pods() if not p["metadata"].get("deletionTimestamp")}
        return ready == {"smol-r1-0", "smol-r2-0"}

    await world.until(replaced)
    assert time.monotonic() - began < 30
    assert "smol-r0-0" in {p["metadata"]["name"] for p in await world.pods()}  # it still streams
    world.in_flight = {}
    await world.until(world.is_settled)
