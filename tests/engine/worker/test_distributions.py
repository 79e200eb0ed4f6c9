"""Every sampling parameter, and random combinations of them, against distributions worked out by hand (chi-square)."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from sampling_oracle import distribution, normal_deviate
from worker_harness import FixedRunner, plan

from kvern_engine.core.plan import AddedRow, RowSampling
from kvern_engine.worker import sampler as sampler_module

FULL = os.environ.get("KVERN_TEST_FULL") == "1"
VOCAB, ROWS = 61, 256
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2
A, B, C, D, E, F, G, H, *_ = LOGITS.topk(10).indices.tolist()  # the most likely tokens: what happens to them shows
PROMPT, OUTPUT = [C, D, E, C, H], [B, D, B, A, B, F]

ALONE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.7},
    {"presence_penalty": 1.7},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.5},
    {"logit_bias": {B: 2.5, A: -100.0, 60: 4.0}},
    {"allowed": [1, B, F, G, 59]},
    {"allowed": [H]},
    {"min_tokens": 7, "suppress": [A, B, C, G]},
    {"min_tokens": 6, "suppress": [A, B, C, G]},  # six are there: nothing is banned
    {"bad_words": [[A], [B, F, C], [A, B, F, D], [*OUTPUT, E], [F, B, G]]},
    {"bad_words": [[H, *OUTPUT, A], [*OUTPUT[::-1], A], [B, A]]},  # the prompt does not count, nor another order
]


def random_combination(number: int) -> dict[str, Any]:
    chosen = np.random.default_rng(number)
    asked: dict[str, Any] = {"temperature": float(chosen.uniform(0.3, 2.0))}

    def maybe(name: str, value: Any) -> None:
        if chosen.random() < 0.5:
            asked[name] = value

    maybe("top_k", int(chosen.integers(2, VOCAB)))
    maybe("top_p", float(chosen.uniform(0.3, 1.0)))
    maybe("min_p", float(chosen.uniform(0.0, 0.2)))
    maybe("presence_penalty", float(chosen.uniform(-2, 2)))
    maybe("frequency_penalty", float(chosen.uniform(-2, 2)))
    maybe("repetition_penalty", float(chosen.uniform(0.5, 2)))
    maybe("logit_bias", {int(t): float(chosen.uniform(-5, 5)) for t in chosen.integers(0, VOCAB, 6)})
    maybe("allowed", [int(t) for t in chosen.permutation(VOCAB)[:25]])
    maybe("bad_words", [[B, F, int(t)] for t in chosen.integers(0, VOCAB, 5)] + [[int(chosen.integers(VOCAB))]])
    if chosen.random() < 0.5:
        asked |= {"min_tokens": int(chosen.integers(5, 9)), "suppress": [int(t) for t in chosen.integers(0, VOCAB, 4)]}
    return asked


class Sampling:
    """Draws with given parameters behind PROMPT and OUTPUT, up to ROWS rows at once."""

    def __init__(self, logits: torch.Tensor = LOGITS) -> None:
        self.fixed = FixedRunner(logits, ROWS)
        self.vocab = logits.shape[-1]
        self.steps = 0

    def draw(self, samplings: list[RowSampling]) -> list[int]:
        length = len(PROMPT) + len(OUTPUT)
        added = [
            AddedRow(row, f"r{row}", PROMPT + OUTPUT, len(PROMPT), [0], sampling)
            for row, sampling in enumerate(samplings)
        ]
        rows = [(row, 0, length, True) for row in range(len(samplings))]
        result = self.fixed.runner.execute(plan(self.steps, rows, added=added)).result()
        self.steps += 1
        return [tokens[0] for tokens in result.tokens]

    def counts(self, asked: dict[str, Any], times: int) -> np.ndarray:
        drawn: list[int] = []
        for _ in range(times):
            drawn += self.draw([RowSampling(seed=self.steps * ROWS + row, **asked) for row in range(ROWS)])
        return np.bincount(drawn, minlength=self.vocab)


@pytest.fixture(scope="module")
def sampling() -> Sampling:
    return Sampling()


@pytest.mark.parametrize("asked", ALONE, ids=lambda asked: ",".join(asked) or "plain")
def test_each_parameter(sampling: Sampling, asked: dict[str, Any]) -> None:
    probs = distribution(LOGITS.numpy(), PROMPT, OUTPUT, **asked)
    assert abs(normal_deviate(sampling.counts(asked, 40 if FULL else 6), probs)) < 4


@pytest.mark.parametrize("number", range(200 if FULL else 8))
def test_combinations(sampling: Sampling, number: int) -> None:
    asked = random_combination(number)
    probs = distribution(LOGITS.numpy(), PROMPT, OUTPUT, **asked)
    assert normal_deviate(sampling.counts(asked, 40 if FULL else 5), probs) < 4, asked


def test_a_wrong_distribution_shows(sampling: Sampling) -> None:
    counts = sampling.counts({"frequency_penalty": 0.3}, 12)
    assert normal_deviate(counts, distribution(LOGITS.numpy(), PROMPT, OUTPUT)) > 4
    with pytest.raises(AssertionError, match="banned tokens were drawn"):
        normal_deviate(counts, distribution(LOGITS.numpy(), PROMPT, OUTPUT, top_k=2))


def test_a_large_vocabulary() -> None:
    logits = torch.randn(8000, generator=torch.Generator().manual_seed(3)) * 2
    asked: dict[str, Any] = {"top_p": 0.95, "min_p": 0.0005, "repetition_penalty": 1.2, "bad_words": [[30, 5]]}
    probs = distribution(logits.numpy(), PROMPT, OUTPUT, **asked)
    assert (probs > 0).sum() > 500
    assert normal_deviate(Sampling(logits).counts(asked, 5), probs) < 4


def test_all_kinds_in_one_batch_as_each_alone(sampling: Sampling) -> None:
    asked = [*ALONE, *(random_combination(number) for number in range(20)), {"temperature": 0.0}]
    rows = [RowSampling(seed=row, **each) for row, each in enumerate(asked)]
    together = sampling.draw(rows)
    assert together == [sampling.draw([row])[0] for row in rows]
    assert together[::-1] == sampling.draw(rows[::-1])


def test_few_rows_at_once_give_the_same(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory for the scores has a limit, a batch is sampled in parts."""
    rows = [RowSampling(seed=row, **random_combination(row)) for row in range(50)]
    whole = sampling.draw(rows)
    monkeypatch.setattr(sampler_module, "SHAPING_BYTES", 1)
    assert sampler_module.rows_at_once(VOCAB) == 16
    assert sampling.draw(rows) == whole


