"""No client ever sees an error: fifty streams of the openai client, and what happens to the service meanwhile.

The first six events belong to every run, with streams of 20 seconds; all others to full runs, with streams of a minute.
The last test of each group is the verdict: a table of what became of every request.
"""

from collections.abc import Callable, Iterator
from functools import partial

import events
import kit
import nodes
import pytest
import streams
from busy import Show, Started, begin, other_names, report_of, wrongly
from conftest import drop_namespace, make_namespace_named
from events import CONTROL, FAILURES, MORE_PLANNED, PLANNED
from kit import Client, Service, eventually
from streams import Load

pytestmark = [pytest.mark.timeout(1500)]
if streams.FULL:  # only what full runs do takes the operator away
    pytestmark.append(pytest.mark.alone)


@pytest.fixture(scope="module")
def busy(operator: None, client: Client) -> Iterator[Started]:
    """The service under load of all tests of this file that leave it alive."""
    namespace = make_namespace_named("events")
    other_names()
    target, load = begin(namespace, client, "events")
    yield target, load
    load.stop()
    drop_namespace(namespace)


@pytest.fixture(autouse=True)
def story(request: pytest.FixtureRequest, tell_of: Callable[[str], None]) -> None:
    if "busy" in request.fixturenames:
        tell_of(request.getfixturevalue("busy")[0].namespace)


def tried(started: Started, name: str, do: events.Do) -> None:
    """One event; afterwards the service is as the next one wants it."""
    target, load = started
    try:
        load.event(name, lambda event: do(target, event))
    except AssertionError:
        target.patch(replicas=2, engine={"image": None})
        target.settle()
        raise


@pytest.mark.parametrize("name", PLANNED)
def test_planned(busy: Started, name: str) -> None:
    tried(busy, name, PLANNED[name])


@pytest.mark.chaos
@pytest.mark.parametrize("name", MORE_PLANNED)
def test_more_planned(busy: Started, name: str) -> None:
    tried(busy, name, MORE_PLANNED[name])


@pytest.mark.chaos
@pytest.mark.parametrize("name", CONTROL)
def test_control(busy: Started, name: str) -> None:
    events.fresh_operator()
    tried(busy, name, CONTROL[name])


@pytest.mark.chaos
@pytest.mark.parametrize("name", FAILURES)
def test_failures(busy: Started, name: str) -> None:
    busy[0].spread()
    tried(busy, name, FAILURES[name])


def test_no_client_saw_any_of_it(busy: Started, show: Show) -> None:
    """Failed 0, truncated 0, duplicated 0, every text as it is undisturbed; but where a process was killed, what had
    begun on it may have ended with an error. Nothing that began afterwards may."""
    _, load = busy
    assert load.events, "the verdict is on the events before it: run them together"
    report, found = report_of(load, show)
    assert report["requests"] > 2 * streams.STREAMS, report["requests"]
    assert min(one.streams for one in found) >= streams.STREAMS, streams.table(found)
    assert not (wrong := wrongly(load, report)), f"{len(wrong)} requests; the first: {wrong[:3]}"


@pytest.mark.chaos
def test_etcd_restored(busy: Started, client: Client, show: Show) -> None:
    """Services of before the backup go on as they were then, with a load of its own: what a pod loses that the API
    server does not know any more is not the rest's."""
    target, old = busy
    nodes.back_up_etcd()
    load = Load(client, target.service, f"etcd-{target.namespace}", references=old.references)
    load.start()
    load.event("etcd restored", lambda event: events.etcd_restored(target, event))
    report, _ = report_of(load, show)
    assert not (wrong := wrongly(load, report)), f"{len(wrong)} requests; the first: {wrong[:3]}"


@pytest.mark.chaos
def test_namespace_deleted(busy: Started, client: Client, show: Show) -> None:
    """Under fifty streams: all of them end as they should, then the namespace is gone."""
    target, old = busy
    load = Load(client, target.service, f"end-{target.namespace}", references=old.references)
    load.start()

    def do(event: streams.Event) -> None:
        load.hold()
        eventually("no short request runs", lambda: load.status()["running"] <= streams.STREAMS, 20)
        events.namespace_deleted(target, event)

    load.event("namespace deleted", do)
    _, (one,) = report_of(load, show)
    assert one.clean, one.wrong


REAL = ("scale up", "flags changed", "pod deleted", "scale down")


@pytest.mark.chaos
@pytest.mark.parametrize("uri", ["builtin://tiny-kjv", "builtin://smollm2-135m"])
def test_real_answers(operator: None, namespace: str, client: Client, show: Show, uri: str) -> None:
    """Models that compute: greedy texts stay what they are whoever goes on with the service."""
    load = Load(client, Service("real", namespace), f"real-{namespace}", streams=4, tokens=200, knock=2)
    target = events.Target(load.service)
    exact = {"device": "cpu", "batch-invariant": "true"}
    spec = streams.spec(replicas=2) | {"engine": {"maxNumSeqs": 16, "args": exact}}
    target.service.apply(kit.manifest("real", uri, **spec))
    target.settle()
    load.reference("calm", target.service)
    load.start()
    for name in REAL:
        load.event(name, partial({**PLANNED, **MORE_PLANNED}[name], target))
    report, _ = report_of(load, show, model=uri)
    assert not (wrong := wrongly(load, report)), f"{len(wrong)} requests; the first: {wrong[:3]}"
