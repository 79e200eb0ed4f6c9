"""Probes of the engine pods. The startup probe is sized by the model's bytes: no probe kills a loading model. Pure.

An engine that cannot start ends by itself and says why; the startup probe is only there for one that hangs. So it errs
on the patient side.
"""

import re

from kvern_operator.observed import Object

GB = 10**9
BUILTIN_BYTES = {"builtin://smollm2-135m": 98_362_432, "builtin://tiny-kjv": 2_100_000}
UNKNOWN_BYTES = 140 * GB  # a model that its name says nothing of: 70 billion weights of two bytes
# Bytes a second that each kind of source gives at its slowest: a busy network disk, a download over a shared line.
SLOWEST = {"builtin": 50_000_000, "pvc": 50_000_000, "hf": 20_000_000, "s3": 20_000_000, "oci": 20_000_000}
BASE_SECONDS = 300  # processes, imports, profile run, graphs, on a node that starts much else at the same time
LONGEST_SECONDS = 6 * 3600
STARTUP_PERIOD = 1


def model_bytes(uri: str) -> int:
    """An estimate of a model's size: known for builtin models, else read from its name ("70B" at 2 bytes a weight)."""
    if uri in BUILTIN_BYTES:
        return BUILTIN_BYTES[uri]
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)(?:x(\d+(?:\.\d+)?))?([bm])(?![a-z0-9])", uri.lower())
    if not sizes:
        return UNKNOWN_BYTES
    first, second, unit = sizes[-1]
    return int(float(first) * float(second or 1) * (GB if unit == "b" else 10**6) * 2)


def startup_seconds(uri: str) -> int:
    """How long a pod may load before it is restarted."""
    slowest = SLOWEST[uri.partition("://")[0]]
    return min(BASE_SECONDS + model_bytes(uri) // slowest, LONGEST_SECONDS)


def engine_probes(uri: str) -> Object:
    """startupProbe, readinessProbe and livenessProbe of the engine container."""

    def get(path: str, period: int, failures: int, timeout: int) -> Object:
        return {
            "httpGet": {"path": path, "port": "http"},
            "periodSeconds": period,
            "failureThreshold": failures,
            "timeoutSeconds": timeout,
        }

    return {
        "startupProbe": get("/ready", STARTUP_PERIOD, -(-startup_seconds(uri) // STARTUP_PERIOD), 2),
        "readinessProbe": get("/ready", 2, 3, 2),
        "livenessProbe": get("/health", 10, 3, 5),
    }
