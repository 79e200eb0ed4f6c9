"""The judge of the end-to-end tests of events: what it says of a text, and to which event it puts a failure."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.api.load import load_text

E2E = Path(__file__).resolve().parents[2] / "e2e"
TEXT = st.text(alphabet="abc ", max_size=60)


def module(name: str) -> ModuleType:
    """A module of e2e/, which finds its neighbours."""
    file = E2E / name
    spec = importlib.util.spec_from_file_location(f"e2e_{file.stem}", file)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(E2E))
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.path.pop(0)
    return loaded


CLIENT, STREAMS = module("client/load.py"), module("streams.py")
REFERENCE = "".join(f"<{number}>" for number in range(400))


@given(TEXT, TEXT)
def test_common_prefix(one: str, other: str) -> None:
    length = CLIENT.common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 400))
def test_every_fault_of_a_text_is_seen(start: int, cut: int, length: int) -> None:
    """A piece that comes twice, that is missing, or that is another's."""
    text = REFERENCE[: 1000 + start]
    judged = CLIENT.judged
    assert judged(text, [REFERENCE], 50, 50, "length") == ("right", "")
    assert judged(text, ["xyz", REFERENCE], 50, 50, "length")[0] == "right"
    assert judged(text + "\ufffd", [REFERENCE], 50, 50, "length")[0] == "right"
    assert judged(text, [REFERENCE], 49, 50, "length")[0] == "truncated"
    assert judged(text, [REFERENCE], 50, 50, None)[0] == "truncated"
    assert judged(text, [REFERENCE], 51, 50, "length")[0] == "duplicated"
    twice = text[:cut] + text[max(cut - length, 0) :]
    if cut:
        outcome = judged(twice, [REFERENCE], 50, 50, "length")[0]
        assert outcome == "duplicated" if len(text) - cut + min(length, cut) >= 12 else outcome != "right"
    without = text[:cut] + text[cut + length :]
    if not text.startswith(without):
        assert judged(without, [REFERENCE], 50, 50, "length")[0] != "right"
    other = REFERENCE.replace("<", "[")
    mixed = judged(text[:cut] + other[cut:1500], [REFERENCE, other], 50, 50, "length")[0]
    assert (mixed == "right") == (cut == 0)


def row(start: float, end: float, outcome: str = "right", **more: object) -> dict:
    base = {"kind": "long", "seed": 1, "start": start, "end": end, "outcome": outcome, "detail": "", "first": 0.1}
    return {**base, "longest": 0.2, "pauses": [], **more}


def test_a_failure_belongs_to_the_event_under_way() -> None:
    events = [STREAMS.Event("one", 10, 20), STREAMS.Event("two", 30, None), STREAMS.Event("three", 50, 60)]
    rows = [
        row(0, 9),
        row(0, 25, "failed"),  # after one had ended, before two began
        row(0, 30, "truncated"),
        row(0, 70, "duplicated"),
        row(12, 45, pauses=[(18.0, 5.0)], longest=5.0),
        row(55, 65, first=2.5),
    ]
    one, two, three = STREAMS.verdicts(rows, events)
    assert (one.failed, one.truncated, one.duplicated) == (1, 0, 0) and not one.clean
    assert (two.failed, two.truncated, two.duplicated) == (0, 1, 0)
    assert (three.failed, three.truncated, three.duplicated) == (0, 0, 1)
    assert (one.streams, two.streams, three.streams) == (4, 2, 2)
    assert (one.longest_pause, two.longest_pause, three.longest_pause) == (5.0, 0.2, 0.2)
    assert (one.longest_wait, three.longest_wait) == (0.1, 2.5)
    assert (one.seconds, two.seconds, three.seconds) == (10, None, 10)
    shown = STREAMS.table([one, two])
    assert "| one | 4 | 1 | 0 | 0 | 0 | 5.0 | 0.1 | 10 |" in shown and "not reached" in shown


def test_pauses_are_put_to_the_event_that_they_touch() -> None:
    events = [STREAMS.Event("one", 10, 20), STREAMS.Event("two", 30, 40)]
    found = STREAMS.verdicts([row(0, 100, pauses=[(28.0, 4.0)], longest=4.0)], events)
    assert [one.longest_pause for one in found] == [4.0, 4.0]


@pytest.mark.parametrize("outcome", ["failed", "truncated", "duplicated", "differs"])
def test_every_outcome_is_counted(outcome: str) -> None:
    (found,) = STREAMS.verdicts([row(0, 1, outcome)], [STREAMS.Event("one", 0.5, 2)])
    assert not found.clean and getattr(found, outcome) == 1 and outcome in STREAMS.table([found]) + str(found.wrong)


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    """docs/operations.md shows the last verdict on each event, and nothing else."""
    tables = module("events_table.py")
    assert tables.page(tables.PAGE.read_text(), tables.RESULTS.read_text().splitlines()) == tables.PAGE.read_text()
    rows = [
        {"event": "one", "streams": 50, "seconds": s, "full": full} for s, full in ((1, True), (2, True), (3, False))
    ]
    every = dict.fromkeys(STREAMS.Verdict.__dataclass_fields__, 0)
    (found,) = tables.latest([json.dumps({**every, "wrong": [], **row}) for row in rows])
    assert (found.event, found.seconds) == ("one", 2)
    computed = [json.dumps({**every, "wrong": [], **row, "full": True, "model": "builtin://kjv"}) for row in rows]
    assert [one.event for one in tables.latest(computed, computed=True)] == ["kjv: one"]
    assert not tables.latest(computed)


def test_commands_of_a_page(tmp_path: Path) -> None:
    pages = module("pages.py")
    page = tmp_path / "page.md"
    page.write_text(
        "# x\n```\nA=1\necho $A > file\n```\n```yaml\na: b\n```\n```\n$ echo NAME; false\nNAME ...\nx\n```\n"
    )
    assert [(b.line, b.language, b.expected) for b in pages.blocks(page)] == [
        (2, "", []),
        (6, "yaml", []),
        (9, "", ["NAME"]),
    ]
    assert pages.run_page(page, tmp_path) == {2: "", 9: "NAME\n"} and (tmp_path / "file").read_text() == "1\n"
    page.write_text("```\nfalse\necho never\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 1: false\necho never\n\nexit 1"):
        pages.run_page(page, tmp_path)
    page.write_text("```\n$ echo other\nNAME\n```\n")
    with pytest.raises(AssertionError, match=r"said nothing of .'NAME'.:\nother"):
        pages.run_page(page, tmp_path)


def test_the_service_under_load_is_a_valid_one() -> None:
    """On the simulated device, slow enough for one client, and the calm one fast."""
    sys.path.insert(0, str(E2E))
    try:
        import kit
    finally:
        sys.path.pop(0)
    for args, speed in ((STREAMS.PACE, "0.05"), (STREAMS.FAST, "20")):
        text = kit.manifest("load", **STREAMS.spec(engine={"args": args}))
        found = load_text(text, "load").spec.engine.args
        assert found["device"] == "sim" and str(found["sim-speed"]) == speed
