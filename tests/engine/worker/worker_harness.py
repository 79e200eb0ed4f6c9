"""Drives a worker with hand-written plans, and the reference it is compared with."""

from dataclasses import dataclass, field
from typing import Any

import torch

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan, StepResult
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.loading.weights import iter_weights
from kvern_engine.model_config import ModelConfig
from kvern_engine.tokenizer import Tokenizer, load_tokenizer
from kvern_engine.worker.runner import Runner
from kvern_engine.worker.tables import RowTables
from kvern_engine.worker.worker import Worker

GREEDY = RowSampling(seed=0, temperature=0.0)


def plan(
    step: int,
    rows: list[tuple[int, int, int, bool]] | None = None,
    *,
    removed: list[int] | None = None,
    added: list[AddedRow] | None = None,
    edits: list[tuple[int, int, list[int]]] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> StepPlan:
    """A plan; `rows` are (row, start, count, samples)."""
    rows = rows or []
    return StepPlan(
        step,
        removed or [],
        added or [],
        edits or [],
        copies or [],
        [row for row, *_ in rows],
        [start for _, start, *_ in rows],
        [count for _, _, count, _ in rows],
        [samples for *_, samples in rows],
    )


def reference_model(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' Llama in float32 with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})},
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config)
    model = model.to_empty(device="cpu").float()
    state = {name: tensor.float() for name, tensor in weights.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)  # its buffers are no part of the state
    return model.eval()


@dataclass
class LoadedModel:
    """A worker in float32 over 64 blocks of 16, and transformers' logits for the same weights."""

    spec: str
    worker: Worker
    reference: Any
    tokenizer: Tokenizer
    ready: Any

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits after each of the tokens, [n, V] float32."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0].float()


def load_model(spec: str, **config: Any) -> LoadedModel:
    """A worker and its reference. Weights go to both from the same file."""
    worker = Worker(EngineConfig(model=spec, device="cpu", num_gpu_blocks_override=64, max_num_seqs=8, **config))
    ready = worker.load()
    files = resolve_model(spec)
    model_config = read_model_config(files)
    reference = reference_model(model_config, dict(iter_weights(files, model_config)))
    return LoadedModel(spec, worker, reference, load_tokenizer(files), ready)


@dataclass
class Session:
    """Runs plans on a model, keeps every row's tokens and the logits of every token of every step, to be compared."""

    model: LoadedModel
    tokens: dict[int, list[int]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    logits: list[dict[int, torch.Tensor]] = field(default_factory=list)
    pieces: list[tuple[list[int], int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model.worker.reset()

    def run(self, rows: list[tuple[int, int, int, bool]], **deltas: Any) -> StepResult:
        """One step; `rows` are (row, start, count, samples)."""
        made = plan(len(self.plans), rows, **deltas)
        self.plans.append(made)
        for row in made.removed:
            del self.tokens[row]
        for new in made.added:
            self.tokens[new.row] = list(new.token_ids)
        pending = self.model.worker.execute(made, return_logits=True)
        result = pending.result()
        assert pending.logits is not None
        self.logits.append(pending.logits)
        self.pieces += [(self.tokens[row], start, pending.logits[row]) for row, start, *_ in rows]
        assert result.step == made.step
        assert sorted(result.rows) == sorted(row for row, *_, samples in rows if samples)
        for row, sampled in zip(result.rows, result.tokens, strict=True):
            self.tokens[row].extend(sampled)
        return result

    def worst(self) -> float:
        """The largest difference between any logit computed so far and transformers' one."""
        expected = {id(tokens): self.model.expected(tokens) for tokens, *_ in self.pieces}
        return max(
            float((logits - expected[id(tokens)][start : start + len(logits)]).abs().max())
            for tokens, start, logits in self.pieces
        )

    def add(self, row: int, token_ids: list[int], blocks: list[int], sampling: RowSampling = GREEDY) -> AddedRow:
        """A row whose prompt is all of `token_ids`."""
        return AddedRow(row, f"request-{row}", token_ids, len(token_ids), blocks, sampling)


class FixedModel:
    """A "model" whose logits are what the test says: [V] for all, or [positions, V] by the position of the token."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def forward(
        self, token_ids: Any, positions: torch.Tensor, kv_caches: Any, meta: Any, wanted: Any = None
    ) -> torch.Tensor:
        hidden = positions.unsqueeze(1).float()
        return hidden if wanted is None else hidden[wanted.index]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.logits.dim() == 1:
            return self.logits.repeat(hidden.shape[0], 1)
        return self.logits[hidden[:, 0].long()]


class FixedRunner:
    """A runner over `FixedModel`: what the sampler does, seen through plans."""

    def __init__(self, logits: torch.Tensor, max_num_seqs: int = 256, max_model_len: int = 64) -> None:
        self.tables = RowTables(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=16,
            vocab_size=logits.shape[-1],
            device=torch.device("cpu"),
        )
        arena = [torch.zeros(2, 1, 1, 16, 2)]
        self.runner = Runner(FixedModel(logits), self.tables, arena, 4096)  # type: ignore[arg-type]
        self.step = 0

    def sample(self, prompts: list[list[int]], samplings: list[RowSampling], steps: int = 1) -> list[list[int]]:
        """The tokens that rows with these prompts sample in `steps` steps, one list a row."""
        return self.results(prompts, samplings, steps)[0]

    def results(
        self, prompts: list[list[int]], samplings: list[RowSampling], steps: int = 1
    ) -> tuple[list[list[int]], list[StepResult]]:
        added = [
            AddedRow(row, f"r{row}", ids, len(ids), [0] * 4, sampling)
            for row, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        tokens: list[list[int]] = [[] for _ in added]
        results = []
        for step in range(steps):
            rows = [
                (
                    new.row,
                    0 if step == 0 else len(new.token_ids) + step - 1,
                    len(new.token_ids) if step == 0 else 1,
                    True,
                )
                for new in added
            ]
            result = self.runner.execute(plan(self.step, rows, added=added if step == 0 else [])).result()
            self.step += 1
            results.append(result)
            for row, sampled in zip(result.rows, result.tokens, strict=True):
                tokens[row].extend(sampled)
        return tokens, results
