"""`kvern generate | fetch | bench` and what the command line says when it is used wrongly."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvern_engine
from kvern_engine import cli

REPO = Path(__file__).parents[3]
TINY = str(REPO / "tests/engine/models_data/tiny-kjv")
SMALL = ["--device", "cpu", "--max-model-len", "128", "--kv-cache-memory-bytes", "4194304"]


def test_generate_streams_an_answer_to_standard_output(capsys, monkeypatch):
    words = ["-p", "In the beginning God", "--max-tokens", "12", "--temperature", "0", "--raw"]
    assert cli.main(["generate", TINY, *SMALL, *words]) == 0
    answer = capsys.readouterr().out
    assert len(answer.split()) > 3 and answer.endswith("\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("In the beginning God\n"))
    assert cli.main(["generate", TINY, *SMALL, *words[2:]]) == 0
    assert capsys.readouterr().out == answer


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "kvern: which command?"),
        (["swerve"], 2, "kvern: there is no command 'swerve'"),
        (["serve"], 2, "kvern serve: error: which model? Name one"),
        (["serve", "/no/such/model"], 1, "kvern serve: error: model '/no/such/model': no such folder or file"),
        (["serve", TINY, "-pp", "99"], 1, "pipeline_parallel_size=99 is more than the model's 4 layers; use 1 to 4"),
        (["serve", TINY, "--nnodes", "2"], 2, "nnodes=2 needs --master-addr: the name or address of the pod with"),
        (["serve", TINY, "--headless"], 2, "a pod with --node-rank above 0 serves no HTTP by itself"),
        (["generate", TINY, "-tp", "2", "--distributed-executor-backend", "uni"], 2, "is for engines of one device"),
        (["generate", TINY, "-p", "x", "--temperature", "-1"], 2, "temperature must be a number >= 0, got -1.0"),
        (["generate", TINY, "-p", "x", "--max-tokens", "few"], 2, "--max-tokens: 'few' is not a whole number"),
        (["generate", TINY, "-p", "x", "--port", "1"], 2, "unknown flag --port"),
        (["bench", TINY, "--workload", "nope"], 2, "--workload: 'nope' is not one of single, batch_8"),
        (["bench", TINY, "--runs", "0"], 2, "--runs: '0' is not a whole number at least 1"),
        (["fetch", "builtin://smollm2-135"], 1, "did you mean builtin://smollm2-135m?"),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(capsys, argv, status, words):
    assert cli.main(argv) == status
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert error.count("\n") == 1 or argv in ([], ["swerve"])


def test_the_list_of_flags_is_printed_for_the_operator(capsys):
    assert cli.main(["serve", "--dump-flags-json"]) == 0
    assert json.loads(capsys.readouterr().out)["flags"][0]["name"] == "model"
    assert cli.main(["--help"]) == 0
    assert "kvern generate MODEL" in capsys.readouterr().out


def test_bench_writes_json_lines(capsys, tmp_path):
    out = tmp_path / "lines.jsonl"
    argv = ["bench", TINY, *SMALL, "--device", "sim", "--sim-speed", "50", "--kv-cache-memory-bytes", "99999999"]
    argv += ["--workload", "batch_8", "long_prompt", "--runs", "2", "--out", str(out), "--max-model-len", "512"]
    assert cli.main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out.read_text().splitlines() == [json.dumps(line) for line in lines]
    starts, (batch, long) = [x for x in lines if "start_s" in x], [x for x in lines if "w" in x]
    assert [x["serving"] for x in starts] == [False, True]
    assert batch["w"] == "batch_8" and batch["out_tok_s"] == pytest.approx(8 * 128 / batch["s"], rel=0.01)
    assert batch["min"] <= batch["s"] <= batch["max"]
    assert long["n_in"] == 510 and long["itl_p99_ratio"] > 0 and long["ttft_ratio"] > 0


def test_the_gpu_benchmark_resumes_where_it_was_cut_off(tmp_path):
    out = tmp_path / "h200.jsonl"
    command = [sys.executable, str(REPO / "benchmarks/h200.py"), "--device", "sim", "--out", str(out), "--runs", "1"]
    command += ["--engine-args", '{"sim_speed": 100}', "--commit", "abc", "--only", "decode_1", "prefill_8k"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    first = out.read_text().splitlines()
    rows = [json.loads(line) for line in first]
    assert [row.get("w", "start") for row in rows] == ["start", "decode_1", "prefill_8k"]
    assert all(row["engine"] == "kvern-bf16" and row["commit"] == "abc" for row in rows)
    out.write_text("\n".join(first[:2]) + '\n{"engine": "kvern-bf16", "w": "pref')  # cut off in the middle of a line
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert again[-1]["w"] == "prefill_8k"
    assert sum(row.get("w") == "decode_1" for row in again) == 1


def test_the_version_is_the_packages():
    import tomllib

    assert kvern_engine.__version__ == tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
