"""Events on change only, notices from the cluster's events, and what keeps an eye on the watches."""

from datetime import UTC, datetime
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client.configuration import Configuration
from yarl import URL

from kvern_operator.api.status import Condition, InferenceServiceStatus
from kvern_operator.desired import meta
from kvern_operator.events import Event, Poster, news, shortened, to_object
from kvern_operator.kube import PLURALS, KubeClient
from kvern_operator.metrics import Metrics
from kvern_operator.notices import NoticeReader, Subject, newest
from kvern_operator.observed import Notice
from kvern_operator.verify import kinds, lists
from kvern_operator.watches import Watches

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVICE = {"metadata": {"name": "smol", "namespace": "team-a", "uid": "u-1"}}


def status(**conditions):
    found = [
        Condition(type=type_, status=value, reason=reason, message=message, last_transition_time=NOW)
        for type_, (value, reason, message) in conditions.items()
    ]
    return InferenceServiceStatus(conditions=found)


LOADING = status(
    Ready=("False", "Loading", "0 of 1"),
    Available=("False", "NoReplicaReady", ""),
    Degraded=("False", "AsExpected", ""),
)
READY = status(
    Ready=("True", "AllReplicasReady", "1 of 1"),
    Available=("True", "Answering", ""),
    Degraded=("False", "AsExpected", ""),
)
CRASHED = status(
    Ready=("False", "OOMKilled", "x"),
    Available=("False", "OOMKilled", "x"),
    Degraded=("True", "OOMKilled", "engine smol-r0-0: 1 restart"),
)


def test_turns_are_told_once():
    assert news(None, LOADING, ["starting replica smol-r0, revision x"]) == [
        Event("Normal", "StartingReplica", "starting replica smol-r0, revision x")
    ]
    assert news(LOADING, LOADING, []) == []
    assert news(LOADING, READY, []) == [Event("Normal", "Ready", "1 of 1")]
    assert [(e.type, e.reason) for e in news(READY, CRASHED, [])] == [
        ("Warning", "Unavailable"),
        ("Warning", "OOMKilled"),
    ]
    assert [(e.type, e.reason) for e in news(CRASHED, READY, [])] == [("Normal", "Ready"), ("Normal", "Recovered")]


def test_a_message_that_counts_on_is_no_news():
    again = status(Degraded=("True", "OOMKilled", "engine smol-r0-0: 2 restarts"))
    assert news(CRASHED, again, []) == []
    other = status(Degraded=("True", "ImagePullBackOff", "no such image"))
    assert news(again, other, []) == [Event("Warning", "ImagePullBackOff", "no such image")]


def test_suspension_is_no_warning():
    down = status(Available=("False", "Suspended", "spec.suspend is true"))
    assert news(READY, down, []) == [Event("Normal", "Unavailable", "Suspended: spec.suspend is true")]


@given(st.text(max_size=2000))
def test_notes_fit(text):
    assert len(shortened(text).encode()) <= 1024
    assert shortened(text) == text or shortened(text).endswith("...")


def test_the_object():
    body = to_object(Event("Warning", "OOMKilled", "x"), SERVICE, NOW, "kvern-operator-1")
    assert body["regarding"] == {
        "apiVersion": "kvern.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "smol",
        "namespace": "team-a",
        "uid": "u-1",
    }
    assert body["eventTime"] == "2026-01-01T00:00:00.000000Z" and body["metadata"]["name"].startswith("smol.")
    assert body == to_object(Event("Warning", "OOMKilled", "x"), SERVICE, NOW, "kvern-operator-1")


async def test_an_event_that_is_refused_fails_nothing(api):
    client = KubeClient(Configuration(host=api.url))
    api.refuse = lambda m, p, b: (403, "the namespace is being terminated")
    await Poster(client, "x").post([Event("Normal", "Ready", "1 of 1")], SERVICE)
    assert api.requests == [("POST", "/apis/events.k8s.io/v1/namespaces/team-a/events")]
    await client.close()


def event(kind, name, reason, message, at, type_="Warning", uid="u"):
    about = {"kind": kind, "name": name, "uid": uid}
    return {"involvedObject": about, "reason": reason, "message": message, "lastTimestamp": at, "type": type_}


SUBJECT = Subject(frozenset({"smol-r0", "smol-r0-0"}), "smol-router")


