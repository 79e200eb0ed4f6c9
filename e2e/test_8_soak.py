"""Half an hour of random events under fifty streams: no client sees an error.

KVERN_E2E_SOAK_SECONDS and KVERN_E2E_SOAK_SEED say how long and which; both are in the report.
"""

import os
import random
import time
from functools import partial

import events
import pytest
import streams
from busy import Show, begin, other_names, report_of
from conftest import drop_namespace, make_namespace_named
from events import CONTROL, MORE_PLANNED, PLANNED
from kit import Client

pytestmark = [pytest.mark.alone, pytest.mark.soak]
SECONDS = float(os.environ.get("KVERN_E2E_SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("KVERN_E2E_SOAK_SEED", "0")) or int(time.time())
# What ends no process that streams run on.
CHOICE = {**PLANNED, **MORE_PLANNED, **CONTROL}


@pytest.mark.timeout(SECONDS + 1800)
def test_soak(operator: None, client: Client, show: Show) -> None:
    """Every event at random, one after the other, each ended when the service is as its spec says."""
    draw = random.Random(SEED)
    namespace = make_namespace_named("soak")
    other_names()
    target, load = begin(namespace, client, "soak")
    try:
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            events.fresh_operator()
            name = draw.choice(sorted(CHOICE))
            do = CHOICE[name]
            load.event(name, partial(do, target))
            time.sleep(draw.uniform(0, 10))
        report, found = report_of(load, show, soak=SEED)
    finally:
        load.stop()
        drop_namespace(namespace)
    wrong = [f"{one.event}: {one.wrong[:2]}" for one in found if not one.clean]
    assert not wrong, f"seed {SEED}: {wrong}"
    counts = {what: report[what] for what in ("requests", "right", "tokens", "longest_pause")}
    streams.note(summary="soak", seed=SEED, seconds=SECONDS, events=len(found), full=False, **counts)
    show(f"{SECONDS:.0f} s, seed {SEED}, {len(found)} events: {counts}")
    assert report["requests"] > streams.STREAMS * SECONDS / streams.STREAM_SECONDS / 2
