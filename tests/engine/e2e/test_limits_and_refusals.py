"""What the server refuses, with which status, words and headers; keys, ids, drains and flags, on real processes."""

import signal
import subprocess
from typing import Any

import httpx
import pytest
from e2e_harness import KVERN, TINY, Connection, Serve, ask_all, parse, wait_for

LONG = {"prompt": [9] * 20, "max_tokens": 8000, "ignore_eos": True, "stream": True}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_what_cannot_fit_is_refused_before_anything_runs(tiny: Serve) -> None:
    """A context of 256; the answer names the numbers, as OpenAI's does."""
    for body, words in (
        ({"prompt": [9] * 256}, "resulted in 256 tokens"),
        ({"prompt": [9] * 255, "max_tokens": 2}, "requested 257 tokens"),
        ({"prompt": [[9], [9] * 300]}, "resulted in 300 tokens"),
        ({"prompt": "beginning " * 60_000}, "resulted in at least"),
        ({"prompt": [9], "max_tokens": 2_000_000_000, "stream": True}, "at most 255 tokens of completion fit"),
    ):
        error = error_of(tiny.post("/v1/completions", **body), 400)
        assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
        assert "maximum context length is 256 tokens" in error["message"] and words in error["message"]
    chat = error_of(tiny.post("/v1/chat/completions", messages=[{"role": "user", "content": "word " * 400}]), 400)
    assert (chat["code"], chat["param"]) == ("context_length_exceeded", "messages")
    full = tiny.complete([9] * 255, max_tokens=1)
    assert full.status_code == 200 and full.json()["usage"]["total_tokens"] == 256


def test_a_pool_smaller_than_the_context_is_the_limit(serve: Any) -> None:
    """Ten blocks hold 160 tokens: the whole pool can be used, and not a token more is promised."""
    server = serve("--num-gpu-blocks-override", "10", "--sim-speed", "10", "--api-key", "first-key", "ключ", env=KEYS)
    keys(server)
    server.key = "first-key"
    error = error_of(server.complete([9] * 100, max_tokens=61), 400)
    assert error["code"] == "context_length_exceeded" and "160 tokens" in error["message"]
    bodies = [{"prompt": [9 + i] * 100, "max_tokens": 60, "ignore_eos": True} for i in range(6)]
    for answer in ask_all(server, bodies):
        assert answer.json["usage"]["total_tokens"] == 160
    crowd = ask_all(server, [{"prompt": [9] * 100, "max_tokens": 60, "ignore_eos": True, "n": 5}])[0]
    assert crowd.json["usage"]["completion_tokens"] == 300
    server.assert_at_rest()
    server.stop()
    for key in ("first-key", "from-the-environment", "second-key", "ключ", "wrong-key"):
        assert key not in server.text(), "a key is in the log"


KEYS = {"KVERN_API_KEYS": "from-the-environment,second-key"}


