"""The worker's state: what it knows of each row, on the device, changed only by the deltas of a StepPlan.

Token ids, block tables and sampling state live in tensors indexed by row, so that a step needs few numbers from the
host and the tokens that one step samples feed the next one without the CPU having seen them. What only the host's
decisions need (which features a row uses) is mirrored in numpy. The last row is never used by a sequence: padding of a
captured batch points to it.
"""

import math
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import torch

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.worker.staging import Staging, to_device
from kvern_kernels import SamplingTables


class Feature(IntFlag):
    """What a row asks of the sampler. A batch pays only for what one of its rows uses."""

    RANDOM = 1  # temperature above 0
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    LOGIT_BIAS = 32
    MIN_TOKENS = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256
    ALLOWED = 512
    BAD_WORDS = 1024


ANY = -1  # a token of a bad word that may be any, or none
OWN_EXTRAS = Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.ALLOWED | Feature.BAD_WORDS  # what RowExtras are for


def features_of(sampling: RowSampling) -> Feature:
    """The features that change anything for a row."""
    found = Feature(0)
    if sampling.temperature > 0:
        found |= Feature.RANDOM
        found |= Feature.TOP_K if sampling.top_k > 0 else Feature(0)
        found |= Feature.TOP_P if sampling.top_p < 1 else Feature(0)
        found |= Feature.MIN_P if sampling.min_p > 0 else Feature(0)
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        found |= Feature.PENALTIES
    found |= Feature.LOGIT_BIAS if sampling.logit_bias else Feature(0)
    found |= Feature.MIN_TOKENS if sampling.min_tokens > 0 and sampling.suppress else Feature(0)
    found |= Feature.LOGPROBS if sampling.logprobs is not None else Feature(0)
    found |= Feature.ALLOWED if sampling.allowed is not None else Feature(0)
    found |= Feature.BAD_WORDS if sampling.bad_words else Feature(0)
    found |= Feature.PROMPT_LOGPROBS if sampling.prompt_logprobs is not None else Feature(0)
    return found


@dataclass
class BadWords:
    """A row's bad words, on the device: `before` [n, L] int32, all their tokens but the last, behind ANY where they
    are fewer than L, and `last` [n] int64."""

    before: torch.Tensor
    last: torch.Tensor


@dataclass
class RowExtras:
    """Sampling state of one row that has no fixed size, on the device."""

    bias_ids: torch.Tensor  # [n] int64
    bias_values: torch.Tensor  # [n] float32
    suppress_ids: torch.Tensor  # [n] int64
    allowed_ids: torch.Tensor | None  # [n] int64
    bad_words: BadWords | None


@dataclass
class HostState:
    """The numpy mirror of what the host decides by, indexed by row."""

    features: np.ndarray  # int32, Feature bits
    num_prompt: np.ndarray  # int64
    seed: np.ndarray  # int64
    top_k: np.ndarray  # int64
    min_tokens: np.ndarray  # int64
    logprobs: np.ndarray  # int64, -1: none
    prompt_logprobs: np.ndarray  # int64, -1: none
    log_min_p: np.ndarray  # float32
    extras: dict[int, RowExtras] = field(default_factory=dict)

    @classmethod
    def empty(cls, rows: int) -> "HostState":
        def zeros() -> np.ndarray:
            return np.zeros(rows, dtype=np.int64)

        logs = np.full(rows, -np.inf, dtype=np.float32)
        return cls(np.zeros(rows, np.int32), zeros(), zeros(), zeros(), zeros(), zeros() - 1, zeros() - 1, logs)


