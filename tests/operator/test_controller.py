"""The operator's pass against an API server in this process: what is written, when, and what is said when it fails."""

from datetime import UTC, datetime, timedelta

import pytest
from effects import KEY, SERVICE_PATH, Bench, path

from kvern_operator.apply import NAME_TAKEN
from kvern_operator.controller import RefusedError
from kvern_operator.desired import meta
from kvern_operator.kube import ApiError, NotLeadingError


async def running(bench: Bench, spec: dict | None = None) -> None:
    """A service whose replica and router answer."""
    bench.create(spec)
    await bench.work()
    bench.run_pod("smol-r0-0")
    bench.run_pod("smol-router-abc")
    await bench.settle()


async def test_a_new_service_gets_its_objects_and_a_status(bench, api):
    bench.create()
    await bench.work()
    assert set(api.of("statefulsets")) == {"smol-r0"} and set(api.of("deployments")) == {"smol-router"}
    assert {"smol", "smol-engines"} <= set(api.of("services"))
    (secret,) = api.of("secrets").values()
    assert secret["stringData"]["token"]
    for obj in [*api.of("statefulsets").values(), *api.of("services").values()]:
        assert obj["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert bench.condition("Ready")[0] == "False"
    assert bench.status["url"] == "http://smol.team-a.svc.cluster.local/v1"
    assert ("Normal", "StartingReplica") in bench.events()
    # Workloads come last: their pods mount the rest.
    made = [p.split("/")[-2] for m, p in api.writes("events", "inferenceservices") if m == "PATCH"]
    assert made.index("configmaps") < made.index("statefulsets")
    applies = [r for r in api.requests if r[0] == "PATCH"]
    assert len(applies) == len(set(applies))


async def test_an_unchanged_service_makes_no_request_at_all(bench, api):
    await running(bench)
    assert bench.condition("Ready") == ("True", "AllReplicasReady")
    api.requests.clear()
    for _ in range(5):
        bench.pump()
        assert await bench.work() is None
    assert api.requests == []


async def test_routers_hear_of_their_replicas_at_once(bench, api):
    """A change of the pod makes its kubelet mount the ConfigMap that has changed."""
    bench.create()
    await bench.work()
    router = path("Pod", "smol-router-abc")
    bench.run_pod("smol-router-abc")
    await bench.settle()
    first = api.objects[router]["metadata"]["annotations"]["kvern.dev/replicas"]
    bench.run_pod("smol-r0-0")
    await bench.work()
    assert api.writes()[-1][1] != router  # not in the pass that writes the list: the kubelet is to have it before
    await bench.settle()
    second = api.objects[router]["metadata"]["annotations"]["kvern.dev/replicas"]
    assert second != first
    assert "annotations" not in api.objects[path("Pod", "smol-r0-0")]["metadata"]
    api.requests.clear()
    bench.pump()
    await bench.work()
    assert api.writes() == []


async def test_a_router_that_cannot_be_told_is_no_failure(bench, api, caplog):
    bench.create()
    await bench.work()
    bench.run_pod("smol-router-abc")
    api.refuse = lambda m, p, b: (403, "pods is forbidden") if "/pods/" in p else None
    await bench.work()
    await bench.work()
    assert caplog.text.count("pod team-a/smol-router-abc hears of its replicas late: pods is forbidden") == 1


async def test_own_writes_are_seen_before_the_watch_brings_them(bench, api):
    bench.create({"replicas": 2})
    await bench.work()
    api.requests.clear()
    await bench.work()  # the watches still show an empty cluster
    assert api.writes("inferenceservices/smol/status") == []
    assert bench.status["replicas"] == 2 and set(api.of("statefulsets")) == {"smol-r0", "smol-r1"}


async def test_a_restarted_operator_writes_nothing(bench, api):
    await running(bench)
    again = Bench(api)
    api.requests.clear()
    again.pump()
    await again.work()
    assert api.writes() == []
    await again.close()


async def test_drift_is_put_right(bench, api):
    await running(bench)
    where = path("Deployment", "smol-router")
    changed = {**api.objects[where], "spec": {**api.objects[where]["spec"], "replicas": 7}}
    api.put(where, changed)
    await bench.settle()
    assert api.objects[where]["spec"]["replicas"] == 2
    api.remove(path("Service", "smol"))
    await bench.settle()
    assert "smol" in api.of("services")


async def test_what_somebody_else_has_made_under_a_name_is_left_alone(bench, api):
    theirs = {"kind": "Service", "metadata": {"name": "smol", "namespace": "team-a"}, "spec": {"ports": [1]}}
    api.put(path("Service", "smol"), theirs)
    bench.create()
    with pytest.raises(RefusedError):
        await bench.work()
    assert api.of("services")["smol"]["spec"] == {"ports": [1]}
    assert "ownerReferences" not in api.of("services")["smol"]["metadata"]
    message = next(c["message"] for c in bench.status["conditions"] if c["type"] == "Degraded")
    assert "Service smol" in message and "one of that name is there already that Kvern has not made" in message
    api.remove(path("Service", "smol"))
    await bench.settle()
    assert bench.condition("Degraded")[0] == "False"


async def test_a_second_leader_loses_the_race_for_the_status_and_says_nothing(bench, api):
    bench.create()
    other = Bench(api)
    other.pump()
    await bench.work()
    said = bench.events()
    with pytest.raises(ApiError) as caught:
        await other.work()
    assert caught.value.status == 409
    assert bench.events() == said
    await other.settle()  # once it sees what is there
    await other.close()


async def test_what_was_done_is_told_though_the_status_came_too_late(bench, api):
    bench.create()
    api.refuse = lambda m, p, b: (409, "modified") if p.endswith("/status") else None
    with pytest.raises(ApiError):
        await bench.work()
    assert bench.events() == []
    api.refuse = lambda m, p, b: None
    await bench.settle()
    assert bench.events().count(("Normal", "StartingReplica")) == 1


async def test_a_stale_decision_about_a_replica_is_refused(bench, api):
    await running(bench, {"replicas": 1})
    stale = Bench(api)
    stale.pump()
    where = path("StatefulSet", "smol-r0")
    api.put(where, {**api.objects[where], "status": {"replicas": 1}})  # something has happened since
    stale.mirror.put("InferenceService", bench.create({"replicas": 0}, generation=2))
    with pytest.raises(ApiError) as caught:
        await stale.work()
    assert caught.value.status == 409
    assert not meta.annotation(api.objects[where], meta.DRAINING_SINCE)
    await stale.close()


async def test_a_replica_that_was_taken_back_is_not_deleted_by_who_has_not_heard_of_it(bench, api):
    await running(bench, {"replicas": 1})
    where, now = path("StatefulSet", "smol-r0"), datetime.now(UTC)
    marked = api.objects[where]
    annotations = {**marked["metadata"]["annotations"], meta.DRAINING_SINCE: (now - timedelta(hours=1)).isoformat()}
    api.put(where, {**marked, "metadata": {**marked["metadata"], "annotations": annotations}})
    bench.create({"replicas": 0}, generation=2)
    stale = Bench(api)
    stale.pump()
    taken_back = api.put(where, marked)  # by the other leader, just now
    with pytest.raises(ApiError) as caught:
        await stale.work()
    assert caught.value.status == 409 and "ResourceVersion in precondition" in str(caught.value)
    assert api.objects[where] == taken_back
    await stale.close()


async def test_what_another_leader_has_made_is_not_made_over_again(bench, api):
    """Its watch is late: the other one may have decided to drain it since."""
    bench.create()
    late = Bench(api)
    late.pump()
    await bench.work()
    where = path("StatefulSet", "smol-r0")
    made = api.objects[where]
    with pytest.raises(ApiError) as caught:
        await late.work()
    assert caught.value.status == 409 and api.objects[where] == made
    await late.settle()
    assert api.objects[where] == made
    await late.close()


def on_node(api, gpus: int) -> None:
    ready = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"nvidia.com/gpu": str(gpus), "pods": "110"}, "conditions": ready}
    api.put("/api/v1/nodes/node", {"kind": "Node", "metadata": {"name": "node"}, "status": status})