def keys(server: Serve) -> None:
    """Any of the keys opens everything; without one only probes and scrapes are."""
    wrong = (
        {},
        {"Authorization": "Bearer wrong-key"},
        {"Authorization": "Basic first-key"},
        {"X-API-Key": "first-key"},
    )
    for headers in wrong:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
            refused = httpx.request(method, server.url + path, headers=headers, json={"prompt": "x"})
            error = error_of(refused, 401)
            assert error["code"] == "invalid_api_key" and refused.headers["www-authenticate"] == "Bearer"
    for key in ("first-key", "second-key", "from-the-environment", "ключ"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        answer = httpx.post(f"{server.url}/v1/completions", headers=headers, json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200, key
    for open_path in ("/health", "/ready", "/metrics", "/version", "/ping"):
        assert server.get(open_path).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("/v1/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/chat/completions", "tool_choice", "auto"),
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "structured_outputs", {"json": {}}),
        ("/v1/completions", "suffix", "the end"),
        ("/v1/completions", "guided_regex", "a*"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_later_is_refused(tiny: Serve, path: str, field: str, value: Any, stream: bool) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    error = error_of(tiny.post(path, **given, **{field: value}, stream=stream), 400)
    assert "not served yet" in error["message"]
    assert (error["param"], error["code"], error["type"]) == (field, "unsupported", "invalid_request_error")


def test_later_endpoints(tiny: Serve) -> None:
    for path in ("/v1/responses", "/v1/embeddings", "/v1/messages"):
        assert "not served yet" in error_of(tiny.post(path, model="x", input="x"), 400)["message"]
    assert "There is no /v1/nothing" in error_of(tiny.get("/v1/nothing"), 404)["message"]
    wrong = tiny.get("/v1/completions")
    assert error_of(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"


def test_request_ids(tiny: Serve) -> None:
    given = httpx.get(f"{tiny.url}/v1/models", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 129, ""):
        made = httpx.get(f"{tiny.url}/v1/models", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(made) == 32 and made != bad
    # The same id twice at once: ids of the engine are the server's own.
    body = {"prompt": "And God said", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    connections = [Connection(tiny, "/v1/completions", body, "X-Request-Id: same") for _ in range(3)]
    answers = [parse(connection.rest()) for connection in connections]
    assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [20] * 3
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json["id"] for answer in answers}) == 3


def test_a_full_server_refuses_and_sigterm_drains_it(serve: Any) -> None:
    """Nine requests are all that it takes; of these, what ends in time gets its answer, the rest an error."""
    flags = ("--sim-speed", "0.5", "--drain-timeout-seconds", "10", "--max-waiting-requests", "9")
    server: Serve = serve(*flags, "--api-server-count", "2")
    short = {**LONG, "max_tokens": 120, "stream_options": {"include_usage": True}}
    streams = [Connection(server, "/v1/completions", short) for _ in range(6)]
    answer = Connection(server, "/v1/completions", {**short, "stream": False, "stream_options": None})
    endless = Connection(server, "/v1/completions", LONG)
    waiting = Connection(server, "/v1/completions", {**LONG, "stream": False, "n": 2})
    endless.read_until(b"data:")
    wait_for(lambda: server.metrics().total("kvern:requests_in_flight") == 9)
    _is_full(server)
    for stream in streams:
        stream.read_until(b"data:")
    server.signal(signal.SIGTERM)
    wait_for(lambda: "draining" in server.text())
    wait_for(lambda: not _answers(server))
    for stream in streams:
        ended = parse(stream.rest())
        assert ended.done and ended.usage["completion_tokens"] == 120
    assert parse(answer.rest()).json["usage"]["completion_tokens"] == 120
    cut = parse(endless.rest())
    assert cut.done and cut.error is not None and cut.error["code"] == "shutting_down"
    assert parse(waiting.rest()).status == 503
    assert server.wait() == 0


def _is_full(server: Serve) -> None:
    for body in ({"prompt": [5]}, {"prompt": [5], "stream": True}) * 2:  # whichever of the two API servers answers
        refused = server.post("/v1/completions", **body)
        error = error_of(refused, 429)
        assert refused.headers["retry-after"] == "1"
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "9 requests in flight" in error["message"] and "max_waiting_requests" in error["message"]
    assert server.metrics().total("vllm:admission_rejections_total", reason="queue_full") == 4


def _answers(server: Serve) -> bool:
    try:
        response = server.complete([5], max_tokens=1)
    except httpx.TransportError:
        return False
    if response.status_code == 503:
        assert response.json()["error"]["code"] == "draining"
        assert int(response.headers["retry-after"]) >= 1 and response.headers["connection"] == "close"
        return False
    return True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--swap-space", "4"], "--swap-space was removed: a preempted request is recomputed"),
        (["--max-model-length", "4"], "did you mean --max-model-len?"),
        (["--block-size", "24"], "--block-size must be a power of two, got 24"),
        (["--quantization", "awq"], "awq is not offered yet"),
        (["--admin-port", "0"], "--admin-port needs --admin-token-file"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja: there is no such file"),
        (["--batch-invariant", "--tensor-parallel-size", "4"], "cannot hold: the parts of more than two ranks"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], words: str) -> None:
    ended = subprocess.run([KVERN, "serve", str(TINY), *flags], capture_output=True, text=True, timeout=60, check=False)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kvern serve: error: ") and words in line
    assert ended.returncode == (1 if "supported yet" in line or "no such" in line else 2)


def test_a_model_that_is_not_there() -> None:
    for model, words in (("/no/such/folder", "/no/such/folder"), ("builtin://nothing", "'nothing'; there are")):
        ended = subprocess.run([KVERN, "serve", model], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1 and words in ended.stderr and "Traceback" not in ended.stderr
