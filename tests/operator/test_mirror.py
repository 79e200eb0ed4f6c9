"""What the operator knows without asking: own writes on top of what watches bring, trimmed objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.api.types import KIND
from kvern_operator.mirror import LONGEST_LAG, Mirror, service_of, trim_child, trim_pod, trim_service

KEY = ("team-a", "smol")


def child(name="smol-r0", version=1, uid="c-1", kind="StatefulSet", **metadata):
    labels = {"kvern.dev/service": "smol"}
    common = {"name": name, "namespace": "team-a", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {**common, **metadata}, "spec": {"replicas": 1}}


def service(version=1, uid="uid-1", status=None):
    metadata = {"name": "smol", "namespace": "team-a", "uid": uid, "resourceVersion": str(version), "generation": 1}
    return {"metadata": metadata, "spec": {"replicas": 1}, **({"status": status} if status else {})}


class World:
    def __init__(self):
        self.now = 0.0
        self.mirror = Mirror(lambda: self.now)

    def watch(self, *objects):
        """Exactly these are there."""
        for uid in self.mirror.uids("StatefulSet") - {o["metadata"]["uid"] for o in objects}:
            self.mirror.remove("StatefulSet", uid)
        for obj in objects:
            assert self.mirror.put("StatefulSet", obj) == KEY

    @property
    def versions(self):
        return {c.name: c.version for c in self.mirror.children(KEY)}


@pytest.fixture
def world():
    return World()


def test_an_own_write_is_seen_until_the_watch_brings_it(world):
    world.mirror.applied(KEY, child(version=5))
    assert world.versions == {"smol-r0": 5}
    world.watch(child(version=3))
    assert world.versions == {"smol-r0": 5}
    world.watch(child(version=7))  # ours and a later one
    assert world.versions == {"smol-r0": 7}
    world.watch(child(version=7), child("smol-r1", 8, "c-2"))
    assert world.versions == {"smol-r0": 7, "smol-r1": 8}


def test_an_own_delete_is_seen_until_another_of_the_name_is_there(world):
    world.watch(child(version=3))
    (live,) = world.mirror.children(KEY)
    world.mirror.deleted(KEY, live)
    assert world.versions == {}
    world.watch(child(version=9, uid="c-9"))
    assert world.versions == {"smol-r0": 9}


def test_what_the_watch_says_is_gone_is_gone_also_if_we_wrote_it(world):
    world.mirror.applied(KEY, child(version=5))
    world.watch(child(version=3))
    assert world.mirror.remove("StatefulSet", "c-1") == KEY
    assert world.versions == {} and world.mirror.remove("StatefulSet", "c-1") is None


def test_after_a_long_time_the_watch_is_believed(world):
    world.mirror.applied(KEY, child(version=5))
    world.now = LONGEST_LAG + 1
    assert world.versions == {}


@given(st.lists(st.tuples(st.sampled_from(["write", "watch"]), st.integers(1, 9)), max_size=20))
def test_versions_never_go_back(steps):
    """Writes and watch events each come in order; whatever their interleaving, what is seen never gets older."""
    world, written, watched, seen = World(), 0, 0, 0
    for what, step in steps:
        if what == "write":
            written = max(written, watched) + step
            world.mirror.applied(KEY, child(version=written))
        else:
            watched = max(watched, min(watched + step, max(written, 1)))
            world.watch(child(version=watched))
        now = world.versions["smol-r0"]
        assert now >= seen and now == max(written, watched)
        seen = now


def test_own_statuses_are_seen_and_only_for_the_same_service(world):
    world.mirror.put(KIND, service(1))
    world.mirror.status_written(KEY, service(4, status={"replicas": 2}))
    assert world.mirror.service(KEY)["status"] == {"replicas": 2}
    world.mirror.put(KIND, service(6, status={"replicas": 3}))
    assert world.mirror.service(KEY)["status"] == {"replicas": 3}
    world.mirror.status_written(KEY, service(9, status={"replicas": 9}))
    world.mirror.remove(KIND, "uid-1")
    world.mirror.put(KIND, service(7, uid="uid-2"))  # deleted and made again
    assert "status" not in world.mirror.service(KEY)


def test_what_is_gone_is_forgotten(world):
    world.mirror.put(KIND, service())
    world.watch(child(), child("smol-r1", uid="c-2"))
    world.mirror.put("Pod", child("smol-r0-0", uid="p-1", kind="Pod"))
    assert world.mirror.uids("StatefulSet") == {"c-1", "c-2"}
    assert world.mirror.uids(KIND) == {"uid-1"} and world.mirror.uids("Pod") == {"p-1"}
    assert world.mirror.remove("Pod", "p-1") == world.mirror.remove(KIND, "uid-1") == KEY
    assert world.mirror.remove("StatefulSet", "c-2") == KEY
    assert world.versions == {"smol-r0": 1}
    assert world.mirror.pods(KEY) == [] and world.mirror.service(KEY) is None and world.mirror.keys() == []
    unlabelled = child(uid="c-9")
    del unlabelled["metadata"]["labels"]
    assert world.mirror.put("StatefulSet", unlabelled) is None and world.mirror.uids("StatefulSet") == {"c-1"}


def test_two_services_of_one_name_the_newer_counts(world):
    world.mirror.put(KIND, service(9, uid="uid-2"))
    world.mirror.put(KIND, service(3, uid="uid-1"))
    assert world.mirror.service(KEY)["metadata"]["uid"] == "uid-2"


def test_trimming():
    body = child(managedFields=[{"manager": "x"}], annotations={"a": "b"}, deletionTimestamp="now")
    body["metadata"]["ownerReferences"] = [{"uid": "uid-1"}]
    body["status"] = {"replicas": 1}
    live = trim_child(body)
    assert live.deleting and live.owners == {"uid-1"} and "managedFields" not in live.obj["metadata"]
    assert live.obj["status"] == {"replicas": 1}  # of workloads
    assert "status" not in trim_child({**body, "kind": "Service"}).obj
    last = {"kubectl.kubernetes.io/last-applied-configuration": "{...}", "argocd.argoproj.io/tracking-id": "x"}
    document = service()
    document["metadata"] |= {"annotations": last, "managedFields": [1], "finalizers": ["x"]}
    trimmed = trim_service(document)["metadata"]
    assert trimmed["annotations"] == {"argocd.argoproj.io/tracking-id": "x"}
    assert "managedFields" not in trimmed and "finalizers" not in trimmed
    pod = child(kind="Pod")
    pod["spec"] = {"nodeName": "n", "containers": [{"name": "engine", "env": [{"name": "A", "value": "secret"}]}]}
    assert "secret" not in str(trim_pod(pod))
    assert service_of(body["metadata"]) == KEY and service_of({"namespace": "x"}) is None