@pytest.mark.parametrize(("gpus", "first"), [(2, ["smol-r0", "smol-r1"]), (1, ["smol-r0"])])
async def test_a_rollout_looks_at_the_nodes_and_surges_or_swaps(bench, api, gpus, first):
    one = {"resources": {"gpusPerPod": 1}, "rollout": {"drainTimeoutSeconds": 0}}
    on_node(api, gpus)
    await running(bench, one)
    assert not [r for r in api.requests if "/nodes" in r[1]]  # nobody asks for them before
    bench.create({**one, "engine": {"maxModelLen": 512}}, generation=2)
    await bench.controller.work(KEY)
    assert [r for r in api.requests if r == ("GET", "/api/v1/nodes")]
    assert sorted(api.of("statefulsets")) == first
    leaving = [n for n, o in api.of("statefulsets").items() if meta.annotation(o, meta.DRAINING_SINCE)]
    assert leaving == ([] if gpus == 2 else ["smol-r0"])
    if gpus == 1:
        bench.pump()
        await bench.work()
        assert api.of("statefulsets") == {}  # its pod still holds the only GPU
        bench.pump()
        await bench.work()
        assert api.of("statefulsets") == {}
        assert "once smol-r0-0 has ended" in bench.message("Progressing")
        api.remove(path("Pod", "smol-r0-0"))
        bench.pump()
        await bench.work()
        assert len(api.of("statefulsets")) == 1