def test_the_newest_warning_of_each_object_and_reason_counts():
    found = newest(
        [
            event("StatefulSet", "smol-r0", "FailedCreate", "exceeded quota: old", "2026-01-01T00:00:01Z"),
            event("StatefulSet", "smol-r0", "FailedCreate", "exceeded quota: new", "2026-01-01T00:00:09Z"),
            event("ReplicaSet", "smol-router-5d4f", "FailedCreate", "quota", "2026-01-01T00:00:02Z"),
            event("ReplicaSet", "smol-router-two-5d4f", "FailedCreate", "of another service", "2026-01-01T00:00:02Z"),
            event("Pod", "smol-r0-0", "FailedMount", "no secret", None),
            event("Pod", "other-r0-0", "FailedMount", "of another service", None),
            event("Pod", "smol-r0-0", "Pulled", "fine", None, type_="Normal"),
            event("Node", "smol-r0", "Odd", "not ours", None),
        ],
        SUBJECT,
    )
    assert found == (
        Notice("Pod", "smol-r0-0", "FailedMount", "no secret", "u"),
        Notice("ReplicaSet", "smol-router-5d4f", "FailedCreate", "quota", "u"),
        Notice("StatefulSet", "smol-r0", "FailedCreate", "exceeded quota: new", "u"),
    )


async def test_events_are_read_only_while_somebody_wants_them_and_ever_less_often(api):
    client, changed, now = KubeClient(Configuration(host=api.url)), [], [0.0]
    reader = NoticeReader(client, changed.append, lambda: now[0])
    key = ("team-a", "smol")
    reader.want(key, SUBJECT)
    reader.want(key, SUBJECT)
    api.objects["/api/v1/namespaces/team-a/events/e"] = {
        "metadata": {},
        **event("Pod", "smol-r0-0", "FailedMount", "no secret", None),
    }
    await reader._read("team-a", [key])
    assert changed == [key] and reader.of(key)[0].message == "no secret"
    await reader._read("team-a", [key])
    assert changed == [key]  # nothing new
    waits = []
    for _ in range(6):
        await reader._read("team-a", [key])
        waits.append(reader._wanted[key].due)
    assert waits == [16, 32, 60, 60, 60, 60]
    api.down = True
    await reader._read("team-a", [key])
    assert reader.of(key)  # what was known stays
    reader.drop(key)
    assert reader.of(key) == ()
    await client.close()


class Response:
    def __init__(self, url, status=200):
        self.url, self.status, self.content = URL(url), status, SimpleNamespace(total_bytes=0)


async def test_the_most_silent_watch_tells_the_age():
    now, listed = [0.0], []
    watches = Watches(listed.append, lambda: now[0])

    async def ended(url, status=200, method="GET"):
        response = Response(url, status)
        await watches._ended(None, None, SimpleNamespace(method=method, response=response))
        return response

    assert watches.age() == 0
    pods = await ended("http://x/api/v1/pods?watch=true")
    await ended("http://x/apis/apps/v1/deployments?watch=true")
    now[0] = 50.0
    pods.content.total_bytes = 10
    assert watches.age() == 50
    await ended("http://x/apis/apps/v1/deployments?watch=true")  # started again
    assert watches.age() == 0
    now[0] = 80.0
    assert watches.age() == 30 and watches.count == 2
    for _ in range(2):
        await ended("http://x/api/v1/pods?labelSelector=y&limit=100")
        await ended("http://x/api/v1/pods?labelSelector=y&limit=100&continue=abc")
        await ended("http://x/api/v1/services", status=500)
        await ended("http://x/api/v1/services", method="POST")
    assert listed == ["/api/v1/pods"]


def test_every_kind_has_a_path():
    assert set(meta.KINDS) <= PLURALS.keys()
    assert set(meta.KINDS) - set(kinds(pod_monitors=True)) == {"Secret"}  # never read
    assert "PodMonitor" not in kinds(pod_monitors=False)
    assert lists("Pod", []) == ["/api/v1/pods"]
    assert lists("StatefulSet", ["a", "b"]) == [
        "/apis/apps/v1/namespaces/a/statefulsets",
        "/apis/apps/v1/namespaces/b/statefulsets",
    ]


def test_writes_are_counted_by_what_they_write():
    metrics = Metrics()
    metrics.wrote("PATCH", "/apis/apps/v1/namespaces/a/statefulsets/x")
    metrics.wrote("PATCH", "/apis/kvern.dev/v1alpha1/namespaces/a/inferenceservices/x/status")
    metrics.wrote("POST", "/api/v1/namespaces/a/secrets")
    text = metrics.text().decode()
    assert 'kvern_operator_api_writes_total{resource="statefulsets",verb="patch"} 1.0' in text
    assert 'resource="inferenceservices/status",verb="patch"} 1.0' in text
    assert 'resource="secrets",verb="post"} 1.0' in text
