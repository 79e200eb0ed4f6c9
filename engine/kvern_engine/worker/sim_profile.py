"""What a simulated device is like: the coefficients of its step time, its memory, its vocabulary. Pure; read from JSON.

The shipped profiles lie in `sim_profiles/`; each says in `fit` where its numbers come from.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from kvern_engine.core.plan import StepPlan
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout, check_layout, even_slice, stage_layers

_SHIPPED = Path(__file__).parent / "sim_profiles"
_ONE_DEVICE = Layout()
_AT_LEAST_ONE = ("memory_bytes", "kv_bytes_per_token", "max_model_len", "vocab_size", "layers", "heads", "kv_heads")


@dataclass(frozen=True)
class SimProfile:
    """A device with a model on it. Times in seconds: a step takes `step_seconds` + `token_seconds` a token computed +
    `context_seconds` a token of context of its rows. `eos_probability` is the chance of each sampled token to be the
    model's end-of-sequence token.

    Several devices: N tensor parallel ranks each take an Nth of that, except `replicated_seconds` of `step_seconds`
    (launches, norms, sampling), and reduce twice a layer: `all_reduce_seconds` + `all_reduce_token_seconds` a token
    with two ranks; a ring of N sends 2 (N - 1) / N times the bytes. A pipeline stage takes the time of its layers, and
    `hand_over_seconds` + `hand_over_token_seconds` a token pass until the next one has its input. A change of the
    layout takes `group_seconds` for new groups and `build_seconds` for what is not a transfer (a second model, its
    arena, the first graphs), and moves weights and KV at `peer_bytes_per_second`; what a rank has itself it copies at
    `copy_bytes_per_second`. `kv_seconds` is what moving KV takes before the first byte.
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
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    replicated_seconds: float = 0.0
    all_reduce_seconds: float = 0.0
    all_reduce_token_seconds: float = 0.0
    hand_over_seconds: float = 0.0
    hand_over_token_seconds: float = 0.0
    group_seconds: float = 0.0
    build_seconds: float = 0.0
    kv_seconds: float = 0.0
    peer_bytes_per_second: float = 1e11
    copy_bytes_per_second: float = 1e12
    eos_probability: float = 0.0
    fit: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name
            if (name.endswith("_seconds") or name == "weight_bytes") and getattr(self, name) < 0:
                raise ValueError(f"sim profile {self.name}: {name} must not be negative, got {getattr(self, name)}")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"sim profile {self.name}: {name} must be above 0, got {getattr(self, name)}")
        for name in ("peer_bytes_per_second", "copy_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sim profile {self.name}: {name} must be above 0, got {getattr(self, name)}")
        if self.replicated_seconds > self.step_seconds:
            raise ValueError(
                f"sim profile {self.name}: replicated_seconds must be at most step_seconds ({self.step_seconds}), "
                f"got {self.replicated_seconds}"
            )
        if not 0 <= self.eos_probability <= 1:
            raise ValueError(
                f"sim profile {self.name}: eos_probability must be between 0 and 1, got {self.eos_probability}"
            )

    def seconds(self, plan: StepPlan, layout: Layout = _ONE_DEVICE, stage: int = 0) -> float:
        """How long a stage takes for `plan`; nothing for a plan without rows."""
        if not plan.rows:
            return 0.0
        tokens, ranks = sum(plan.counts), layout.tensor
        layers = len(stage_layers(self.layers, layout.pipeline, stage))
        divided = (
            self.step_seconds
            - self.replicated_seconds
            + self.token_seconds * tokens
            + self.context_seconds * (sum(plan.starts) + tokens)
        )
        seconds = (self.replicated_seconds + divided / ranks) * layers / self.layers
        if ranks > 1:
            ring = 2 * (ranks - 1) / ranks
            seconds += 2 * layers * (self.all_reduce_seconds + self.all_reduce_token_seconds * tokens * ring)
        return seconds

    def hand_over(self, plan: StepPlan) -> float:
        """How long the hidden states of `plan` are on their way to the next stage."""
        return self.hand_over_seconds + self.hand_over_token_seconds * sum(plan.counts) if plan.rows else 0.0

    def rank_weight_bytes(self, layout: Layout) -> int:
        """Weights of one rank."""
        return self.weight_bytes // layout.engine_size

    def rank_kv_bytes_per_token(self, layout: Layout) -> int:
        """KV cache of a token on the rank that holds most: of its layers and KV heads."""
        layers = len(stage_layers(self.layers, layout.pipeline, 0))
        heads = even_slice(self.kv_heads, layout.tensor, 0).size
        return -(-self.kv_bytes_per_token * layers * heads // (self.layers * self.kv_heads))

    @property
    def shape(self) -> ModelConfig:
        """The profile's model as far as splitting it goes."""
        return ModelConfig(
            architecture=self.name,
            vocab_size=self.vocab_size,
            hidden_size=0,
            intermediate_size=0,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=0,
            max_position_embeddings=self.max_model_len,
        )

    def check_layout(self, layout: Layout) -> None:
        """Raises ValueError where the profile's model cannot be split in this way."""
        check_layout(self.shape, layout)


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