def test_bans_that_leave_nothing_give_way(sampling: Sampling) -> None:
    only = RowSampling(seed=1, allowed=[4], bad_words=[[4]], min_tokens=9, suppress=[4])
    two = RowSampling(seed=1, allowed=[4, 5], min_tokens=9, suppress=[4])
    greedy = RowSampling(seed=1, temperature=0.0, bad_words=[[token] for token in range(VOCAB)])
    assert sampling.draw([only, two, greedy]) == [4, 5, A]


def test_ids_beyond_the_vocabulary_do_no_harm(sampling: Sampling) -> None:
    greedy: dict[str, Any] = {"seed": 1, "temperature": 0.0}
    asked = [
        RowSampling(**greedy, allowed=[7, VOCAB + 1]),
        RowSampling(**greedy, allowed=[VOCAB + 1]),
        RowSampling(**greedy, bad_words=[[VOCAB], [VOCAB + 2, 5]]),
    ]
    assert sampling.draw(asked) == [7, A, A]


def test_bad_words_follow_the_tokens_that_were_sampled() -> None:
    """Greedy over fixed logits repeats the largest; of a word only the last token is banned, in its place alone."""
    fixed = FixedRunner(LOGITS)
    greedy: dict[str, Any] = {"seed": 0, "temperature": 0.0}
    pair = RowSampling(**greedy, bad_words=[[A, A]])
    triple = RowSampling(**greedy, bad_words=[[A, A, A], [A, B, A]])
    one = RowSampling(**greedy, bad_words=[[A], [B, B]])
    assert fixed.sample([[A]] * 3, [pair, triple, one], 5) == [[A, B, A, B, A], [A, A, B, B, A], [B, C, B, C, B]]
