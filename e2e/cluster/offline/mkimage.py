#!/usr/bin/env python3
"""Packs a folder as an image of one layer, in the format of `docker save`: no engine needed.

mkimage.py OUT.tar NAME:TAG FOLDER [--gzip] [CONFIG_JSON]: CONFIG_JSON is the image's "config" object (Env, Entrypoint
and so on). Everything belongs to root. --gzip compresses the layer.
"""

import argparse
import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

DEFAULT_ENV = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
CREATED = "2026-01-01T00:00:00Z"  # the same folder gives the same image


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(out: Path, name: str, folder: Path, config: dict, compress: bool) -> None:
    """Write the image archive; raises CalledProcessError where tar or gzip fail."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".image-") as temporary:
        layer = Path(temporary) / "layer.tar"
        tar = ["tar", "-C", str(folder), "--numeric-owner", "--owner=0", "--group=0", "--sort=name"]
        tar += ["--exclude=./dev/*", "--exclude=./proc/*", "--exclude=./sys/*", "-cf", str(layer), "."]
        subprocess.run(tar, check=True)
        digest = sha256(layer)
        if compress:
            subprocess.run(["gzip", "-1", "-n", str(layer)], check=True)
            layer = layer.with_name("layer.tar.gz")
        image = {
            "architecture": "amd64",
            "os": "linux",
            "created": CREATED,
            "config": {"Env": DEFAULT_ENV, **config},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        text = json.dumps(image).encode()
        config_name, layer_name = f"{hashlib.sha256(text).hexdigest()}.json", f"{digest}/layer.tar"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]
        part = Path(temporary) / "image.tar"
        with tarfile.open(part, "w") as archive:
            _add(archive, config_name, text)
            archive.add(layer, arcname=layer_name)
            _add(archive, "manifest.json", json.dumps(manifest).encode())
        part.rename(out)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a folder as an image of one layer.")
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", nargs="?", default="{}", type=json.loads)
    parser.add_argument("--gzip", action="store_true")
    given = parser.parse_args()
    pack(given.out, given.name, given.folder, given.config, given.gzip)


if __name__ == "__main__":
    main()