async def test_the_place_of_a_pod_that_has_gone_is_seen_at_once(bench, api, monkeypatch):
    monkeypatch.setattr("kvern_operator.nodes.FRESH", 600.0)
    on_node(api, 2)
    one = {"resources": {"gpusPerPod": 1}, "rollout": {"drainTimeoutSeconds": 0}}
    await running(bench, one)
    bench.create({**one, "engine": {"maxModelLen": 512}}, generation=2)
    await bench.controller.work(KEY)
    assert sum(r == ("GET", "/api/v1/nodes") for r in api.requests) == 1
    await bench.controller.work(KEY)
    assert sum(r == ("GET", "/api/v1/nodes") for r in api.requests) == 1  # what has been seen is good for a while
    api.remove(path("Pod", "smol-r0-0"))
    bench.pump()
    await bench.controller.work(KEY)
    assert sum(r == ("GET", "/api/v1/nodes") for r in api.requests) == 2


async def test_a_drain_that_runs_out_of_time_is_a_warning(bench, api):
    short = {"rollout": {"drainTimeoutSeconds": 0}}
    await running(bench, short)
    bench.create({**short, "replicas": 0}, generation=2)
    await bench.settle()
    await bench.settle()
    assert ("Warning", "DrainTimedOut") in bench.events()
    notes = [o["note"] for o in api.objects.values() if o["kind"] == "Event" and o["reason"] == "DrainTimedOut"]
    said = "cutting off replica smol-r0 with an unknown number in flight: drainTimeoutSeconds (0) is over"
    assert notes == [said]


async def test_a_clock_that_is_put_forward_cuts_no_stream_off(bench, api, monkeypatch):
    await running(bench)
    bench.create({"replicas": 0}, generation=2)
    await bench.work()
    bench.pump()
    await bench.work()
    later = datetime.now(UTC) + timedelta(days=1)
    monkeypatch.setattr("kvern_operator.controller.datetime", type("Clock", (), {"now": staticmethod(lambda _: later)}))
    bench.pump()
    assert 0 < await bench.work() <= 300
    assert set(api.of("statefulsets")) == {"smol-r0"}


