"""The environment -> Config: everything that the running operator is told from outside. Reads one file, the key.

Every mistake is named at once, with the variable, its value and what would be right, before anything is started.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvern_operator.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
SHORTEST_KEY = 32  # bytes


class ConfigError(ValueError):
    """The environment is wrong; str() is one line a mistake."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True)
class Config:
    """Times in seconds. `watch_namespaces` empty: all of the cluster."""

    namespace: str
    settings: Settings = field(default_factory=Settings, repr=False)  # holds the operator's key
    identity: str = ""
    watch_namespaces: tuple[str, ...] = ()
    lease_name: str = "kvern-operator"
    resync: float = 450.0
    pod_monitors: bool = True  # make PodMonitors where the cluster knows them
    health_port: int = 8080
    log_format: str = "text"
    log_level: str = "info"


def read_config(environment: Mapping[str, str] | None = None) -> Config:
    """The operator's configuration. Raises ConfigError with every mistake."""
    env = os.environ if environment is None else environment
    problems: list[str] = []
    namespace = env.get("KVERN_NAMESPACE", "").strip()
    if not namespace:
        problems.append("KVERN_NAMESPACE is not set; give the operator its own namespace (downward API)")
    defaults = Settings()
    policy = _choice(env, "KVERN_IMAGE_PULL_POLICY", "", ("", *PULL_POLICIES), problems)
    settings = Settings(
        engine_image=env.get("KVERN_ENGINE_IMAGE", "").strip() or defaults.engine_image,
        operator_image=env.get("KVERN_OPERATOR_IMAGE", "").strip() or defaults.operator_image,
        cluster_domain=env.get("KVERN_CLUSTER_DOMAIN", "").strip() or defaults.cluster_domain,
        operator_key=_key(env.get("KVERN_OPERATOR_KEY_FILE", ""), problems),
        image_pull_policy=policy,
        image_pull_secrets=_names(env.get("KVERN_IMAGE_PULL_SECRETS", "")),
        namespace=namespace,
    )
    config = Config(
        namespace=namespace,
        settings=settings,
        identity=env.get("KVERN_POD_NAME", "").strip() or socket.gethostname(),
        watch_namespaces=_names(env.get("KVERN_WATCH_NAMESPACES", "")),
        lease_name=env.get("KVERN_LEASE_NAME", "").strip() or "kvern-operator",
        resync=_number(env, "KVERN_RESYNC_SECONDS", 450, 10, 86_400, problems),
        pod_monitors=_choice(env, "KVERN_POD_MONITORS", "true", ("true", "false"), problems) == "true",
        health_port=int(_number(env, "KVERN_HEALTH_PORT", 8080, 1, 65_535, problems)),
        log_format=_choice(env, "KVERN_LOG_FORMAT", "text", ("text", "json"), problems),
        log_level=_choice(env, "KVERN_LOG_LEVEL", "info", LEVELS, problems),
    )
    if problems:
        raise ConfigError(problems)
    return config


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _choice(env: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...], problems: list[str]) -> str:
    value = env.get(name, "").strip() or default
    if value not in allowed:
        problems.append(f'{name}="{value}" must be one of {", ".join(a for a in allowed if a)}')
    return value


def _number(env: Mapping[str, str], name: str, default: int, least: int, most: int, problems: list[str]) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit() or not least <= int(text) <= most:
        problems.append(f'{name}="{text}" must be a whole number from {least} to {most}')
        return default
    return int(text)


def _key(path: str, problems: list[str]) -> bytes:
    """The operator's key. Every service's admin token is derived from it: it must be there and stay the same."""
    if not path:
        problems.append(
            "KVERN_OPERATOR_KEY_FILE is not set; name the file of the Secret kvern-operator-key (the chart mounts it)"
        )
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        problems.append(f'KVERN_OPERATOR_KEY_FILE="{path}" cannot be read: {error.strerror}; mount kvern-operator-key')
        return b""
    if len(key) < SHORTEST_KEY:
        problems.append(
            f'KVERN_OPERATOR_KEY_FILE="{path}" holds {len(key)} bytes; a key has at least {SHORTEST_KEY} random ones'
        )
    return key
