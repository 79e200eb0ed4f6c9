"""A service under load, from its start to the table of what clients saw. For the tests of events and the soak."""

from collections.abc import Callable

import events
import kit
import nodes
import streams
from events import Target
from kit import Client, Service
from streams import Load, Verdict

Started = tuple[Target, Load]
Show = Callable[[str], None]
MODELS = {"kjv": "builtin://tiny-kjv", "smollm2": events.OTHER_MODEL}


def other_names() -> None:
    """Second names of the images, for events that change an image."""
    nodes.second_name("kvern/engine:e2e", events.OTHER_TAG)
    nodes.second_name("kvern/operator:e2e", f"kvern/operator:{events.OTHER_OPERATOR_TAG}")


def begin(namespace: str, client: Client, name: str) -> Started:
    """A service under load, its texts known beforehand from services that nobody disturbs."""
    load = Load(client, Service("load", namespace), f"{name}-{namespace}")
    target = Target(load.service)
    calm = {label: Service(f"calm-{label}", namespace) for label in MODELS}
    for label, one in calm.items():
        spec = streams.spec(engine={"args": streams.FAST}, replicas=1, router={"replicas": 1})
        one.apply(kit.manifest(one.name, MODELS[label], **spec))
    target.service.apply(kit.manifest("load", **streams.spec()))
    for label, one in calm.items():
        one.wait_ready()
        load.reference(label, one)
        kit.kubectl("-n", namespace, "delete", "infs", one.name, "--wait=false")
    target.settle()
    load.start()
    return target, load


def report_of(load: Load, show: Show, **more: object) -> tuple[kit.Object, list[Verdict]]:
    """The end of a load: its report, and the verdicts, which are shown at the end of the run and kept."""
    report = load.finish()
    found = streams.verdicts(report["rows"], load.events)
    show(streams.table(found))
    streams.record(found, stream_tokens=streams.TOKENS, full=streams.FULL, **more)
    return report, found


def wrongly(load: Load, report: kit.Object) -> list[str]:
    """Requests that ended otherwise than they should, but those that an event excuses."""
    blamed: list[str] = []
    for number, event in enumerate(load.events):
        later = load.events[number + 1].begin if number + 1 < len(load.events) else float("inf")
        here = [row for row in report["rows"] if row["outcome"] != "right" and event.begin <= row["end"] < later]
        blamed += [
            f"{event.name}: {row['kind']} {row['seed']}: {row['outcome']}: {row['detail']}"
            for row in here
            if not event.excuses(row)
        ]
    return blamed