async def test_nothing_is_written_once_the_lease_has_run_out(bench, api):
    bench.create()
    bench.client.may_write = lambda: False
    with pytest.raises(NotLeadingError):
        await bench.work()
    assert api.writes() == []


async def test_a_spec_that_cannot_be_used_becomes_a_condition(bench, api):
    await running(bench)
    bench.create({"engine": {"args": {"max-modl-len": 4}}}, generation=2)
    assert await bench.work() is None
    assert bench.condition("Ready") == ("False", "InvalidSpec")
    message = next(c["message"] for c in bench.status["conditions"] if c["type"] == "Ready")
    assert "max-modl-len" in message and "max-model-len" in message
    assert set(api.of("statefulsets")) == {"smol-r0"}  # what runs goes on
    api.requests.clear()
    bench.pump()
    await bench.work()
    assert api.writes() == []


async def test_an_apply_that_is_refused_is_said_and_tried_again(bench, api):
    bench.create()
    quota = 'statefulsets.apps "smol-r0" is forbidden: exceeded quota: count, requested: 1, used: 4, limited: 4'
    api.refuse = lambda m, p, b: (403, quota) if m == "PATCH" and "statefulsets" in p else None
    with pytest.raises(RefusedError):
        await bench.work()
    assert bench.condition("Degraded") == ("True", "ApplyFailed")
    message = next(c["message"] for c in bench.status["conditions"] if c["type"] == "Degraded")
    assert "exceeded quota: count, requested: 1, used: 4, limited: 4" in message
    assert ("Warning", "ApplyFailed") in bench.events()
    said, writes = bench.events(), len(api.writes())
    bench.pump()
    with pytest.raises(RefusedError):
        await bench.work()
    assert bench.events() == said  # once
    assert [r for r in api.writes()[writes:] if "inferenceservices" in r[1]] == []
    api.refuse = lambda m, p, b: None
    await bench.settle()
    assert bench.condition("Degraded") == ("False", "AsExpected") and "smol-r0" in api.of("statefulsets")


async def test_overrides_are_checked_before_anything_is_replaced(bench, api):
    await running(bench)
    before = dict(api.of("statefulsets")["smol-r0"]["metadata"]["labels"])

    def refuse(method, where, body):
        if method == "PATCH" and "statefulsets" in where and "wrongField" in str(body):
            return 422, 'StatefulSet.apps "x" is invalid: spec.template.spec.wrongField: unknown field'
        return None

    api.refuse = refuse
    bad = {"overrides": {"podTemplate": {"spec": {"wrongField": "x"}}}, "rollout": {"strategy": "Recreate"}}
    bench.create(bad, generation=2)
    await bench.work()
    assert bench.condition("Progressing")[1] == "OverridesRefused"
    assert set(api.of("statefulsets")) == {"smol-r0"}
    assert api.of("statefulsets")["smol-r0"]["metadata"]["labels"] == before
    assert not meta.annotation(api.of("statefulsets")["smol-r0"], meta.DRAINING_SINCE)
    api.requests.clear()
    bench.pump()
    await bench.work()
    assert api.writes() == []  # not asked again before the generation changes


async def test_a_mistake_of_ours_is_shown_and_backed_off(bench, api, monkeypatch):
    bench.create()

    def broken(*_):
        raise KeyError("spec")

    monkeypatch.setattr("kvern_operator.controller.reconcile", broken)
    with pytest.raises(KeyError):
        await bench.work()
    assert bench.condition("Degraded") == ("True", "InternalError")
    message = next(c["message"] for c in bench.status["conditions"] if c["type"] == "Degraded")
    assert "the operator failed on this service and tries again: KeyError: 'spec'" in message
    assert 'kvern_operator_reconciles_total{result="error"} 1.0' in bench.metrics.text().decode()


