"""The parts of e2e/cluster that can be tried without a cluster: what packs images, what reads kind's source, how a
program of the control plane begins again, the shell scripts' syntax."""

import hashlib
import importlib.util
import json
import os
import subprocess
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "e2e" / "cluster"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"e2e_cluster_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", sorted(CLUSTER.rglob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in script.read_text()


FAKE_PYTEST = """#!/usr/bin/env bash
# Lists as many failed tests as FAILED says, and ends with ENDS.
echo "$*" >> calls
if [[ "$*" == *--collect-only* ]]; then seq -f "test_it.py::test_%g" "$FAILED"; exit 0; fi
exit "$ENDS"
"""


@pytest.mark.parametrize(
    ("failed", "ends", "status", "says"),
    [
        (2, 0, 0, "passed alone"),
        (2, 1, 1, "2 failed while others ran beside them"),
        (3, 0, 1, "3 tests failed: not run again"),
        (0, 0, 1, "0 tests failed: not run again"),
    ],
)
def test_what_failed_runs_once_more_alone(tmp_path: Path, failed: int, ends: int, status: int, says: str) -> None:
    program = tmp_path / "pytest"
    program.write_text(FAKE_PYTEST)
    program.chmod(0o755)
    environment = {**os.environ, "FAILED": str(failed), "ENDS": str(ends)}
    command = [ROOT / "tools" / "again.sh", "2", program, "--mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == status and says in done.stdout, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1 + (0 < failed <= 2) and all("--mine -n 0 --last-failed" in call for call in calls)


@pytest.mark.parametrize("compress", [False, True])
def test_an_image_is_a_docker_archive(tmp_path: Path, compress: bool) -> None:
    """Layer digests are of the uncompressed layer; the same folder gives the same image."""
    mkimage = load(CLUSTER / "offline" / "mkimage.py")
    folder = tmp_path / "root"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "app").write_text("#!/bin/sh\n")
    (folder / "proc").mkdir()
    (folder / "proc" / "hidden").write_text("x")
    out = tmp_path / "image.tar"
    mkimage.pack(out, "kvern-e2e/app:v1", folder, {"Entrypoint": ["/bin/app"]}, compress)
    with tarfile.open(out) as archive:
        (entry,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = archive.extractfile(entry["Config"]).read()  # type: ignore[union-attr]
        layer = tmp_path / "layer"
        layer.write_bytes(archive.extractfile(entry["Layers"][0]).read())  # type: ignore[union-attr]
    assert entry["RepoTags"] == ["kvern-e2e/app:v1"]
    assert entry["Config"] == hashlib.sha256(config).hexdigest() + ".json"
    image = json.loads(config)
    assert image["config"]["Entrypoint"] == ["/bin/app"] and image["config"]["Env"][0].startswith("PATH=")
    with tarfile.open(layer) as inner:
        members = {m.name: m for m in inner.getmembers()}
    assert "./bin/app" in members and "./proc/hidden" not in members
    assert (members["./bin/app"].uid, members["./bin/app"].gid) == (0, 0)
    assert entry["Layers"][0].startswith(image["rootfs"]["diff_ids"][0].removeprefix("sha256:"))
    if not compress:
        assert hashlib.sha256(layer.read_bytes()).hexdigest() in entry["Layers"][0]
    mkimage.pack(tmp_path / "again.tar", "kvern-e2e/app:v1", folder, {"Entrypoint": ["/bin/app"]}, compress)
    with tarfile.open(out) as one, tarfile.open(tmp_path / "again.tar") as other:
        assert one.getnames() == other.getnames()  # they are digests


def test_the_storage_manifest_is_cut_out_of_kinds_source() -> None:
    storage = load(CLUSTER / "offline" / "storage_manifest.py")
    source = 'const a = "image:v1"\nconst defaultStorageManifest = `\nkind: X\nimage: ` + a + `\n`\nvar rest = `y`\n'
    assert storage.manifest(source) == "kind: X\nimage: image:v1\n"
    with pytest.raises(ValueError, match="kind has moved its storage manifest"):
        storage.manifest("package nodeimage")


def test_the_entrypoint_is_changed_in_one_place() -> None:
    hide = load(CLUSTER / "offline" / "hide_controllers.py")
    changed = hide.hidden(f"fix() {{\n{hide.AFTER}}}\n")
    assert "mount --bind /kind/fake-cgroups /proc/cgroups" in changed and "remove_misc_controller" not in changed
    with pytest.raises(ValueError, match="entrypoint has changed"):
        hide.hidden("fix() { :; }\n")


def test_an_api_server_without_programs_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apiserver = load(CLUSTER / "apiserver.py")
    monkeypatch.setattr(apiserver, "TOOLS", tmp_path)
    with pytest.raises(apiserver.ControlPlaneError, match=r"etcd, kube-apiserver not in .*; run .*binaries.sh control"):
        apiserver.start(tmp_path / "api")
    assert not (tmp_path / "api").exists()


PROGRAM = """#!/bin/sh
echo "$@" >>said
exec sleep 60
"""


@pytest.fixture
def apiserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """apiserver.py with a program that says what it was given, in a folder `plane`."""
    tool = load(CLUSTER / "apiserver.py")
    (tmp_path / "plane").mkdir()
    (tmp_path / "tools").mkdir()
    program = tmp_path / "tools" / "kwok"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(tool, "TOOLS", tmp_path / "tools")
    return tool


def said(folder: Path, count: int) -> list[str]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        file = folder / "said"
        if file.exists() and len(lines := file.read_text().splitlines()) == count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{folder} was not started {count} times")


def end(folder: Path) -> None:
    pid = int((folder / "kwok.pid").read_text())
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_program_begins_again_with_what_it_was_given_however_soon_it_ended(
    apiserver: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "plane"
    apiserver.run_beside(folder, "kwok", "--one=1", "two words")
    said(folder, 1)
    for count in (2, 3):
        end(folder)
        apiserver.begin_again(folder, "kwok")
        assert said(folder, count) == ["--one=1 two words"] * count
    end(folder)
    assert (folder / "kwok.arguments").read_text() == '["--one=1", "two words"]'
