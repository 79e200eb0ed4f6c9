"""What a pass tells the autoscaler of replicas that have lost their readiness, and of sizes that the spec has given."""

from datetime import UTC, datetime, timedelta

import pytest
from lonely import LonelyAutoscaler

from kvern_operator.api.load import parse_service
from kvern_operator.api.status import BannedSize, InferenceServiceStatus, LayoutPlan, ParallelismStatus
from kvern_operator.autoscale.subject import Subject, subject_of
from kvern_operator.observed import Observed, Pod
from kvern_operator.pods import read_pod
from kvern_operator.rollout import Replica

NOW = datetime(2026, 1, 10, tzinfo=UTC)
OLD = NOW - timedelta(days=5)
KEY = ("default", "smol")


def service(tensor: dict | None = None, gpus: int = 8):
    document = {
        "apiVersion": "kvern.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "smol", "uid": "u"},
        "spec": {
            "model": {"uri": "builtin://smollm2-135m"},
            "resources": {"gpusPerPod": gpus},
            "parallelism": {"tensor": tensor or {}},
            "autoscaling": {"mode": "Internal", "minReplicas": 1, "maxReplicas": 4},
        },
    }
    return parse_service(document)


def pod(number: int, ready: bool, **more: object) -> Pod:
    fields = {"created": OLD, "ready_since": OLD + timedelta(seconds=60) if ready else None, **more}
    return Pod(f"smol-r{number}-0", f"pod{number}", f"smol-r{number}", "engine", ready=ready, **fields)  # type: ignore[arg-type]


def subject(*pods: Pod, svc=None, status: InferenceServiceStatus | None = None) -> Subject:
    status = status or InferenceServiceStatus(desired_replicas=len(pods))
    replicas = [Replica(p.owner, i, True, ready=p.ready) for i, p in enumerate(pods)]
    return subject_of(svc or service(), Observed(pods=pods), replicas, status, NOW)


# ---------------------------------------------------------------- readiness that was lost


@pytest.mark.parametrize(
    ("since", "found"),
    [("2026-01-05T00:00:04Z", None), ("2026-01-09T23:59:00Z", NOW - timedelta(minutes=1))],
    ids=["not ready yet", "not ready any more"],
)
def test_when_a_pod_ceased_to_be_ready(since, found):
    status = {
        "phase": "Running",
        "startTime": "2026-01-05T00:00:03Z",
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": since}],
    }
    obj = {"metadata": {"name": "smol-r0-0", "creationTimestamp": "2026-01-05T00:00:00Z"}, "status": status}
    assert read_pod(obj).unready_since == found
    status["conditions"][0]["status"] = "True"
    assert read_pod(obj).unready_since is None


def test_an_old_pod_that_lost_its_readiness_is_not_late():
    """It has been away for ten seconds, whatever its age: neither overdue, nor a start that takes days."""
    lost = NOW - timedelta(seconds=10)
    seen = subject(pod(0, True), pod(1, False, unready_since=lost)).replicas
    assert [(r.ready, r.again) for r in seen] == [(True, False), (False, True)]
    assert seen[1].changed == lost.timestamp()
    never = subject(pod(0, True), pod(1, False)).replicas[1]
    assert (never.changed, never.again) == (OLD.timestamp(), False)


async def test_a_pod_that_comes_back_says_nothing_of_how_long_a_start_takes():
    """The age of a pod that was told to drain and taken back, or whose node was silent for a while, is no start."""
    times: list[float | None] = []
    for before in (pod(0, False, unready_since=NOW - timedelta(seconds=10)), pod(0, False)):
        loop = LonelyAutoscaler(NOW)
        loop.watch(KEY, subject(before))
        await loop.cycle()
        loop.watch(KEY, subject(pod(0, True, ready_since=NOW)))
        await loop.cycle()
        times.append(loop._known[KEY].start)
    assert times == [None, 5 * 86400.0]  # of one that had not been ready before it is what it took


# ---------------------------------------------------------------- sizes


def recorded(size: int, **more: object) -> InferenceServiceStatus:
    plan = LayoutPlan(size=size, bans=[BannedSize(size=1, until=NOW)], changes=[OLD], **more)  # type: ignore[arg-type]
    return InferenceServiceStatus(parallelism=ParallelismStatus(current=4, target=4, plan=plan))


@pytest.mark.parametrize(
    ("svc", "plan"),
    [
        (service({"mode": "Recommend", "size": 4}), {"size": 2}),
        (service({"mode": "Recommend", "size": 4}), {"size": 2, "phase": "Changing", "before": 4}),
        (service({"mode": "Auto", "size": 4}, gpus=4), {"size": 8}),
    ],
    ids=["a recommendation that was followed", "Auto became Recommend in mid-change", "other devices"],
)
def test_the_planner_goes_on_from_the_size_that_the_spec_gives(svc, plan):
    state = subject(svc=svc, status=recorded(**plan)).state
    assert (state.size, state.phase, state.before) == (4, "Stable", None)
    assert [size for size, _ in state.bans] == [1] and state.changes == (OLD.timestamp(),)


def test_the_planners_own_size_is_the_one_on_record():
    """The spec's size is where it began; what pods have is on its way."""
    state = subject(svc=service({"mode": "Auto", "size": 4}), status=recorded(2, phase="Changing", before=4)).state
    assert (state.size, state.phase, state.before) == (2, "Changing", 4)


def test_a_failure_of_an_earlier_try_is_none_of_this_one():
    svc = service({"mode": "Auto", "size": 4})
    for ago, expected in ((3.0, "smol-r0-0: worker 3 died"), (21600.0, "")):
        tried = pod(0, True, switch_failed=(2, "worker 3 died"), switch_failed_ago=ago)
        status = recorded(2, phase="Changing", before=4, since=NOW - timedelta(seconds=9))
        assert subject(tried, svc=svc, status=status).failed == expected
