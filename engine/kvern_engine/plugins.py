"""Architectures that installed plugin packages bring. A package adds one by an entry point of the group `kvern.models`:

    [project.entry-points."kvern.models"]
    MyForCausalLM = "my_package.model:MyForCausalLM"

Its name is what stands under `architectures` in a config.json, its value a class as `models/registry.CausalLM` says.
Finding them reads metadata only: a package is imported when a model of its architecture is loaded, so that the API
server, which needs the names, never loads torch by it.
"""

from importlib.metadata import EntryPoint, entry_points

GROUP = "kvern.models"


def plugin_architectures() -> dict[str, EntryPoint]:
    """Architecture -> entry point, of all installed packages. Raises ValueError where two bring the same one."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ValueError(
                f"two installed packages bring the architecture {entry.name!r} (entry points {GROUP}): "
                f"{_origin(other)} and {_origin(entry)}; uninstall one of them"
            )
    return found


def _origin(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return f"{entry.value} of {package}"
