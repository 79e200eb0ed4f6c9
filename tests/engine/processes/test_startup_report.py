"""What a person reads when the server is ready: the name that clients use, and a line that works as it stands."""

import io
import json
import shlex

import pytest

from kvern_engine.ipc import CoreReady
from kvern_engine.startup_report import StartupReport, curl_line

NAME = 'it\'s a "model" of 日本'


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "unix:/tmp/a folder/s.sock"])
@pytest.mark.parametrize("keyed", [False, True])
def test_the_curl_line_is_one_that_a_shell_takes(url: str, keyed: bool) -> None:
    words = shlex.split(curl_line(url, NAME, keyed))
    assert words[:2] == ["curl", "-s"]
    target = "http://localhost" if url.startswith("unix:") else url
    assert f"{target}/v1/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == NAME
    assert ("Authorization: Bearer $API_KEY" in words) == keyed
    if url.startswith("unix:"):
        assert words[words.index("--unix-socket") + 1] == "/tmp/a folder/s.sock"


@pytest.mark.parametrize(("url", "shown"), [("http://h:1", "http://h:1/v1 "), ("unix:/s", "unix:/s ")])
def test_the_ready_line_names_the_model_as_clients_do(url: str, shown: str) -> None:
    stream = io.StringIO()
    report = StartupReport(human=True, stream=stream, clock=lambda: 1.0)
    report.begin("smollm2-135m", url, 1)
    report.ready(url, None, "smollm2-135m", [CoreReady(0, 4, 16, 64, {"device": "cpu", "dtype": "float32"})])
    *_, ready, hint = stream.getvalue().splitlines()
    assert ready == f"Ready in 0.0 s: {shown} (model smollm2-135m; Ctrl-C stops)"
    assert hint.strip() == curl_line(url, "smollm2-135m", False)
