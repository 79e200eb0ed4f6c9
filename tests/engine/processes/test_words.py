"""What people and collectors read while an engine starts and serves: progress lines and log lines."""

import io
import logging

from kvern_engine import logs
from kvern_engine.ipc import CoreReady
from kvern_engine.startup_report import StartupReport, count

READY = CoreReady(0, 4096, 16, 8192, {"device": "cpu", "dtype": "float32", "weight_bytes": 538_000_000})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_person_sees_phases_with_their_seconds_and_then_the_url():
    out, clock = io.StringIO(), Clock()
    report = StartupReport(human=True, stream=out, clock=clock)
    report.begin("smollm2-135m", "http://127.0.0.1:8000", engines=1)
    report.progress(0, "resolve", 1.0, several=False)
    clock.now = 0.01
    report.progress(0, "weights", 0.0, several=False)
    report.progress(0, "weights", 0.5, several=False)
    clock.now = 1.5
    report.progress(0, "kv_cache", 0.0, several=False)
    clock.now = 2.0
    report.engine_ready(READY, several=False)
    report.ready("http://127.0.0.1:8000", None, "smollm2-135m", [READY])
    # What stays on the screen: lines that were rewritten in place are gone.
    kept = [line.rpartition("\x1b[K")[2].rstrip() for line in out.getvalue().split("\n")]
    assert kept[0].startswith("Kvern ") and kept[0].endswith(": smollm2-135m")
    assert kept[1].split() == ["loading", "weights", "1.5", "s"]
    assert kept[2].split() == ["laying", "out", "the", "KV", "cache", "0.5", "s"]
    cache = "65,536 tokens (4,096 blocks of 16); 8.0 requests of 8,192 tokens at once"
    assert kept[3] == f"  cpu float32, weights 538MB, KV cache {cache}"
    assert kept[4] == "Ready in 2.0 s: http://127.0.0.1:8000/v1  (model smollm2-135m; Ctrl-C stops)"
    assert "loading weights  50 %" in out.getvalue()


def test_numbers_are_short():
    assert [count(n) for n in (999, 1500, 134_515_008, 16_060_000_000)] == ["999", "1.5k", "135M", "16.1G"]


def _formatted(formatter: logging.Formatter, message: str, **values: object) -> str:
    record = logging.LogRecord("kvern_engine.x", logging.WARNING, "x.py", 1, message, (), None)
    record.__dict__.update(logs.fields(**values))
    return formatter.format(record)


def test_log_lines_are_pairs_for_a_collector_and_words_for_a_person():
    line = _formatted(logs.KeyValueFormatter("core-0"), "engine died", reason='say "why"', seconds=1.23456, n=3)
    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("time=20") and stamp.endswith("Z")
    assert rest == r'level=warning process=core-0 msg="engine died" reason="say \"why\"" seconds=1.235 n=3'
    line = _formatted(logs.HumanFormatter(), "engine died", reason="x y", n=3)
    assert line == 'warning: engine died (reason "x y", n 3)'
