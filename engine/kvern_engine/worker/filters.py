"""The mathematics of sampling on tensors of scores: penalties, min-p, top-k, top-p, and the draw itself.

Pure functions of their arguments; each row is treated alone. Which rows need what is `sampler.py`'s business.
"""

import numpy as np
import torch
from torch import Tensor

_MAX_TOPK = 1024  # above this, sorting everything is as fast as selecting


def keep_allowed(scores: Tensor, allowed: Tensor) -> None:
    """Bans all tokens but `allowed` [n] int64. `scores` [V], changed in place."""
    kept = scores.index_select(0, allowed)
    scores.fill_(float("-inf")).index_copy_(0, allowed, kept)


def ban_words(scores: Tensor, latest: Tensor, before: Tensor, last: Tensor) -> None:
    """Bans the token `last` [n] int64 of those of n words whose other tokens, the columns of `before` [n, L] int32 that
    are not negative (on the right), are the `latest` [l] int32 of the row, l at most L. `scores` [V] float32, changed
    in place; nothing is read back."""
    missing = before.shape[1] - latest.shape[0]
    completes = ((before[:, missing:] == latest) | (before[:, missing:] < 0)).all(dim=1)
    if missing:
        completes &= (before[:, :missing] < 0).all(dim=1)
    scores.index_add_(0, last, torch.where(completes, float("-inf"), 0.0))


def unless_empty(scores: Tensor, otherwise: Tensor) -> Tensor:
    """`scores` [V], or `otherwise` [V] where all of them are banned."""
    return torch.where(scores.amax() > float("-inf"), scores, otherwise)


def apply_penalties(
    scores: Tensor,
    tokens: Tensor,
    num_prompt: Tensor,
    lengths: Tensor,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Penalties as OpenAI and vLLM define them.

    `scores` [n, V] float32; `tokens` [n, L] int32, of which the first `lengths` [n] count and the first `num_prompt`
    [n] of those are the prompt; the penalties are [n] float32. Repetition (Keskar et al., arXiv 1909.05858) divides
    positive and multiplies negative scores of all tokens seen, in prompt or output; presence is subtracted once and
    frequency once an occurrence from those in the output. Returns new scores.
    """
    rows, vocab = scores.shape
    place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    ids = tokens.long()
    outside = torch.full_like(ids, vocab)  # a column that is cut off again
    seen_ids = torch.where(place < lengths.unsqueeze(1), ids, outside)
    output_ids = torch.where(place >= num_prompt.unsqueeze(1), seen_ids, outside)
    ones = torch.ones(1, dtype=torch.int32, device=tokens.device).expand_as(ids)
    seen = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=tokens.device).scatter_add_(1, seen_ids, ones)
    count = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=tokens.device).scatter_add_(1, output_ids, ones)
    seen, count = seen[:, :vocab], count[:, :vocab]
    factor = repetition.unsqueeze(1)
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(seen > 0, repeated, scores)
    return scores - frequency.unsqueeze(1) * count - presence.unsqueeze(1) * (count > 0)


def mask_min_p(scores: Tensor, log_min_p: Tensor) -> Tensor:
    """Bans tokens less likely than min-p times the most likely one (Nguyen et al., arXiv 2407.01082), given the
    logarithm of min-p, `log_min_p` [n]; -inf bans none. `scores` [n, V] -> new scores."""
    limit = scores.amax(dim=-1) + log_min_p
    return scores.masked_fill(scores < limit.unsqueeze(1), float("-inf"))


def _largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of `scores` [n, V], in falling order."""
    if count <= _MAX_TOPK and count < scores.shape[1]:
        return scores.topk(count, dim=-1).values
    if scores.device.type == "cpu":
        falling = -np.sort(-scores.numpy(), axis=-1)  # ten times torch.sort, which carries indices along
        return torch.from_numpy(falling[:, :count])
    return scores.sort(dim=-1, descending=True).values[:, :count]


def mask_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """Bans all but the `top_k` [n] int64 most likely tokens, then, of the distribution over those, all but the smallest
    set that holds `top_p` [n] of it (Holtzman et al., arXiv 1904.09751). `largest_k` is the largest of `top_k`, known
    to the caller without a read-back. Tokens tied with the last one kept stay. `scores` [n, V] -> new scores.
    """
    falling = _largest(scores, largest_k)
    beyond = torch.arange(falling.shape[1], device=scores.device).unsqueeze(0) >= top_k.unsqueeze(1)
    probs = falling.masked_fill(beyond, float("-inf")).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    wanted = top_p.unsqueeze(1)
    keep = ~beyond & ((before < wanted) | (wanted >= 1))
    last = keep.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return scores.masked_fill(scores < falling.gather(1, last), float("-inf"))


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the distribution function of softmax(scores), in vocabulary order, passes `uniform` [n]
    float64 in [0, 1). `scores` [n, V] float32 -> [n] int64. Banned tokens (-inf) are never drawn."""
    cdf = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=scores.shape[1] - 1)