class RowTables:
    """State of up to `max_num_seqs` sequences.

    `tokens` [max_num_seqs + 1, max_model_len + 1] int32; `block_tables` [max_num_seqs + 1, blocks of max_model_len]
    int32; `temperature`, `top_p`, `min_p`, `presence`, `frequency`, `repetition` [rows] float32; `num_prompt` and
    `top_k` [rows] int64.
    """

    FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = max_num_seqs + 1
        self.device, self.vocab_size, self.block_size = device, vocab_size, block_size
        self.max_num_seqs = max_num_seqs
        self.tokens = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        width = -(-(max_model_len + 1) // block_size)
        self.block_tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.block_tables[-1] = -1  # so that padding gets negative slots: nothing is written
        self.flat_tokens, self.flat_block_tables = self.tokens.view(-1), self.block_tables.view(-1)
        self.floats = torch.zeros(len(self.FLOATS), rows, dtype=torch.float32, device=device)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = self.floats
        self.ints = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.num_prompt, self.top_k = self.ints
        self.sampling = SamplingTables(self.temperature, self.top_k, self.top_p, self.min_p)
        self.host = HostState.empty(rows)
        self._staging = Staging(device, 1 << 20)

    def clear(self) -> None:
        """Forget every row."""
        self.host.features[:] = 0
        self.host.extras.clear()

    def apply(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray] | None:
        """Applies `removed` and `added`; returns `block_edits` as (places int64, block ids int32) for `set_blocks`,
        which follows once they have travelled with the step's other numbers. Raises ValueError where a row or a length
        is outside the tables.
        """
        for row in plan.removed:
            self.host.features[row] = 0
            self.host.extras.pop(row, None)
        if plan.added:
            self._add(plan.added)
        return self._edits(plan.block_edits) if plan.block_edits else None

    def set_blocks(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Block table entries: `places` [n] int64 into the flat table, `blocks` [n] int32."""
        self.flat_block_tables.index_copy_(0, places, blocks)

    def _add(self, added: list[AddedRow]) -> None:
        for new in added:
            self._check(new)
            self._mirror(new)
        tokens = [np.asarray(new.token_ids, dtype=np.int32) for new in added]
        blocks = [np.asarray(new.blocks, dtype=np.int32) for new in added]
        rows = np.array([new.row for new in added], dtype=np.int64)
        floats = np.array([[getattr(new.sampling, name) for new in added] for name in self.FLOATS], dtype=np.float32)
        ints = np.stack([self.host.num_prompt[rows], self.host.top_k[rows]])
        # One upload, then one copy a row into the tables.
        rows_d, floats_d, ints_d, *rest = self._staging.upload(rows, floats, ints, *tokens, *blocks)
        self.floats.index_copy_(1, rows_d, floats_d)
        self.ints.index_copy_(1, rows_d, ints_d)
        for new, ids, own in zip(added, rest[: len(added)], rest[len(added) :], strict=True):
            self.tokens[new.row, : len(new.token_ids)].copy_(ids)
            self.block_tables[new.row, : len(new.blocks)].copy_(own)

    def _check(self, new: AddedRow) -> None:
        if not 0 <= new.row < self.max_num_seqs:
            raise ValueError(f"row {new.row} of {new.request_id} is outside 0..{self.max_num_seqs - 1} (max_num_seqs)")
        if len(new.token_ids) >= self.tokens.shape[1]:
            raise ValueError(
                f"{new.request_id} has {len(new.token_ids)} tokens; max_model_len is {self.tokens.shape[1] - 1}"
            )
        if len(new.blocks) > self.block_tables.shape[1]:
            raise ValueError(
                f"{new.request_id} has {len(new.blocks)} blocks; max_model_len takes {self.block_tables.shape[1]}"
            )

    def _mirror(self, new: AddedRow) -> None:
        host, row, sampling = self.host, new.row, new.sampling
        features = features_of(sampling)
        host.features[row] = features
        host.num_prompt[row] = new.num_prompt_tokens
        host.seed[row] = sampling.seed
        host.top_k[row] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        host.min_tokens[row] = sampling.min_tokens
        host.logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        host.prompt_logprobs[row] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        host.log_min_p[row] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        host.extras.pop(row, None)
        if features & OWN_EXTRAS:
            host.extras[row] = self._extras(sampling)

    def _extras(self, sampling: RowSampling) -> RowExtras:
        # Ids beyond the vocabulary are refused by the API server; here they must not take the device down.
        bias = {token: value for token, value in (sampling.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        suppress = [token for token in sampling.suppress if 0 <= token < self.vocab_size]
        allowed = [token for token in sampling.allowed or () if 0 <= token < self.vocab_size]
        return RowExtras(
            self._ids(list(bias)),
            to_device(np.array(list(bias.values()), dtype=np.float32), self.device),
            self._ids(suppress),
            self._ids(allowed) if allowed else None,
            self._bad_words(sampling.bad_words),
        )

    def _bad_words(self, words: list[list[int]]) -> BadWords | None:
        words = [word for word in words if 0 <= word[-1] < self.vocab_size]
        if not words:
            return None
        before = np.full((len(words), max(map(len, words)) - 1), ANY, dtype=np.int32)
        for row, word in zip(before, words, strict=True):
            row[len(row) - len(word) + 1 :] = word[:-1]
        return BadWords(to_device(before, self.device), self._ids([word[-1] for word in words]))

    def _ids(self, tokens: list[int]) -> torch.Tensor:
        return to_device(np.array(tokens, dtype=np.int64), self.device)

    def _edits(self, edits: list[tuple[int, int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        width = self.block_tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for row, first, ids in edits:
            if not (0 <= row < self.max_num_seqs and first >= 0 and first + len(ids) <= width):
                raise ValueError(f"block_edits of row {row}: {first}+{len(ids)} is outside its table of {width} blocks")
            start = row * width + first
            places.extend(range(start, start + len(ids)))
            blocks.extend(ids)
        return np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int32)
