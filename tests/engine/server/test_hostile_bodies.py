"""JSON that is meant to hurt: what would make too many objects is refused before they are made, whatever its form."""

import json
import random
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_harness import Setup

from kvern_engine.server import body as shapes
from kvern_engine.server.errors import ApiError
from kvern_engine.server.limits import RequestLimits
from kvern_engine.server.protocol import ChatRequest, CompletionRequest, parse_body
from kvern_engine.server.reading import with_rests

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def counted(value: Any) -> tuple[int, int, int, int]:
    """Values, containers, members and depth of parsed JSON, the slow way."""
    if isinstance(value, dict | list):
        inner = [counted(v) for v in (value.values() if isinstance(value, dict) else value)]
        members = len(value) if isinstance(value, dict) else 0
        return (
            1 + sum(c[0] for c in inner),
            1 + sum(c[1] for c in inner),
            members + sum(c[2] for c in inner),
            1 + max((c[3] for c in inner), default=0),
        )
    return (1, 0, 0, 0)


def some_json(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind < 2:
        pieces = ['"', "\\", "{", "[", ",", ":", "a", "é", "\n", "\\u0022", "]", "}", "😀"]
        return "".join(rng.choices(pieces, k=rng.randrange(12)))
    if kind < 4:
        return rng.choice([1, -2.5e10, True, None])
    items = [some_json(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 4:
        return items
    return {str(some_json(rng, 0)) + str(i): item for i, item in enumerate(items)}


def in_parts(body: bytes, rng: random.Random) -> list[bytes]:
    """As it may come from a socket."""
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(4)))
    return [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]


@pytest.mark.parametrize("piece", [1, 2, 7, 16 << 10])
def test_the_shape_of_a_body_is_counted_exactly(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings with every character that could fool it, cut at every place."""
    monkeypatch.setattr(shapes, "_PIECE", piece)
    monkeypatch.setattr("kvern_engine.server.reading._REST_SECONDS", 0)
    rng = random.Random(5)
    seen: list[shapes.Shape] = []
    monkeypatch.setattr(shapes.Shape, "problem", lambda self, most: seen.append(self))
    for _ in range(80 if piece < 100 else 300):
        value = {"a": some_json(rng, 5)}
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert with_rests(shapes.scan(in_parts(text.encode(), rng), 64)) is None
            values, containers, members, depth = counted(value)
            shape = seen[-1]
            assert (shape.containers, shape.members, shape.deepest) == (containers, members, depth), text
            assert values <= shape.values + shape.containers and shape.values <= values + 1, text


@pytest.mark.parametrize("part", [1, 100, 256 << 10])
def test_a_body_is_looked_at_in_pieces(part: int) -> None:
    """Whoever looks may rest after each; parts as small as a byte are no pieces of their own."""
    body = b'{"prompt": "' + b"a, " * 100_000 + b'"}'
    steps = list(shapes.scan([body[at : at + part] for at in range(0, len(body), part)], 64))
    assert abs(len(steps) - len(body) / shapes._PIECE) <= 1


def test_the_thread_that_looks_rests_after_a_tenth_of_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds Python's lock meanwhile."""
    clock, rests = 0.0, []

    def rest(seconds: float) -> None:
        rests.append(round(clock * 1e6))

    def steps(each: float) -> Generator[None, None, str]:
        nonlocal clock
        for _ in range(10):
            clock += each
            yield
        return "done"

    monkeypatch.setattr("kvern_engine.server.reading.time", SimpleNamespace(perf_counter=lambda: clock, sleep=rest))
    assert with_rests(steps(40e-6)) == "done" and rests == [120, 240, 360]
    rests.clear()
    assert with_rests(steps(150e-6)) == "done" and len(rests) == 10


BIG = {
    "empty objects": (b'{"prompt":[' + b"{}," * 400_000 + b"1]}", "more than 200000 objects and arrays"),
    "empty arrays": (b'{"prompt":[' + b"[]," * 400_000 + b"1]}", "more than 200000 objects and arrays"),
    "members": (
        b"{" + b",".join(b'"%d":1' % i for i in range(400_000)) + b"}",
        "more than 300000 members of objects",
    ),
    "numbers": (b'{"prompt":[' + b"1," * 1_300_000 + b"1]}", "more than 1200000 values"),
    "strings": (b'{"prompt":[' + b'"",' * 1_300_000 + b"1]}", "more than 1200000 values"),
    "a deep one": (
        b'{"prompt":"' + b"x" * 70_000 + b'","a":' + b"[" * 70 + b"]" * 70 + b"}",
        "more than 64 levels deep",
    ),
}


@pytest.mark.parametrize("what", BIG)
def test_too_many_values_are_refused_before_they_are_made(
    live: Setup, http: httpx.Client, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr("kvern_engine.server.protocol.from_json", lambda body, **_: made.append(len(body)) or {})
    sent, words = BIG[what]
    answer = http.post(COMPLETIONS, content=sent, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"] and not made


def test_large_bodies_that_mean_no_harm(live: Setup, http: httpx.Client) -> None:
    """Prose full of commas and brackets, a prompt of many ids, a long conversation."""
    prose = 'He said: "[{,}]", and so on, \\ and on. ' * 3000
    assert len(prose) > 65_536
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 1200
    for path, sent in (
        ("/tokenize", {"prompt": prose}),
        ("/detokenize", {"tokens": [5, 6] * 155_000}),
        ("/tokenize", {"messages": messages}),
    ):
        answer = http.post(path, json=sent)
        assert answer.status_code == 200, answer.text[:300]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON: invalid unicode code point"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid JSON: invalid unicode code point"),
        (b'{"prompt": "a\nb"}', "control character"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a": 1,}', "trailing comma"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "trailing characters"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 levels deep (max_json_depth)."),
        (b"[" * 50_000, "not valid JSON: recursion limit exceeded"),
        (b"[" * 100_000, "nested more than 64 levels deep (max_json_depth)."),
    ],
)
def test_json_that_is_none(live: Setup, http: httpx.Client, path: str, sent: bytes, words: str) -> None:
    answer = http.post(path, content=sent, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["code"] == "invalid_json", error


def test_of_a_name_given_twice_the_last_counts(live: Setup, http: httpx.Client) -> None:
    """As with OpenAI, Python and JavaScript."""
    sent = b'{"prompt": "x", "max_tokens": 99999, "max_tokens": 2, "ignore_eos": true}'
    answer = http.post(COMPLETIONS, content=sent, headers={"Content-Type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("limits", "model", "fields", "param", "words"),
    [
        (
            {"json_depth": 4},
            CompletionRequest,
            {"prompt": [[[[[1]]]]]},
            None,
            "more than 4 levels deep (max_json_depth)",
        ),
        ({"n": 2}, CompletionRequest, {"n": 3}, "n", "n must be at most 2 (max_n), got 3."),
        ({"n": 2}, CompletionRequest, {"best_of": 3}, "best_of", "best_of must be at most 2 (max_n), got 3."),
        ({"stop": 1}, ChatRequest, {"stop": ["a", "b"]}, "stop", "stop must have at most 1 items (max_stop), got 2."),
        ({"stop_chars": 3}, ChatRequest, {"stop": "abcd"}, "stop[0]", "at most 3 characters (max_stop_chars), got 4."),
        ({"logprobs": 2}, CompletionRequest, {"logprobs": 3}, "logprobs", "at most 2 (max_logprobs), got 3."),
        ({"logprobs": 2}, ChatRequest, {"top_logprobs": 3}, "top_logprobs", "at most 2 (max_logprobs), got 3."),
        ({"logit_bias": 1}, ChatRequest, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias", "1 items (max_logit_bias)"),
        ({"messages": 1}, ChatRequest, {"messages": HI * 2}, "messages", "1 items (max_messages), got 2."),
        (
            {"content_parts": 2},
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}]},
            "messages",
            "messages must have at most 2 content parts (max_content_parts), got 3.",
        ),
        (
            {"tools": 1},
            ChatRequest,
            {"tools": [{}, {}]},
            "tools",
            "tools must have at most 1 items (max_tools), got 2.",
        ),
        (
            {"tools": 1},
            ChatRequest,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}, {}]}]},
            "messages[0].tool_calls",
            "messages[0].tool_calls must have at most 1 items (max_tools), got 2.",
        ),
    ],
)
def test_limits_that_the_configuration_lowers(
    limits: dict[str, int], model: Any, fields: dict[str, Any], param: str | None, words: str
) -> None:
    base: dict[str, Any] = {"prompt": "x"} if model is CompletionRequest else {"messages": HI}
    with pytest.raises(ApiError) as caught:
        parse_body(model, json.dumps({**base, **fields}).encode(), RequestLimits(**limits))
    assert (caught.value.status, caught.value.param) == (400, param) and words in caught.value.message


