"""What is logged, in which form, and what never is: prompts, answers, queries and keys."""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import httpx
import pytest
from server_harness import TOKEN, Setup, saying, wait_until

from kvern_engine import logs
from kvern_engine.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
ACCESS = "kvern_engine.server.access"


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvern_engine.x", logging.WARNING, "", 0, "two\nlines", (), None)
    made.fields = fields
    return made


def test_an_event_is_one_json_object_a_line() -> None:
    made = record(seconds=0.123456789, text='a "b"\n', number=5, items=[1])
    try:
        raise ValueError("a\nb")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = logs.JsonFormatter("server-0").format(made)
    assert "\n" not in line
    seen = json.loads(line)
    assert seen["level"] == "warning" and seen["process"] == "server-0" and seen["msg"] == "two\nlines"
    assert (seen["seconds"], seen["text"], seen["number"], seen["items"]) == (0.123457, 'a "b"\n', 5, [1])
    assert "ValueError: a\nb" in seen["exception"] and seen["time"].endswith("Z")
    text = logs.KeyValueFormatter("server-0").format(made)
    assert "\n" not in text and 'msg="two\\nlines"' in text and "seconds=0.123" in text


@pytest.mark.parametrize(
    ("form", "human", "kind"),
    [
        ("json", True, logs.JsonFormatter),
        ("json", False, logs.JsonFormatter),
        ("text", False, logs.KeyValueFormatter),
        ("text", True, logs.HumanFormatter),
    ],
)
def test_the_form_that_was_asked_for(form: str, human: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: given.extend(options["handlers"]))
    before = logging.getLogger("kvern_engine").level
    logs.setup("info", "server-0", human, form)
    logging.getLogger("kvern_engine").setLevel(before)
    assert type(given[0].formatter) is kind


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, logs.BackgroundHandler]]:
    """The end of a pipe that can be read, and a handler that writes to the other."""
    ours, theirs = os.pipe()
    reader, writer = os.fdopen(ours, encoding="utf-8"), os.fdopen(theirs, "w", encoding="utf-8")
    handler = logs.BackgroundHandler(writer)
    handler.setFormatter(logs.KeyValueFormatter("server-0"))
    yield reader, handler
    writer.close()
    reader.close()


def test_lines_are_written_in_order_by_a_thread(pipe: tuple[TextIO, logs.BackgroundHandler]) -> None:
    reader, handler = pipe
    for i in range(500):
        handler.handle(record(number=i))
    handler.flush()
    assert [reader.readline().rpartition("number=")[2] for _ in range(500)] == [f"{i}\n" for i in range(500)]


