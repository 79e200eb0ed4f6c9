"""What a simulated device is like: the coefficients of its step time, its memory, its vocabulary. Pure; read from JSON.

The shipped profiles lie in `sim_profiles/`; each says in `fit` where its numbers come from.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from kvern_engine.core.plan import StepPlan

_SHIPPED = Path(__file__).parent / "sim_profiles"


@dataclass(frozen=True)
class SimProfile:
    """A device with a model on it. Times in seconds: a step takes `step_seconds` + `token_seconds` a token computed +
    `context_seconds` a token of context of its rows. `eos_probability` is the chance of each sampled token to be the
    model's end-of-sequence token.
    """

    name: str
    device: str
    model: str
    step_seconds: float
    token_seconds: float
    context_seconds: float
    memory_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    vocab_size: int
    eos_probability: float = 0.0
    fit: str = ""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "token_seconds", "context_seconds", "weight_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"sim profile {self.name}: {name} must not be negative, got {getattr(self, name)}")
        for name in ("memory_bytes", "kv_bytes_per_token", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"sim profile {self.name}: {name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.eos_probability <= 1:
            raise ValueError(
                f"sim profile {self.name}: eos_probability must be between 0 and 1, got {self.eos_probability}"
            )

    def seconds(self, plan: StepPlan) -> float:
        """How long the device takes for `plan`; nothing for a plan without rows."""
        if not plan.rows:
            return 0.0
        tokens = sum(plan.counts)
        return self.step_seconds + self.token_seconds * tokens + self.context_seconds * (sum(plan.starts) + tokens)


def load_profile(name: str) -> SimProfile:
    """The shipped profile `name`, or the JSON file at that path. Raises ValueError naming the file, and the field or
    the profiles there are."""
    path = Path(name) if name.endswith(".json") else _SHIPPED / f"{name}.json"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.json")))
        raise ValueError(f"sim_profile {name!r}: no file {path}; shipped profiles: {shipped}")
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        unknown = sorted(content.keys() - {field.name for field in fields(SimProfile)})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        return msgspec.convert(content, SimProfile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"sim profile {path}: {error}") from error
