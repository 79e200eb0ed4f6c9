"""The arithmetic of limits, and what an answer cost read off its bytes: pure, with properties over random histories."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_router.limits import Bucket, Limits, Meter, duration
from kvern_router.usage import Usage

amounts = st.floats(0, 5000, allow_nan=False)
gaps = st.floats(0, 120, allow_nan=False)
limits = st.integers(1, 100_000)


@given(limits, st.lists(st.tuples(gaps, amounts), max_size=40))
def test_a_bucket_never_holds_more_than_a_minutes_worth_and_loses_nothing(
    limit: int, charges: list[tuple[float, float]]
) -> None:
    bucket, now, charged = Bucket.full(limit, 0.0), 0.0, 0.0
    for gap, amount in charges:
        now += gap
        bucket.charge(now, amount)
        charged += amount
        assert bucket.level <= limit
        assert bucket.level >= limit - charged - 1e-3, "nobody but charges takes from it"
        assert bucket.level <= limit - charged + limit * now / 60 + 1e-3, "and nothing but time gives"


@given(limits, st.lists(st.tuples(gaps, st.integers(0, 200_000)), max_size=40))
def test_what_is_let_in_stays_within_the_limit(limit: int, asked: list[tuple[float, int]]) -> None:
    """Over any history: a minute's worth at once, and the limit's rate. Prompts above a whole bucket go into debt."""
    meter, now, used, largest = Meter.new(Limits(None, limit), 0.0), 0.0, 0, 0
    for gap, tokens in asked:
        now += gap
        if meter.admit(now, tokens) is None:
            used, largest = used + tokens, max(largest, tokens)
        assert used <= limit + limit * now / 60 + max(0, largest - limit) + 1e-3


@given(limits, st.lists(st.tuples(gaps, st.integers(0, 3000)), max_size=30), st.integers(0, 200_000))
def test_whoever_waits_as_long_as_he_is_told_is_let_in(
    limit: int, before: list[tuple[float, int]], tokens: int
) -> None:
    meter, now = Meter.new(Limits(limit, limit), 0.0), 0.0
    for gap, cost in before:
        now += gap
        meter.admit(now, cost)
        meter.charge(now, cost)
    refusal = meter.admit(now, tokens)
    if refusal is not None:
        assert refusal.wait > 0 and refusal.limit == limit
        half = Meter(*(Bucket(b.capacity, b.level, b.at) for b in (meter.requests, meter.tokens) if b is not None))
        if refusal.wait > 0.01:
            assert half.admit(now + refusal.wait / 2, tokens) is not None, "and not much sooner"
        assert meter.admit(now + refusal.wait, tokens) is None


@given(limits, st.lists(st.tuples(gaps, st.integers(0, 3000)), max_size=30))
def test_what_is_refused_costs_nothing(limit: int, asked: list[tuple[float, int]]) -> None:
    meter, now = Meter.new(Limits(limit, limit), 0.0), 0.0
    for gap, tokens in asked:
        now += gap
        before = meter.missing(now)
        if meter.admit(now, tokens) is not None:
            assert meter.missing(now) == before


@given(limits, st.integers(0, 3000), st.integers(0, 3000))
def test_an_estimate_is_put_right(limit: int, estimated: int, true: int) -> None:
    right, wrong = (Meter.new(Limits(None, 10 * limit + 60_000), 0.0) for _ in range(2))
    right.admit(0.0, true)
    wrong.admit(0.0, estimated)
    wrong.charge(0.0, true - estimated)
    assert right.missing(0.0) == pytest.approx(wrong.missing(0.0))
    assert right.charged_tokens == pytest.approx(wrong.charged_tokens)


@given(limits, limits, st.integers(0, 200_000))
def test_another_limit_forgives_nothing(old: int, new: int, used: int) -> None:
    meter = Meter.new(Limits(None, old), 0.0)
    meter.charge(0.0, used)
    assert meter.tokens is not None
    before = meter.tokens.level
    meter.limit(Limits(None, new), 0.0)
    assert meter.tokens.level == min(before, new)
    meter.limit(Limits(), 0.0)
    assert meter.admit(0.0, 10**9) is None


def test_a_clock_that_goes_back_neither_gives_nor_takes() -> None:
    bucket = Bucket.full(60, 100.0)
    bucket.charge(100.0, 60)
    assert bucket.refill(50.0) == 0
    assert bucket.refill(101.0) == pytest.approx(1.0)


def test_the_longer_wait_of_the_two_is_told() -> None:
    meter = Meter.new(Limits(1, 1000), 0.0)
    assert meter.admit(0.0, 900) is None
    refusal = meter.admit(0.0, 200)
    assert refusal is not None and (refusal.which, refusal.limit, refusal.wait) == ("requests", 1, 60.0)


def test_headers_are_openais() -> None:
    meter = Meter.new(Limits(60, 6000), 0.0)
    assert meter.admit(0.0, 50.5) is None
    assert dict(meter.headers(0.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5949",
        b"x-ratelimit-reset-tokens": b"505ms",
    }
    meter.charge(0.0, 10**6)
    assert dict(meter.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"0"
    assert Meter.new(Limits(), 0.0).headers(0.0) == []


@given(st.floats(0, 1e5, allow_nan=False))
def test_a_duration_is_never_shorter_than_the_truth(seconds: float) -> None:
    text = duration(seconds)
    total = 0.0
    if text.endswith("ms"):
        total = float(text[:-2]) / 1000
    else:
        minutes, _, rest = text.rpartition("m")
        total = 60 * float(minutes or 0) + float(rest[:-1])
    assert seconds - 1e-5 <= total <= seconds + (0.0011 if seconds < 59.9 else 1.001)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0001, "1ms"), (0.02, "20ms"), (1.5, "1.5s"), (59.999, "59.999s"), (360, "6m0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# usage


def events(count: int, usage: str = "", comment: str = "") -> bytes:
    chunk = json.dumps({"choices": [{"text": 'it says "prompt_tokens": 7 and \ndata: {'}]})
    return (f"data: {chunk}\n\n" * count + usage + comment + "data: [DONE]\n\n").encode()


@given(st.data(), st.integers(0, 20), st.booleans(), st.booleans())
def test_a_stream_is_counted_however_it_is_cut(data: st.DataObject, count: int, said: bool, commented: bool) -> None:
    """Pieces are whole lines (sse.py sees to it)."""
    usage = 'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 99}}\n\n' if said else ""
    whole = events(count, usage, ": kvern-usage 12 98\n\n" if commented else "")
    lines = whole.splitlines(keepends=True)
    counter, out, at = Usage(events=True), b"", 0
    while at < len(lines):
        size = data.draw(st.integers(1, 5))
        out += counter.feed(b"".join(lines[at : at + size]))
        at += size
    assert b"kvern-usage" not in out
    assert out.replace(b"\n", b"") == whole.replace(b": kvern-usage 12 98\n\n", b"").replace(b"\n", b"")
    expected = 12 + 98 if commented else 11 + 99 if said else 5 + count
    assert counter.total(200, 5) == expected
    assert counter.counted == count + said


def test_a_comment_cut_after_its_line_leaves_no_more_than_an_empty_line() -> None:
    counter = Usage(events=True)
    assert counter.feed(b": kvern-usage 1 2\n") == b""
    assert counter.feed(b"\ndata: [DONE]\n\n") == b"\ndata: [DONE]\n\n"
    assert counter.total(200, 50) == 3


def test_a_body_of_announced_length_is_left_alone() -> None:
    counter = Usage(events=True, strip=False)
    assert counter.feed(b": kvern-usage 1 2\n\n") == b": kvern-usage 1 2\n\n"
    assert counter.total(200, 50) == 3


@pytest.mark.parametrize(
    ("body", "status", "total"),
    [
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}, 200, 7),
        ({"content": [], "usage": {"input_tokens": 3, "output_tokens": 4}}, 200, 7),
        ({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}, 200, 3),
        ({"choices": [{"text": '"prompt_tokens": 9, "completion_tokens": 9'}]}, 200, 50),
        ({"error": {"message": "bad"}}, 400, 0),
        ({"error": {"message": "bad"}}, 503, 0),
    ],
)
def test_the_usage_of_other_answers(body: object, status: int, total: int) -> None:
    counter = Usage(events=False)
    raw = json.dumps(body).encode()
    for at in range(0, len(raw), 7):
        assert counter.feed(raw[at : at + 7]) == raw[at : at + 7]
    assert counter.total(status, 50) == total


def test_memory_for_it_is_bounded() -> None:
    counter = Usage(events=False)
    for _ in range(100):
        counter.feed(b"x" * 100_000)
    counter.feed(b'"usage": {"prompt_tokens": 1, "completion_tokens": 2}}')
    assert counter.total(200, 0) == 3
    assert len(counter._tail) <= 4096