def test_flags_reach_the_limits(setup: Setup) -> None:
    setup.core()
    server = setup.server(max_n=2, max_json_depth=5, max_prompt_tokens=6, max_prompts_per_request=2)
    server.wait_for(200)
    url = server.url + COMPLETIONS
    for fields, words in (
        ({"prompt": "x", "n": 3}, "(max_n)"),
        ({"prompt": [[[[[[1]]]]]]}, "(max_json_depth)"),
        ({"prompt": [[5] * 4, [6] * 3]}, "A request's prompts must have at most 6 tokens (max_prompt_tokens), got 7."),
        ({"prompt": ["a", "b", "c"]}, "(max_prompts_per_request)"),
    ):
        answer = httpx.post(url, json=fields)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert not setup.cores[0].requests
    assert httpx.post(url, json={"prompt": [[5] * 3, [6] * 3], "n": 2}).status_code == 200


# ---------------------------------------------------------------- time limits


def test_a_template_without_an_end_is_stopped_and_others_go_on(setup: Setup) -> None:
    """The sandbox allows loops; two hundred thousand turns a second, a billion of them."""
    template = setup.folder / "endless.jinja"
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template.write_text("{% if messages[0].content == 'loop' %}" + loops + "{% endif %}{{ messages[0].content }}")
    setup.core()
    server = setup.server(chat_template=str(template), template_timeout_seconds=0.3)
    server.wait_for(200)
    answers: list[httpx.Response] = []

    def loop() -> None:
        body = {"messages": [{"role": "user", "content": "loop"}]}
        answers.append(httpx.post(server.url + CHAT, json=body, timeout=60))

    looping = threading.Thread(target=loop)
    looping.start()
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}, timeout=60).status_code == 200
    looping.join()
    assert answers[0].status_code == 400
    error = answers[0].json()["error"]
    assert "the chat template takes more than 0.3 seconds of processor time" in error["message"]
    assert "template_timeout_seconds" in error["message"] and error["code"] == "template_timeout"
    assert httpx.post(server.url + CHAT, json={"messages": HI}, timeout=60).status_code == 200
