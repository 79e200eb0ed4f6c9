"""A sparse mixture of experts in place of an MLP (Shazeer et al., arXiv 1701.06538; as in Mixtral, arXiv 2401.04088).

Plain: the tokens of an expert are gathered, computed and added up again, one expert after the other. Ranks share each
expert's units, so that a token goes to the same experts on all of them and one sum over the ranks remains.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.layers.parameters import Destinations, whole
from kvern_engine.parallel.layout import even_slice


class MixtureOfExperts:
    """`gate` gives each expert's score for a token; `experts` are gated MLPs of `Experts.intermediate_size` units.

    `names` are what the checkpoint calls the matrices of an expert: gate, up and down.
    """

    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, build: Build) -> None:
        config, group = build.config, build.group
        assert config.experts is not None
        self._experts, self._group = config.experts, group
        held = even_slice(self._experts.intermediate_size, group.size, group.rank)
        count = self._experts.num_experts
        self.gate = Linear(config.hidden_size, count, dtype=build.dtype, device=build.device)
        self.experts = [GatedMLP(build, held, self._experts.intermediate_size) for _ in range(count)]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of the tokens `x` [T, H]: the experts it takes, [T, k] int64, and their weights [T, k] in x's
        dtype."""
        chances = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = chances.topk(self._experts.per_token, dim=-1)
        if self._experts.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights.to(x.dtype)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, H] -> [T, H], the sum of the chosen experts by their weights. (`residual` is the next norm's.)"""
        chosen, weights = self.route(x)
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        tokens, shares = order // self._experts.per_token, weights.flatten()[order].unsqueeze(1)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert.own_share(x[rows]) * shares[start : start + count])
                start += count
        return self._group.all_reduce(out)

    def linears(self) -> list[Linear]:
        return [linear for expert in self.experts for linear in expert.linears()]

    def destinations(self, prefix: str) -> Destinations:
        """`prefix` is that of the mixture's tensors, e.g. "model.layers.0.mlp."."""
        found = {f"{prefix}gate.weight": whole(self.gate.weight)}
        for number, expert in enumerate(self.experts):
            found |= expert.destinations(f"{prefix}experts.{number}.", self.names)
        return found
