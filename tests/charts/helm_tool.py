"""Finds helm binaries and runs them for tests. Nothing here needs a cluster."""

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHARTS, CONFIG = ROOT / "charts", ROOT / "config"
TOOLS = Path.home() / ".cache" / "kvern-e2e" / "tools"  # where `make cluster` keeps what it builds
WHERE = (
    "neither on PATH (helm, helm3, helm4) nor where `make cluster` keeps its tools; KVERN_HELM=/path/to/helm names one"
)

Object = dict[str, Any]


def load(name: str, path: Path) -> ModuleType:
    """A program that is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate: Any = load("charts_generate", CHARTS / "generate.py")


@dataclass(frozen=True)
class Helm:
    path: str
    version: str  # v4.3.1

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it, away from the user's configuration and without a cluster."""
        with tempfile.TemporaryDirectory() as home:
            folders = {f"HELM_{name}_HOME": home for name in ("CONFIG", "CACHE", "DATA")}
            env = {**os.environ, **folders, "KUBECONFIG": f"{home}/none", **options.pop("env", {})}
            if arguments[0] == "template":
                arguments = (*arguments, "--kube-version", generate.KUBERNETES)
            return subprocess.run(
                [self.path, *arguments], env=env, capture_output=True, text=True, timeout=60, **options
            )

    def template(
        self, values: Object | None = None, *, chart: str = "kvern", release: str = "kvern", api: tuple[str, ...] = ()
    ) -> list[Object]:
        """The objects of a chart; AssertionError with helm's words where it refuses."""
        done = self.try_template(values, chart=chart, release=release, api=api)
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)

    def try_template(
        self, values: Object | None = None, *, chart: str = "kvern", release: str = "kvern", api: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """What helm template says, right or wrong."""
        return _template(self, json.dumps(values or {}), chart, release, api)

    def notes(self, values: Object | None = None, *, chart: str = "kvern") -> str:
        """What a person reads after an install. `helm install --dry-run` would need a cluster, so a copy of the chart
        carries its notes in an object."""
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copytree(CHARTS / chart, Path(folder) / chart)
            (copy / "templates" / "NOTES.txt").rename(copy / "notes.tpl")
            (copy / "templates" / "notes.yaml").write_text(
                'kind: Notes\ntext: {{ tpl (.Files.Get "notes.tpl") . | toJson }}\n'
            )
            arguments = ["template", "kvern", str(copy), "--namespace", "kvern-system", "--values", "-"]
            done = self.run(*arguments, "--show-only", "templates/notes.yaml", input=json.dumps(values or {}))
        assert done.returncode == 0, done.stderr
        text: str = one(documents(done.stdout), "Notes")["text"]
        return text


@cache
def _template(
    helm: Helm, values: str, chart: str, release: str, api: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Once for all tests that want the same: most look at the default rendering."""
    arguments = ["template", release, str(CHARTS / chart), "--namespace", "kvern-system", "--values", "-"]
    for version in api:
        arguments += ["--api-versions", version]
    return helm.run(*arguments, input=values)


def documents(text: str) -> list[Object]:
    """The objects in YAML text."""
    return [
        document for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if document
    ]


@cache
def find_helms() -> list[Helm]:
    """One helm a version."""
    candidates = os.environ.get("KVERN_HELM", "").split(os.pathsep)
    candidates += [shutil.which(name) or "" for name in ("helm", "helm3", "helm4")]
    candidates += sorted(str(path) for path in TOOLS.glob("helm*"))
    found: dict[str, Helm] = {}
    for path in filter(None, candidates):
        asked = [path, "version", "--template", "{{.Version}}"]
        try:
            version = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            continue
        found.setdefault(version, Helm(path, version))
    return list(found.values())


def one(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only object of a kind, or of a kind and name."""
    found = [o for o in objects if o["kind"] == kind and (not name or o["metadata"]["name"] == name)]
    assert len(found) == 1, f"{len(found)} {kind} {name}"
    return found[0]


def kinds(objects: list[Object]) -> set[str]:
    return {o["kind"] for o in objects}


def container(objects: list[Object]) -> Object:
    """The operator's container."""
    (found,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def environment(objects: list[Object]) -> dict[str, str]:
    """Its variables that have a plain value."""
    return {e["name"]: e["value"] for e in container(objects)["env"] if "value" in e}


def kubectl() -> str | None:
    """A kubectl, if there is one."""
    ours = TOOLS / "kubectl"
    return shutil.which("kubectl") or (str(ours) if ours.exists() else None)
