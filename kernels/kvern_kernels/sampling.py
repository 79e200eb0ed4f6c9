"""Tokens from logits: greedy, or drawn at random after temperature, min-p, top-k and top-p; each row by its own state.

Plain torch reference of `sampling_triton.py`, and the definition of the result: rows with temperature 0 take the
largest logit (the first of equals). Others keep the tokens that pass min-p (Nguyen et al., arXiv 2407.01082), of those
the top_k most likely, of those the smallest set that holds top_p of the rest (Holtzman et al., arXiv 1904.09751; tokens
tied with the last one kept stay), and take the token at which the distribution function of what is kept, in the
vocabulary's order, passes the row's random number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingTables:
    """Sampling state by table row, [R]: `temperature`, `top_p`, `min_p` float32; `top_k` int64, 0 or >= V: no limit."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    state: SamplingTables,
    uniform: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`logits` [B, V] of any float type; `rows` [B] integers: the table row of each; `uniform` [B] float64 in [0, 1)
    (None: all rows are greedy) -> token ids [B] int64, also written to `out` and to `tokens` [any shape] int32 at the
    flat index `places` [B] int64, where that is not negative.
    """
    scores = logits.float()
    chosen = scores.argmax(dim=-1)
    if uniform is not None:
        index = rows.long()
        temperature = state.temperature[index]
        drawn = _draw(scores, index, state, temperature.where(temperature > 0, 1.0), uniform)
        chosen = torch.where(temperature > 0, drawn, chosen)
    written = places >= 0
    tokens.view(-1)[places[written]] = chosen[written].int()
    return chosen if out is None else out.copy_(chosen)


def _draw(scores: Tensor, rows: Tensor, state: SamplingTables, temperature: Tensor, uniform: Tensor) -> Tensor:
    limit = scores.amax(dim=-1) + temperature * state.min_p[rows].log()
    scores = scores.masked_fill(scores < limit.unsqueeze(1), float("-inf"))
    weights = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)).double().exp()
    falling, order = scores.sort(dim=-1, descending=True)
    vocab, top_k = scores.shape[1], state.top_k[rows]
    last = (torch.where(top_k > 0, top_k.clamp(max=vocab), vocab) - 1).unsqueeze(1)
    weights = weights.masked_fill(scores < falling.gather(1, last), 0.0)
    sorted_weights = weights.gather(1, order)
    before = sorted_weights.cumsum(dim=-1) - sorted_weights
    wanted = state.top_p[rows].double().unsqueeze(1)
    keep = (before < wanted * weights.sum(dim=-1, keepdim=True)) | (wanted >= 1)
    cut = falling.gather(1, keep.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    cdf = weights.masked_fill((scores < cut) & (wanted < 1), 0.0).cumsum(dim=-1)
    target = uniform.unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=scores.shape[1] - 1)
