"""The pinned packages can be installed wherever `requires-python` of pyproject.toml says that Kvern runs."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def pinned() -> dict[str, str]:
    """Name -> version of every line of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    wanted = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in wanted}


def oldest_python() -> str:
    """The first release that `requires-python` allows: Debian 12 has 3.11.2, other systems may have an older one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (lowest,) = (one.version for one in SpecifierSet(project["requires-python"]) if one.operator == ">=")
    return f"{lowest}.0"


def test_every_pinned_package_runs_on_the_oldest_python() -> None:
    oldest, pins, seen, too_new = oldest_python(), pinned(), 0, []
    for installed in metadata.distributions():
        name = canonicalize_name(installed.metadata["Name"])
        if name not in pins or Version(installed.version).public != Version(pins[name]).public:
            continue
        seen += 1
        needs = installed.metadata["Requires-Python"]
        if needs and not SpecifierSet(needs).contains(oldest):
            too_new.append(f"{name} {installed.version} needs Python {needs}")
    assert seen > 50, f"{seen} of {len(pins)} pinned packages are installed in this environment"
    assert not too_new, f"cannot be installed on Python {oldest}: {too_new}"
