"""Logprobs of given tokens: value, rank and the most likely alternatives, from the model's own logits.

They are taken before penalties, bias and temperature, as vLLM does by default ("raw logprobs").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern_engine.core.plan import TokenLogprobs

CHUNK_BYTES = 64 << 20  # of float32 logits at once: logprobs must not decide how much memory a step takes


@dataclass
class LogprobTensors:
    """Logprobs at n positions: `token_ids` [n] int64, `logprobs` [n] float32, `ranks` [n] int64 (1: most likely),
    `top_ids` [n, k] int64 and `top_logprobs` [n, k] float32 in falling order."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, move: Callable[[Tensor], Tensor]) -> "LogprobTensors":
        """The same with every tensor passed through `move` (to the host, say)."""
        return LogprobTensors(*(move(getattr(self, name)) for name in self.__dataclass_fields__))

    @classmethod
    def concatenate(cls, parts: "Sequence[LogprobTensors]") -> "LogprobTensors":
        """All positions of `parts`, in order; the parts have equal k."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def to_messages(self, alternatives: Sequence[int]) -> list[TokenLogprobs]:
        """One message a position with its first `alternatives[i]` alternatives. Reads the tensors."""
        columns = (t.tolist() for t in (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs))
        return [
            TokenLogprobs(token, value, rank, ids[:count], values[:count])
            for token, value, rank, ids, values, count in zip(*columns, alternatives, strict=True)
        ]


def positions_at_once(vocab_size: int) -> int:
    """How many positions have their logits in float32 at once."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, alternatives: int, index: Tensor | None = None
) -> LogprobTensors:
    """`logits` [n, V], `token_ids` [n] int64; the `alternatives` most likely tokens are reported besides (0: none).
    With `index` [m] int64 only of these positions, m of them.

    A position's numbers depend on its own logits alone, to the last bit. Takes memory for CHUNK_BYTES of scores at
    once, however many positions there are.
    """
    step = positions_at_once(logits.shape[1])
    parts = []
    for at in range(0, max(logits.shape[0] if index is None else index.shape[0], 1), step):
        if index is None:
            part = logits[at : at + step], token_ids[at : at + step]
        else:
            some = index[at : at + step]
            part = logits.index_select(0, some), token_ids.index_select(0, some)
        parts.append(_compute(*part, alternatives))
    return LogprobTensors.concatenate(parts)


def _compute(logits: Tensor, token_ids: Tensor, alternatives: int) -> LogprobTensors:
    scores = logits.float()
    own = token_ids.unsqueeze(1)
    ranks = (scores > scores.gather(1, own)).sum(dim=-1) + 1
    top = _largest(scores, min(alternatives, scores.shape[1]))
    # One kernel that treats each row alone; logsumexp cuts rows in pieces by how many there are.
    logprobs = scores.log_softmax(dim=-1)
    return LogprobTensors(token_ids, logprobs.gather(1, own).squeeze(1), ranks, top, logprobs.gather(1, top))


def _largest(scores: Tensor, count: int) -> Tensor:
    """The tokens with the `count` largest of `scores` [n, V] float32, [n, count]; of equal ones, which 16-bit logits
    often are, the first, as greedy sampling takes it. `topk` alone takes any, by what else is computed."""
    if count == 0:
        return scores.new_empty(scores.shape[0], 0, dtype=torch.int64)
    bits = scores.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the floats' order
    places = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (ordered << 32).add_(places).topk(count, dim=-1).indices


def compute_in_chunks(
    hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], token_ids: Tensor, alternatives: int, vocab_size: int
) -> LogprobTensors:
    """The same from hidden states [n, H], never holding more than CHUNK_BYTES of logits."""
    step = positions_at_once(vocab_size)
    parts = [
        compute_logprobs(compute_logits(hidden[at : at + step]), token_ids[at : at + step], alternatives)
        for at in range(0, hidden.shape[0], step)
    ]
    return LogprobTensors.concatenate(parts)
