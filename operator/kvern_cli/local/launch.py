"""A container of a pod template -> the command line and environment of a local process. Pure.

Addresses become loopback, container ports the free ports that were chosen, mount paths the local folders they stand
for. A path into an emptyDir has no local folder: /tmp and /dev/shm are the machine's own, and a variable that points
into one is left out.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_operator.observed import Object

LOOPBACK = "127.0.0.1"
_HOST_FLAGS = ("--host", "--admin-host", "--report-host")
_ADDRESS_FLAGS = ("--listen", "--metrics-listen")
_PORT_FLAGS = ("--port", "--admin-port", "--report-port")


@dataclass(frozen=True)
class Launch:
    """What to start. `environment` is laid over the parent's; `unset` is taken out of it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    unset: tuple[str, ...] = ()


def container_of(template: Object) -> Object:
    """The one container that is run: the first."""
    container: Object = template["spec"]["containers"][0]
    return container


def container_ports(container: Object) -> dict[str, int]:
    """Name -> number, as the template has them."""
    return {port["name"]: port["containerPort"] for port in container.get("ports", ())}


def mounts_of(template: Object, volumes: Mapping[str, Path]) -> dict[str, Path | None]:
    """Mount path -> local folder; None for an emptyDir. `volumes` maps volume names to folders."""
    return {m["mountPath"]: volumes.get(m["name"]) for m in container_of(template).get("volumeMounts", ())}


def find_program(name: str, commands: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """How a container's program is started here. Raises FileNotFoundError, whose text says what to do.

    `commands` comes first (tests), then the environment that this Python runs in, then PATH.
    """
    if name in commands:
        return commands[name]
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return (str(beside),)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name}: not found beside {sys.executable} nor on PATH; pip install 'kvern[engine]'")
    return (found,)


def launch(
    template: Object,
    ports: Mapping[str, int],
    volumes: Mapping[str, Path],
    config_maps: Mapping[str, Mapping[str, str]],
    commands: Mapping[str, tuple[str, ...]],
    gpus: tuple[int, ...] | None = None,
) -> Launch:
    """The process for a template's container. `ports`: name -> chosen port. `gpus`: indexes to show; None: all."""
    container = container_of(template)
    mounts = mounts_of(template, volumes)
    numbers = {number: ports[name] for name, number in container_ports(container).items()}
    command = [*container.get("command", ()), *container.get("args", ())]
    argv = (*find_program(command[0], commands), *_local_arguments(command[1:], numbers, mounts))
    environment: dict[str, str] = {}
    unset: list[str] = []
    for source in container.get("envFrom", ()):
        name = source.get("configMapRef", {}).get("name")
        environment.update(config_maps.get(name, {}))
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            continue  # what only a cluster knows of a pod
        value = _local_path(str(variable.get("value", "")), mounts)
        if value is None:
            unset.append(variable["name"])
        else:
            environment[variable["name"]] = value
    # HOME belongs to the person who runs this, and so does the hub's cache in it, unless a folder stands for a claim.
    environment.pop("HOME", None)
    if "KVERN_CACHE_DIR" in unset:
        environment.pop("KVERN_CACHE_LIMIT", None)  # of a claim, and the folder is the person's own
    environment["PYTHONUNBUFFERED"] = "1"
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return Launch(argv, environment, tuple(name for name in unset if name not in ("HOME", "HF_HOME")))


def _local_arguments(args: list[str], numbers: Mapping[int, int], mounts: Mapping[str, Path | None]) -> list[str]:
    out: list[str] = []
    for position, arg in enumerate(args):
        flag = args[position - 1] if position else ""
        if flag in _HOST_FLAGS:
            out.append(LOOPBACK)
        elif flag in _PORT_FLAGS:
            out.append(str(numbers.get(int(arg), int(arg))))
        elif flag == "--summary-file":
            out.append(os.devnull)  # a kubelet's file
        elif flag in _ADDRESS_FLAGS:
            number = int(arg.rpartition(":")[2])
            out.append(f"{LOOPBACK}:{numbers.get(number, number)}")
        else:
            out.append(_local_path(arg, mounts) or arg)
    return out


def _local_path(value: str, mounts: Mapping[str, Path | None]) -> str | None:
    for mount, folder in mounts.items():
        if value == mount or value.startswith(mount + "/"):
            return str(folder) + value[len(mount) :] if folder is not None else None
    return value


def environment_for(plan: Launch, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of the process."""
    base: dict[str, Any] = dict(os.environ if inherited is None else inherited)
    # Variables of the engine set in this shell would override the manifest's silently.
    kept = {k: v for k, v in base.items() if not k.startswith("KVERN_") or k in ("KVERN_CACHE_DIR", "KVERN_KERNELS")}
    for name in plan.unset:
        if name != "KVERN_CACHE_DIR":
            kept.pop(name, None)
    return {**kept, **plan.environment}
