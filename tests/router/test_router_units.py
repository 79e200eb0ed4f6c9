"""The pure parts: health, the file of replicas, event streams, flags, heads, keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_router.auth import ApiKeys
from kvern_router.errors import RouterError
from kvern_router.health import HUNG_AFTER, MAX_SKIP, Health, Probe
from kvern_router.http1 import Request, check_head, request_head
from kvern_router.policy import Policy
from kvern_router.replicas import HostSpec, ReplicasError, parse_replicas
from kvern_router.settings import parse_args
from kvern_router.sse import MAX_LINE, LineGate, error_event, opening_error

# health


def test_who_has_not_spoken_gets_nothing() -> None:
    health = Health()
    assert not health.available(0.0)
    health.probed(Probe.SOMEBODY_ELSE, 0.0, 0.1)
    assert not health.available(0.1)
    health.probed(Probe.READY, 0.2, 0.3)
    assert health.available(0.3)


def test_one_crash_that_takes_many_requests_is_one_failure() -> None:
    health = Health(Probe.READY)
    for _ in range(50):
        health.failed(began=1.0, now=10.0)
    assert health.failures == 1
    assert not health.available(10.4)
    assert health.available(10.6)


def test_the_skip_doubles_with_each_failure_up_to_a_limit() -> None:
    health, now, skips = Health(), 0.0, []
    for _ in range(9):
        health.failed(began=now, now=now)
        skips.append(health.skip_until - now)
        now = health.skip_until
    assert skips[:4] == [0.5, 1.0, 2.0, 4.0]
    assert skips[-1] == MAX_SKIP
    health.served(began=now)
    assert health.failures == 0


def test_a_probe_that_began_before_the_failure_does_not_readmit() -> None:
    health = Health()
    health.failed(began=5.0, now=5.0)
    health.probed(Probe.READY, began=4.9, now=5.1)
    assert not health.available(5.1)
    health.probed(Probe.READY, began=5.1, now=5.2)
    assert health.available(5.2)


def test_a_replica_that_fails_though_its_probe_is_fine_waits_its_time() -> None:
    health = Health()
    for now in (0.0, 10.0, 20.0):
        health.failed(began=now, now=now)
    health.probed(Probe.READY, began=20.1, now=20.2)
    assert not health.available(20.2)
    assert health.available(22.1)


def test_hung_only_after_several_silent_probes_and_back_after_one_answer() -> None:
    health = Health()
    health.probed(Probe.READY, 0.0, 0.0)
    for i in range(HUNG_AFTER):
        assert health.available(1.0)
        health.probed(None, float(i), float(i))
    assert health.probe is Probe.HUNG
    health.probed(Probe.READY, 5.0, 5.0)
    assert health.available(5.0)


def test_a_refusal_is_no_failure_and_lasts_until_a_newer_probe() -> None:
    health = Health()
    health.refused(3.0)
    health.probed(Probe.READY, began=2.0, now=3.1)
    assert not health.available(100.0)
    assert health.failures == 0
    health.probed(Probe.READY, began=3.2, now=3.3)
    assert health.available(3.3)


# replicas


def test_a_list_of_replicas_is_read_and_what_is_unknown_ignored() -> None:
    text = json.dumps(
        {
            "model": "m",
            "later": 1,
            "replicas": [
                {"name": "a", "url": "http://10.0.0.1:8000/", "admin_url": "http://10.0.0.1:8001", "uid": "u"},
                {"name": "b", "url": "http://[::1]:9/base", "weight": 2, "state": "draining"},
            ],
        }
    )
    listed = parse_replicas(text)
    a, b = listed.replicas
    assert (listed.model, a.host, a.port, a.base, a.weight, a.state, a.uid) == (
        "m",
        "10.0.0.1",
        8000,
        "",
        1.0,
        "ready",
        "u",
    )
    assert (b.host, b.port, b.base, b.weight, b.state) == ("::1", 9, "/base", 2.0, "draining")


def test_names_limits_and_routers_are_read_beside_the_list() -> None:
    more = {
        "hosts": [{"name": "a", "host": "a.b.svc", "port": 8000, "weight": 2, "later": 1}],
        "limits": {"requestsPerMinute": 5, "later": 1},
        "routers": ["10.0.0.1:8000", "[::1]:8000"],
    }
    listed = parse_replicas(json.dumps({"replicas": [], **more}))
    assert listed.hosts == (HostSpec("a", "a.b.svc", 8000, 2.0),)
    assert (listed.limits.requests, listed.limits.tokens) == (5, None)
    assert listed.routers == (("10.0.0.1", 8000), ("::1", 8000))
    assert not parse_replicas('{"replicas": []}').limits.any


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ({"replicas": [], "hosts": {}}, "hosts: {}; expected a list"),
        ({"replicas": [], "hosts": [{"name": "a", "port": 1}]}, "hosts[0].host: None; expected a non-empty string"),
        ({"replicas": [], "hosts": [{"name": "a", "host": "a", "port": 0}]}, "hosts[0].port: 0; expected a number"),
        ({"replicas": [], "hosts": [{"name": "a", "host": "a", "port": 1}] * 2}, "hosts: the name 'a' occurs 2 times"),
        ({"replicas": [], "limits": 3}, "limits: 3; expected an object"),
        (
            {"replicas": [], "limits": {"tokensPerMinute": 0}},
            "limits.tokensPerMinute: 0; expected a whole number of at least 1",
        ),
        ({"replicas": [], "routers": ["a:b"]}, "routers[0]: 'http://a:b'; expected http://host:port"),
        ({"replicas": [], "routers": ["a:1/x"]}, "routers[0]: 'a:1/x'; expected host:port"),
        ([], 'expected an object {"model": "...", "replicas": [...]}'),
        ({"replicas": [{"url": "http://a:1"}]}, "replicas[0].name: None; expected a non-empty string"),
        ({"replicas": [{"name": "a", "url": "a:1"}]}, "replicas[0].url: 'a:1'; expected http://host:port"),
        ({"replicas": [{"name": "a", "url": "https://a"}]}, "replicas[0].url: 'https://a'; expected http://host:port"),
        ({"replicas": [{"name": "a", "url": "http://a:99999"}]}, "expected http://host:port"),
        (
            {"replicas": [{"name": "a", "url": "http://a:1", "weight": -1}]},
            "weight: -1; expected a number of at least 0",
        ),
        ({"replicas": [{"name": "a", "url": "http://a:1", "weight": True}]}, "weight: True; expected"),
        ({"replicas": [{"name": "a", "url": "http://a:1", "state": "up"}]}, "'up'; expected one of ready, draining"),
        ({"replicas": [{"name": "a", "url": "http://a:1"}] * 2}, "the name 'a' occurs 2 times; names must differ"),
        ({"model": 3, "replicas": []}, "model: 3; expected a string"),
        ({"replicas": [7]}, "replicas[0]: 7; expected an object"),
    ],
)
def test_a_wrong_list_says_what_would_be_right(document: object, message: str) -> None:
    with pytest.raises(ReplicasError) as caught:
        parse_replicas(document if isinstance(document, str) else json.dumps(document))
    assert message in str(caught.value)


# event streams


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([b"data: {}\n\n", b": ping\n", b"event: x\r\ndata: y\r\n\r\n", b"data: \xc3\xa6\n"])),
    st.data(),
)
def test_the_gate_passes_every_byte_in_whole_lines(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events) + b"data: begun"
    gate, out = LineGate(), []
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        passed = gate.feed(stream[:n])
        assert passed == b"" or passed.endswith(b"\n")
        out.append(passed)
        stream = stream[n:]
    assert b"".join(out) + gate.tail == b"".join(events) + b"data: begun"


def test_the_gate_does_not_collect_a_line_without_end() -> None:
    gate = LineGate()
    passed = sum(len(gate.feed(b"x" * 1000)) for _ in range(1000))
    assert len(gate.tail) <= MAX_LINE
    assert passed + len(gate.tail) == 1_000_000


def test_the_gate_knows_the_last_event() -> None:
    gate = LineGate()
    gate.feed(b"data: 1\n\n")
    assert not gate.finished
    gate.feed(b"data: [DONE]\n\n")
    assert gate.finished


def test_an_error_that_opens_a_stream_is_told_from_content() -> None:
    assert opening_error(error_event({"message": "dead"}).lstrip()) == {"message": "dead"}
    assert opening_error(b'event: error\ndata: {"error": {"message": "x"}}\n\n') == {"message": "x"}
    assert opening_error(b'data: {"error": {"message": "x", "type": "invalid_request_error"}}\n\n') is None
    assert opening_error(b'data: {"choices": [{"text": "\\"error\\""}]}\n\n') is None
    assert opening_error(b'data: {"error": broken\n\n') is None
    assert opening_error(b'data: {"id": "x", "error": null}\n\n') is None


# flags


def test_flags_have_the_documented_defaults_and_names() -> None:
    settings = parse_args(["--replicas-file", "f.json"])
    assert settings.listen == ("127.0.0.1", 8000)
    assert (settings.policy, settings.hold_timeout, settings.max_held) == (Policy.PREFIX_AWARE, 60.0, 1024)
    flags = "--replicas-file f --listen [::]:80 --policy Session --drain-timeout-seconds 7 --max-held=0"
    more = "--metrics-listen 0.0.0.0:9090 --model m --api-keys-file k --no-access-log"
    settings = parse_args(f"{flags} {more}".split())
    assert (settings.listen, settings.metrics_listen) == (("::", 80), ("0.0.0.0", 9090))
    assert (settings.drain_timeout, settings.max_held, settings.api_keys_file) == (7.0, 0, Path("k"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--listen", "8000"], "--listen: '8000'; expected HOST:PORT"),
        (["--hold-timeout-seconds", "-1"], "--hold-timeout-seconds: '-1'; expected a number of at least 0"),
        (["--idle-timeout-seconds", "0"], "--idle-timeout-seconds: '0'; expected a number above 0"),
        (["--max-held", "many"], "--max-held: 'many'; expected a whole number"),
        (["--load-factor", "0.5"], "--load-factor: '0.5'; expected a number of at least 1"),
        (["--policy", "RoundRobin"], "--policy"),
        (["--polcy", "Session"], "--polcy"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--replicas-file", "f", *flags])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# heads and keys


def request(*headers: tuple[bytes, bytes], target: bytes = b"/v1/x", method: bytes = b"POST") -> Request:
    return Request(began=0.0, method=method, target=target, headers=[(b"host", b"h"), *headers])


def test_what_concerns_one_hop_is_not_passed_on() -> None:
    asked = request(
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"x-forwarded-for", b"1.2.3.4"),
        (b"authorization", b"Bearer k"),
        (b"x-request-id", b"mine"),
    )
    assert check_head(asked, 10) is None
    lines = request_head(asked, "/base", b"9.9.9.9", 3).split(b"\r\n")
    assert lines[0] == b"POST /base/v1/x HTTP/1.1"
    assert set(lines[1:]) == {
        b"host: h",
        b"authorization: Bearer k",
        b"x-forwarded-for: 1.2.3.4, 9.9.9.9",
        b"x-request-id: mine",
        b"content-length: 3",
        b"",
    }


def test_a_request_id_that_could_forge_a_log_line_is_replaced() -> None:
    for bad in (b"a b", b"x" * 129, b"\xff"):
        asked = request((b"x-request-id", bad))
        check_head(asked, 10)
        assert asked.request_id != bad and len(asked.request_id) == 32


def test_absolute_targets_become_paths() -> None:
    for target, path in ((b"http://h/v1/x?a=/b", b"/v1/x?a=/b"), (b"http://h", b"/"), (b"http://h/", b"/")):
        asked = request(target=target)
        assert check_head(asked, 10) is None
        assert asked.target == path


def test_keys_are_rotated_and_an_empty_file_is_refused() -> None:
    keys = ApiKeys()
    with pytest.raises(ValueError, match="holds no key"):
        keys.load("# only a comment\n\n")
    keys.load("one\n# a comment\ntwo\n")
    first = keys.tenant(request((b"authorization", b"Bearer one")))
    assert (
        first == keys.tenant(request((b"x-api-key", b"one"))) != keys.tenant(request((b"authorization", b"bearer two")))
    )
    keys.load("three\n")
    for header, message in (((b"authorization", b"Bearer one"), "not valid"), ((b"accept", b"*/*"), "No API key")):
        with pytest.raises(RouterError, match=message) as caught:
            keys.tenant(request(header))
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
