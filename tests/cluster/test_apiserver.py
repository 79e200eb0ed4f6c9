"""e2e/cluster/apiserver.py, without the programs that it starts."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "e2e" / "cluster" / "apiserver.py"
PROGRAM = """#!/bin/sh
echo "$@" >>said
exec sleep 60
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("kvern_apiserver_tested", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tools").mkdir()
    program = tmp_path / "tools" / "kwok"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(module, "TOOLS", tmp_path / "tools")
    return module


def said(folder, count):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        file = folder / "said"
        if file.exists() and len(lines := file.read_text().splitlines()) == count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{folder} was not started {count} times")


def end(folder):
    pid = int((folder / "kwok.pid").read_text())
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_program_begins_again_with_what_it_was_given_however_soon_it_ended(tool, tmp_path):
    folder = tmp_path / "plane"
    folder.mkdir()
    tool.run_beside(folder, "kwok", "--one=1", "two words")
    said(folder, 1)
    for count in (2, 3):
        end(folder)
        tool.begin_again(folder, "kwok")
        assert said(folder, count) == ["--one=1 two words"] * count
    end(folder)
    arguments = (folder / "kwok.arguments").read_text()
    assert arguments == '["--one=1", "two words"]'