async def test_deletion_is_left_to_owner_references(bench, api):
    await running(bench)
    stored = api.objects[SERVICE_PATH]
    metadata = {**stored["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    api.put(SERVICE_PATH, {**stored, "metadata": metadata})
    bench.pump()
    api.requests.clear()
    assert await bench.work() is None
    api.remove(SERVICE_PATH)
    bench.pump()
    assert await bench.work() is None
    assert api.requests == [] and bench.forgotten == [KEY]


async def test_a_service_of_the_same_name_waits_for_what_the_last_one_left(bench, api, monkeypatch):
    await running(bench)
    api.remove(SERVICE_PATH)
    bench.create(uid="uid-2")
    api.requests.clear()
    assert await bench.work() == NAME_TAKEN
    assert [r for r in api.writes() if r[0] == "PATCH" and r[1].endswith("/smol-r0")] == []
    assert bench.condition("Degraded")[0] == "False"
    said = bench.events()
    monkeypatch.setattr("kvern_operator.controller.GARBAGE_TIME", -1.0)
    bench.pump()
    assert await bench.work() == NAME_TAKEN  # it does not back off: a deletion is an event
    assert bench.condition("Degraded") == ("True", "ApplyFailed")
    message = next(c["message"] for c in bench.status["conditions"] if c["type"] == "Degraded")
    assert "one of that name is still there, of an earlier service or on its way out" in message
    assert bench.events() == [*said, ("Warning", "ApplyFailed")]
    (owner,) = api.of("services")["smol"]["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-1"  # nobody's but the garbage collector's business
    for where, obj in list(api.objects.items()):
        if any(o["uid"] == "uid-1" for o in obj["metadata"].get("ownerReferences", ())) or obj["kind"] == "Pod":
            api.remove(where)
    await bench.settle()
    owners = [o["uid"] for obj in api.objects.values() for o in obj["metadata"].get("ownerReferences", ())]
    assert set(owners) == {"uid-2"} and "smol" in api.of("services")
    assert len(api.of("statefulsets")) == 1


async def test_a_namespace_that_ends_is_no_failure_of_the_service(bench, api):
    bench.create()
    text = "forbidden: unable to create new content in namespace team-a because it is being terminated"
    api.refuse = lambda m, p, b: (403, text) if m in ("PATCH", "POST") else None
    with pytest.raises(Exception, match="being terminated"):
        await bench.work()
    assert "status" not in api.objects[SERVICE_PATH]
    assert 'result="namespace_ending"} 1.0' in bench.metrics.text().decode()


async def test_the_api_server_away_changes_nothing_and_is_tried_again(bench, api):
    await running(bench)
    bench.create({"replicas": 2}, generation=2)
    api.down = True
    with pytest.raises(ApiError) as caught:
        await bench.work()
    assert caught.value.status == 0 and "cannot be reached" in str(caught.value)
    api.down = False
    await bench.work()
    assert set(api.of("statefulsets")) == {"smol-r0", "smol-r1"}


async def test_a_missing_admin_secret_is_made_again(bench, api):
    bench.create()
    await bench.work()
    (secret,) = api.of("secrets")
    api.remove(path("Secret", secret))
    waiting = {"name": "engine", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
    pod = bench.run_pod("smol-r0-0", ready=False, phase="Pending", containerStatuses=[waiting])
    api.put(
        "/api/v1/namespaces/team-a/events/e1",
        {
            "kind": "Event",
            "metadata": {"name": "e1"},
            "type": "Warning",
            "reason": "FailedMount",
            "message": 'MountVolume.SetUp failed for volume "admin" : secret "' + f'{secret}" not found',
            "involvedObject": {"kind": "Pod", "name": "smol-r0-0", "uid": pod["metadata"]["uid"]},
            "lastTimestamp": "2026-01-01T00:00:00Z",
        },
    )
    await bench.work()
    await bench.notices._read("team-a", [KEY])
    assert bench.changed == [KEY]
    await bench.work()
    assert bench.condition("Degraded") == ("True", "FailedMount")
    await bench.work()
    assert secret in api.of("secrets")
    api.requests.clear()
    await bench.work()
    await bench.work()  # the Event is still there
    assert api.writes("status", "events") == []
