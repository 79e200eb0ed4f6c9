"""What keeps one operator able to hold a thousand services: little memory, few questions, nothing one after the other
that can be done at once."""

import asyncio

import pytest
from aiohttp import web
from effects import KEY, Bench
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.admin import Pace, Prober, Target
from kvern_operator.controller import FIRST_ANSWERS, RefusedError
from kvern_operator.kube import AGENT, AT_ONCE, ApiError, KubeClient, NotLeadingError
from kvern_operator.mirror import Mirror, pack, trim_child, unpack
from kvern_operator.verify import ARRIVE, Verifier

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_what_is_packed_comes_back_the_same(obj):
    back = unpack(pack(obj))
    assert back == obj and list(back) == list(obj)


def test_an_unpacked_object_is_a_copy():
    metadata = {"name": "x", "namespace": "team-a", "uid": "u", "labels": {}, "ownerReferences": []}
    live = trim_child({"kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}})
    live.obj["data"]["a"] = "2"
    assert live.obj["data"] == {"a": "1"}


def test_a_thousand_alike_take_little():
    """The template and its copy in an annotation, three times a service: the bulk of what there is."""
    containers = [{"name": f"c{i}", "env": [{"name": f"N{i}", "value": "v" * 40}]} for i in range(40)]
    template = {"spec": {"containers": containers}}
    body = {
        "kind": "StatefulSet",
        "metadata": {"name": "x", "uid": "u", "annotations": {"kvern.dev/applied": str(template)}},
        "spec": {"template": template},
    }
    assert len(trim_child(body).packed) < len(str(body)) / 5


# ---------------------------------------------------------------- asking pods


@given(st.integers(0, 20_000), st.booleans())
def test_pods_that_stay_are_asked_so_often_all_together(pods, silent):
    pace = Pace()
    wait = pace.wait(pods, leaving=False, silent=silent)
    assert pods / wait <= pace.most + 1e-6
    assert wait >= (pace.silent if silent else pace.usual)
    assert pace.layout_wait(pods) >= pace.layout


def test_few_are_asked_as_often_as_ever_and_those_that_leave_always():
    pace = Pace()
    assert pace.wait(1000, leaving=False, silent=False) == pace.usual and pace.layout_wait(1000) == pace.layout
    assert pace.wait(3000, leaving=False, silent=False) == 15.0 and pace.layout_wait(3000) == 180.0
    assert pace.wait(20_000, leaving=True, silent=True) == pace.leaving


async def test_pods_are_counted_as_they_come_and_go():
    prober = Prober(lambda key: None)
    targets = [Target(f"p-{i}", f"pod-{i}", 0, "127.86.0.1:1", "t") for i in range(3)]
    prober.watch(("a", "x"), targets)
    prober.watch(("a", "y"), targets[:1])
    assert prober.pods == 4
    prober.watch(("a", "x"), targets[1:])
    prober.watch(("a", "y"), [])
    prober.watch(("a", "z"), [])
    assert prober.pods == 2
    await prober.close()
    assert prober.pods == 0


async def test_after_a_start_nothing_is_said_before_every_pod_had_its_turn(bench: Bench, api, monkeypatch):
    """Thousands are asked at once then: those that wait for their turn are not silent."""
    bench.create()
    await bench.work()
    bench.run_pod("smol-r0-0")
    bench.run_pod("smol-router-abc")
    await bench.settle()
    other = Bench(api)
    other.prober._limit = asyncio.Semaphore(0)  # nobody's turn comes
    other.pump()
    api.requests.clear()
    for _ in range(3):
        assert await other.controller.work(KEY) == FIRST_ANSWERS
        await asyncio.sleep(0.01)
    assert api.writes() == []
    monkeypatch.setattr("kvern_operator.controller.LONGEST_FIRST", 0.0)
    assert await other.controller.work(KEY) != FIRST_ANSWERS
    await other.close()


# ---------------------------------------------------------------- applying at once


async def test_objects_are_applied_at_once_and_workloads_after_them(bench: Bench, api):
    """No apply waits for another one's answer, but those of workloads for all of the rest."""
    under_way, most, order = 0, 0, []
    apply = bench.client.apply

    async def slow(obj, **arguments):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        order.append(obj["kind"])
        return await apply(obj, **arguments)

    bench.client.apply = slow  # type: ignore[method-assign]
    bench.create()
    await bench.work()
    assert most > 4
    made = [kind for kind in order if kind != "InferenceService"]
    workloads = [i for i, kind in enumerate(made) if kind in ("StatefulSet", "Deployment")]
    assert workloads == [len(made) - 2, len(made) - 1], made


async def test_refusals_are_told_in_the_order_of_the_plan_and_hold_the_workloads_back(bench: Bench, api):
    """Whoever answers first: else the status would be written anew at each pass."""
    api.refuse = lambda m, p, b: (403, f"no {p.split('/')[-2]}") if m == "PATCH" and "/services" in p else None
    bench.create()
    found = []
    for _ in range(3):
        with pytest.raises(RefusedError) as caught:
            await bench.work()
        found.append(str(caught.value))
        bench.pump()
    assert len(set(found)) == 1 and found[0] == "no services; no services"
    assert not api.of("statefulsets") and not api.of("deployments")


async def test_the_others_have_ended_before_a_failure_is_told(bench: Bench, api):
    """An API server that is away for one object: what is under way for the rest is not left to itself."""
    api.refuse = lambda m, p, b: (503, "later") if m == "PATCH" and "/networkpolicies/" in p else None
    bench.create()
    with pytest.raises(ApiError, match="later"):
        await bench.work()
    before = len(api.requests)
    await asyncio.sleep(0.1)
    assert len(api.requests) == before
    assert set(api.of("services")) == {"smol", "smol-engines"}, "what was possible has been done"


# ---------------------------------------------------------------- lists


async def test_what_arrives_late_is_waited_for_without_listing_again(bench: Bench, api):
    bench.create()
    await bench.work()
    arrived = Mirror()
    verifier = Verifier(bench.client, arrived, (), False, lambda key: None)
    api.requests.clear()
    waiting = asyncio.create_task(verifier.arrived())
    for obj in list(api.objects.values()):
        await asyncio.sleep(ARRIVE / 3)
        arrived.put(obj["kind"], obj)
    async with asyncio.timeout(30):
        await waiting
    lists = [p for m, p in api.requests if p.endswith("/services")]
    assert len(lists) <= 2, api.requests


async def test_the_lease_never_waits_for_writes_and_those_that_waited_are_fenced(api):
    """An API server that is slow for everything: more writes wait than may be under way at a time."""
    client, hold, leading = KubeClient(Configuration(host=api.url)), asyncio.Event(), True
    client.may_write = lambda: leading
    request, asked = client.request, []

    async def slow(method, where, **arguments):
        asked.append(where)
        if "leases" not in where:
            await hold.wait()
            return {}
        return await request(method, where, **arguments)

    client.request = slow  # type: ignore[method-assign]
    writes = [asyncio.create_task(client.create({}, f"/api/v1/things/{i}")) for i in range(AT_ONCE + 3)]
    await asyncio.sleep(0.05)
    assert len(asked) == AT_ONCE
    with pytest.raises(ApiError):
        await client.request("GET", "/apis/coordination.k8s.io/v1/namespaces/x/leases/none")
    leading = False
    hold.set()
    ends = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(end) for end in ends[-3:]] == [NotLeadingError] * 3 and ends[:AT_ONCE] == [None] * AT_ONCE
    await client.close()


async def test_requests_say_who_asks_with_the_token_of_the_moment():
    seen = []

    async def answer(request):
        seen.append((request.headers["User-Agent"], request.headers["Authorization"], dict(request.query)))
        return web.json_response({"items": [{"metadata": {"name": "x"}}]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    client = KubeClient(configuration)
    try:
        for token in ("one", "two"):
            configuration.api_key["authorization"] = f"Bearer {token}"
            found = await client.find("Service", KEY[0], "a=b&c")
            assert found == {"metadata": {"name": "x"}}
    finally:
        await client.close()
        await runner.cleanup()
    query = {"fieldSelector": "metadata.name=a=b&c"}
    assert seen == [(AGENT, "Bearer one", query), (AGENT, "Bearer two", query)]
