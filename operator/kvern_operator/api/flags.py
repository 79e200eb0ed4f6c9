"""`engine.args` against the generated list of engine flags, so that the operator needs nothing of the engine.

engine_flags.json is written by the engine's `flags.py`; this file reads it once, when the first argument is checked.
Raises nothing: a problem is a sentence.
"""

import difflib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

# Flag -> the field of the spec that decides it (or who else does). Also a CEL rule of the schema.
RESERVED_ARGS: dict[str, str] = {
    "model": "model.uri",
    "revision": "model.revision",
    "served-model-name": "model.name",
    "max-model-len": "engine.maxModelLen",
    "max-num-seqs": "engine.maxNumSeqs",
    "gpu-memory-utilization": "engine.gpuMemoryUtilization",
    "quantization": "engine.quantization",
    "kv-cache-dtype": "engine.kvCacheDtype",
    "tensor-parallel-size": "parallelism.tensor.size",
    "pipeline-parallel-size": "parallelism.pipeline.size",
    "enable-expert-parallel": "parallelism.expert",
    "drain-timeout-seconds": "rollout.drainTimeoutSeconds",
    "api-key": "router.apiKeysSecretRef",
    "host": "",
    "port": "",
    "uds": "",
    "admin-host": "",
    "admin-port": "",
    "admin-token-file": "",
    "shutdown-grace-seconds": "",
}

_TYPES = {"integer": "a whole number", "number": "a number", "boolean": '"true" or "false"', "list": "text"}


@lru_cache(maxsize=1)
def _listing() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    path = Path(__file__).with_name("engine_flags.json")
    document = json.loads(path.read_text())
    return {flag["name"]: flag for flag in document["flags"]}, document["refused"]


def argument_problem(name: str, value: Any) -> str | None:
    """What is wrong with `name: value` in engine.args, with what would be right; None where it is fine."""
    if name in RESERVED_ARGS:
        owner = RESERVED_ARGS[name]
        return f"set spec.{owner} instead" if owner else "the operator decides this flag; leave it out"
    flags, refused = _listing()
    if name in refused:
        return refused[name]
    if name not in flags:
        return _unknown(name, flags)
    if isinstance(value, bool):
        return f'{str(value).lower()} is a boolean; write it in quotes: "{str(value).lower()}"'
    if isinstance(value, float):
        return f'{value} is a decimal number; write it in quotes: "{value}"'
    if not isinstance(value, str | int):
        return "must be text or a whole number"
    if len(str(value)) > 1024:
        return f"has {len(str(value))} characters; at most 1024 are allowed"
    return _value_problem(flags[name], value)


def _unknown(name: str, flags: dict[str, dict[str, Any]]) -> str:
    plain = name.lstrip("-").replace("_", "-").lower()
    candidates = [flag for flag in flags if flag not in RESERVED_ARGS]
    if plain.startswith("no-") and plain[3:] in candidates:
        return f'unknown engine flag; write {plain[3:]}: "false"'
    near = difflib.get_close_matches(plain, [*candidates, *RESERVED_ARGS], n=1, cutoff=0.6)
    if not near:
        return "unknown engine flag; kvern serve --help lists all"
    if near[0] in RESERVED_ARGS:
        owner = RESERVED_ARGS[near[0]]
        return f"unknown engine flag; {near[0]} is set by spec.{owner}" if owner else "unknown engine flag"
    return f"unknown engine flag; did you mean {near[0]}?"


def _value_problem(flag: dict[str, Any], value: str | int) -> str | None:
    return None if _fits(flag, value) else f"{value} is not allowed; it {_allowed(flag)}"


def _fits(flag: dict[str, Any], value: str | int) -> bool:
    if flag["choices"]:
        return str(value) in flag["choices"]
    if flag["type"] == "boolean":
        return str(value).lower() in ("true", "false")
    if flag["type"] not in ("integer", "number"):
        return True
    try:
        number = int(value) if flag["type"] == "integer" else float(value)
    except ValueError:
        return False
    low, above, high = flag["minimum"], flag["exclusive_minimum"], flag["maximum"]
    return (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)


def _allowed(flag: dict[str, Any]) -> str:
    if flag["choices"]:
        return "must be one of " + ", ".join(flag["choices"])
    bounds = []
    if flag["minimum"] is not None:
        bounds.append(f"at least {flag['minimum']:g}")
    if flag["exclusive_minimum"] is not None:
        bounds.append(f"above {flag['exclusive_minimum']:g}")
    if flag["maximum"] is not None:
        bounds.append(f"at most {flag['maximum']:g}")
    return " ".join(["must be", _TYPES.get(flag["type"], "text"), " and ".join(bounds)]).strip()


def to_command_line(name: str, value: str | int) -> list[str]:
    """A checked entry of engine.args as flags: enforce-eager "false" becomes --no-enforce-eager."""
    flag = _listing()[0].get(name)
    if flag is not None and flag["type"] == "boolean":
        return [f"--{name}" if str(value).lower() == "true" else f"--no-{name}"]
    return [f"--{name}", str(value)]
