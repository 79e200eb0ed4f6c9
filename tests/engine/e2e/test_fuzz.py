"""Requests that nobody would send: no 5xx, every refusal in OpenAI's shape, and nothing left in the engine."""

import json
import random
import socket
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from e2e_harness import Serve, request_bytes
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

QUICK = settings(
    deadline=None,
    database=None,
    derandomize=True,  # the same requests in every run
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_what_the_page_offers(tiny: Serve, mode: GenerationMode) -> None:
    """Requests made from the server's own OpenAPI page: statuses, content types and bodies are those it promises, and
    what the page excludes is refused. (Rules between fields are not on the page: some valid requests get a 400.)"""
    page = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    tried = Counter[str]()

    def try_all(operation: Any) -> None:
        @given(operation.as_strategy(mode))
        @settings(QUICK, max_examples=7)
        def send(case: Any) -> None:
            tried[operation.label] += 1
            case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=120)

        send()

    for found in page.get_all_operations():
        if mode is GenerationMode.POSITIVE or found.ok().body:  # GETs without parameters cannot be wrong
            try_all(found.ok())
    assert tried["POST /v1/chat/completions"] >= 7 and tried["POST /v1/completions"] >= 7


ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
FIELDS = """
    model messages prompt tokens max_tokens max_completion_tokens n seed stop stream stream_options temperature top_p
    top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias logprobs top_logprobs echo best_of
    response_format tools tool_choice user ignore_eos min_tokens stop_token_ids chat_template_kwargs priority
    cache_salt add_generation_prompt continue_final_message add_special_tokens include_stop_str_in_output
    skip_special_tokens metadata reasoning_effort modalities suffix return_token_strs
"""
HUGE = [2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, 1e308, -1e308, 1e-320]
NUMBERS = st.one_of(
    st.integers(-3, 20), st.sampled_from(HUGE), st.floats(allow_nan=True, allow_infinity=True), st.integers(2000, 2100)
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=20),  # lone surrogates as well
    st.sampled_from(["", "\0", "\ud800", "<|endoftext|>", "\u202e", "e\u0301" * 50, "👍🏽", "{{ 7*7 }}", "a" * 3000]),
)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
GOOD = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user", "content": ""}]},
    ],
    "/v1/completions": [{"prompt": "And God"}, {"prompt": [5, 6]}, {"prompt": ["a", "b"]}, {"prompt": [[5], [6, 7]]}],
    "/tokenize": [{"prompt": "And God"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 6]}, {"tokens": []}],
}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "judge"]) | ANY},
    optional={
        "content": TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2) | ANY,
        "name": TEXTS,
        "tool_calls": ANY,
        "tool_call_id": ANY,
    },
)
IDS = st.lists(st.integers(-2, 2050) | NUMBERS, max_size=5)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny-kjv"]),
    "messages": st.lists(MESSAGE, max_size=3),
    "prompt": TEXTS | IDS | st.lists(TEXTS | IDS, max_size=3),
    "tokens": IDS,
    "max_tokens": st.integers(-1, 8),
    "max_completion_tokens": st.integers(-1, 8),
    "n": st.integers(0, 4),
    "seed": NUMBERS,
    "stop": TEXTS | st.lists(TEXTS, max_size=18),
    "stream": st.booleans(),
    "temperature": st.sampled_from([0, 1e-9, 0.5, 2, 1e10]) | NUMBERS,
    "top_p": st.floats(-0.1, 1.1),
    "top_k": NUMBERS,
    "min_p": st.floats(-0.1, 1.1),
    "logit_bias": st.dictionaries(st.integers(-1, 2050).map(str) | TEXTS, st.floats(-101, 101) | ANY, max_size=3),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "top_logprobs": st.integers(-1, 21),
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 9),
    "echo": st.booleans(),
    "priority": NUMBERS,
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), st.booleans()),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An endpoint and a body: good at first, then with some fields more or another value."""
    path = draw(st.sampled_from(ENDPOINTS))
    body: dict[str, Any] = dict(draw(st.sampled_from(GOOD[path])))
    names = [*FIELDS.split(), *list(body) * 4] if path.startswith("/v1") else [*list(body), "model", "messages"]
    for name in draw(st.lists(st.sampled_from(names), max_size=2, unique=True)):
        body[name] = draw(LIKELY.get(name, ANY) if draw(st.integers(0, 5)) else ANY)
    if path.startswith("/v1"):
        body.setdefault("max_tokens", 6)
    return path, body


def check(response: httpx.Response, sent: Any) -> None:
    assert response.status_code < 500, (sent, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, sent
        assert (
            len(error["message"]) <= 1000 and len(error["param"] or "") <= 200 and "Traceback" not in error["message"]
        ), sent
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") and '{"error"' not in response.text, sent
    else:
        json.loads(response.content, parse_constant=lambda name: pytest.fail(f"{name} in JSON: {sent}"))


def test_bodies_of_every_kind(tiny: Serve) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    with httpx.Client(base_url=tiny.url, timeout=30) as client:

        @given(bodies(), st.booleans())
        @settings(QUICK, max_examples=250)
        def send(asked: tuple[str, dict[str, Any]], escaped: bool) -> None:
            path, body = asked
            content = json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            seen[path, response.status_code // 100] += 1
            check(response, (path, content))

        send()
    for path in ENDPOINTS:
        assert seen[path, 2] >= 5 and seen[path, 4] >= 5, ("the bodies are all good or all bad", seen)


def test_bytes_that_are_no_json(tiny: Serve) -> None:
    rng = random.Random(4)
    good = json.dumps({"prompt": "And God said", "max_tokens": 2, "stop": ["x", "é"], "n": 1}).encode()
    broken = [good[:i] for i in range(0, len(good), 7)]
    broken += [good[: (i := rng.randrange(len(good)))] + bytes([rng.randrange(128, 256)]) + good[i:] for _ in range(40)]
    for depth in (60, 1000, 200_000):
        broken += [b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth]
        broken += [b'{"prompt":' + b"[" * depth + b"1" + b"]" * depth + b"}"]
    broken += [b"", b"null", b"[]", b'"x"', b"1", b"NaN", b'{"prompt":"x","temperature":NaN}', b"\xff\xfe{}"]
    broken += [b'{"prompt":"x","max_tokens":1e400}', b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", b"{}" * 2]
    with httpx.Client(base_url=tiny.url, timeout=30) as client:
        for path in ENDPOINTS:
            for content in broken:
                response = client.post(path, content=content, headers={"content-type": "application/json"})
                check(response, content[:200])
                assert response.status_code == 400, content[:200]
        assert client.post("/v1/completions", content=good, headers={"content-type": "text/plain"}).status_code == 415


RAW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 100,
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -2\r\n\r\n{}",
    "a length of many digits": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n{}",
    "too large": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
    "chunks that are none": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a header of a megabyte": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "a path that is none": b"GET /v1/models/%ff%00%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a websocket": b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("what", RAW)
def test_bytes_that_are_no_request(tiny: Serve, what: str) -> None:
    with socket.create_connection(tiny.address, timeout=5) as raw:
        answer = b""
        try:
            raw.sendall(RAW[what])
            raw.shutdown(socket.SHUT_WR)
            while data := raw.recv(65536):
                answer += data
        except OSError:
            pass  # closed in the middle of it
    status = int(answer.split(maxsplit=2)[1]) if answer else 0
    assert status < 500 and status not in (101, 200), (what, answer[:300])
    assert tiny.get("/health").status_code == 200


def test_a_body_in_chunks_has_the_limit_as_well(tiny: Serve) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(tiny.address, timeout=10) as raw:
        raw.sendall(head)
        chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
        for _ in range(17):
            raw.sendall(chunk)
        raw.sendall(b"0\r\n\r\n")
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:300]
    with socket.create_connection(tiny.address, timeout=10) as raw:
        body = request_bytes("/tokenize", {"prompt": "And God"}).partition(b"\r\n\r\n")[2]
        raw.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