def test_who_reads_no_log_holds_nobody_up(
    pipe: tuple[TextIO, logs.BackgroundHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that is full would stop the event loop with its next line."""
    reader, handler = pipe
    monkeypatch.setattr(handler, "MOST", 100)
    sent = 0
    while handler._dropped < 5:  # the pipe is full, and so is what waits for it
        handler.handle(record(text="x" * 10_000))
        sent += 1
        time.sleep(0.001)
    came = 0
    while "lines are missing here" not in (line := reader.readline()):
        came += 1
    dropped = int(re.search(r'msg="(\d+) lines', line)[1])  # type: ignore[index]
    assert dropped >= 5 and came + dropped + len(handler._lines) >= sent > came
    while handler._lines:  # there is room again
        reader.readline()
    handler.handle(record(text="the end"))
    while "the end" not in reader.readline():
        pass


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def requests(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(r.levelname, r.fields) for r in caplog.records if r.name == ACCESS]


def test_a_line_for_each_request_and_no_word_of_it(
    setup: Setup, tokenizer: Tokenizer, seen: pytest.LogCaptureFixture
) -> None:
    core = setup.core()
    core.reply = saying(tokenizer, "In the beginning God created the heaven")
    server = setup.server(api_key=["sk-key-of-the-house", "sk-another"])
    server.wait_for(200)
    good = {"Authorization": "Bearer sk-key-of-the-house"}
    body = {"messages": [{"role": "user", "content": "a very private question"}], "user": "private-person"}
    url = server.url + CHAT
    for headers, more in (
        ({**good, "X-Request-Id": "mine-1"}, {}),
        ({**good, "X-Request-Id": "not valid"}, {"stream": True}),
        ({"Authorization": "Bearer sk-guessed-wrongly", "X-Request-Id": "mine-2"}, {}),
        ({**good, "X-Request-Id": "mine-3"}, {"temperature": "private-heat"}),
        ({**good, "X-Request-Id": "mine-4"}, {"chat_template_kwargs": {"private_name": 1}}),
    ):
        httpx.post(url + "?token=private-query", json={**body, **more}, headers=headers, timeout=30)
    httpx.get(server.url + "/private-path", headers=good)
    httpx.get(server.url + "/health")
    httpx.get(server.admin_url + "/admin/drain", headers={"Authorization": f"Bearer {TOKEN}"})
    wait_until(lambda: len(requests(seen)) == 7)
    server.close()

    first, second, third, fourth, fifth, sixth, poll = requests(seen)
    assert first[0] == "INFO" and first[1]["request_id"] == "mine-1" and first[1]["status"] == 200
    assert first[1]["prompt_tokens"] > 5 and first[1]["completion_tokens"] > 5 and first[1]["finish"] == "done"
    assert first[1]["seconds"] > 0 and first[1]["path"] == CHAT and first[1]["method"] == "POST"
    assert len(str(second[1]["request_id"])) == 32 and 0 < second[1]["first_token_seconds"] <= second[1]["seconds"]
    assert (third[1]["status"], third[1]["error"], third[1]["request_id"]) == (401, "invalid_api_key", "mine-2")
    assert (fourth[1]["status"], fifth[1]["status"]) == (400, 400)
    assert (sixth[1]["path"], sixth[1]["status"]) == ("none", 404)
    assert poll[0] == "DEBUG" and poll[1]["path"] == "/admin/drain", "the operator asks every few seconds"

    forms = (logs.JsonFormatter("server-0"), logs.KeyValueFormatter("server-0"), logs.HumanFormatter())
    text = "".join(form.format(r) for r in seen.records if r.name.startswith("kvern") for form in forms)
    assert "mine-3" in text
    for word in ("private", "In the beginning", "sk-", TOKEN, "guessed"):
        assert word not in text, word


def test_no_lines_where_none_are_wanted(setup: Setup, seen: pytest.LogCaptureFixture) -> None:
    setup.core()
    server = setup.server(access_log=False)
    server.wait_for(200)
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=30).status_code == 200
    server.close()
    assert not requests(seen)


def test_what_is_no_request_is_logged_under_an_id_of_its_own(live: Setup, seen: pytest.LogCaptureFixture) -> None:
    import socket

    host, port = live.servers[0].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(b"GET /secret HTTP/1.1\r\nHost: a\r\nHost: b\r\nX-Request-Id: given\r\n\r\n")
        answer = raw.recv(65536)
    assert b"\r\nx-request-id: given\r\n" in answer
    wait_until(lambda: requests(seen))
    ((level, line),) = requests(seen)
    assert (level, line["path"], line["status"], line["error"], line["request_id"]) == (
        "INFO",
        "none",
        400,
        "invalid_http",
        "given",
    )


def test_a_failure_of_the_server_names_the_request(live: Setup, seen: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    state = live.servers[0].state
    before = state.client.submit
    state.client.submit = broken  # type: ignore[method-assign, assignment]
    try:
        url = live.servers[0].url + "/v1/completions"
        answer = httpx.post(url, json={"prompt": "x"}, headers={"X-Request-Id": "mine"}, timeout=30)
    finally:
        state.client.submit = before  # type: ignore[method-assign]
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    text = "The server failed to handle the request; its log says more under mine."
    assert answer.json()["error"]["message"] == text
    (failure,) = [r for r in seen.records if r.getMessage() == "request failed"]
    assert failure.fields == {"request_id": "mine"} and failure.exc_info
