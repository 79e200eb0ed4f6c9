"""What is sampled from given logits: distributions, seeds, penalties, bias, minimum lengths, logprobs."""

import math

import numpy as np
import pytest
import torch
from worker_harness import FixedRunner

from kvern_engine.core.plan import RowSampling
from kvern_engine.worker.filters import apply_penalties, draw, mask_min_p, mask_top_k_top_p
from kvern_engine.worker.rng import uniform

LOGITS = torch.tensor([1.0, 0.5, 3.0, -1.0, 2.0, 0.0, -2.0, 2.5])
ROWS = 256


def softmax(scores: torch.Tensor) -> np.ndarray:
    return scores.double().softmax(-1).numpy()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The statistic in standard deviations from its mean (Wilson-Hilferty): above 4 is one in 30,000."""
    assert counts[probs == 0].sum() == 0, "a banned token was sampled"
    seen = probs > 0
    expected = probs[seen] * counts.sum()
    freedom = seen.sum() - 1
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def counts_of(sampling: dict[str, float], logits: torch.Tensor = LOGITS, steps: int = 40) -> np.ndarray:
    """How often each token comes among ROWS * steps samples with different seeds and positions."""
    runner = FixedRunner(logits, ROWS)
    rows = [RowSampling(seed=1000 + i, **sampling) for i in range(ROWS)]  # type: ignore[arg-type]
    tokens = runner.sample([[0]] * ROWS, rows, steps)
    return np.bincount(np.array(tokens).reshape(-1), minlength=len(logits))


def kept(logits: torch.Tensor, tokens: list[int]) -> np.ndarray:
    mask = torch.full_like(logits, -math.inf)
    mask[tokens] = 0
    return softmax(logits + mask)


# sorted: 2 (3.0), 7 (2.5), 4 (2.0), 0 (1.0), 1 (0.5), 5 (0.0), 3 (-1.0), 6 (-2.0)
@pytest.mark.parametrize(
    ("sampling", "probs"),
    [
        ({"temperature": 1.0}, softmax(LOGITS)),
        ({"temperature": 0.5}, softmax(LOGITS / 0.5)),
        ({"temperature": 3.0}, softmax(LOGITS / 3)),
        ({"top_k": 3}, kept(LOGITS, [2, 7, 4])),
        ({"top_k": 1}, kept(LOGITS, [2])),
        ({"top_k": 100}, softmax(LOGITS)),
        ({"top_p": 0.7}, kept(LOGITS, [2, 7])),  # 0.448 and 0.272: together 0.720
        ({"top_p": 0.75}, kept(LOGITS, [2, 7, 4])),
        ({"top_p": 0.01}, kept(LOGITS, [2])),
        ({"min_p": 0.3}, kept(LOGITS, [2, 7, 4])),  # ratios to the largest: 1, 0.61, 0.37, 0.14, ...
        ({"min_p": 1.0}, kept(LOGITS, [2])),
        ({"top_k": 4, "top_p": 0.75}, kept(LOGITS, [2, 7])),  # top-p of the distribution over the four
        ({"temperature": 2.0, "top_k": 5, "min_p": 0.4}, kept(LOGITS / 2, [2, 7, 4])),  # 1, .78, .61, .37
        ({"logit_bias": {2: -100.0, 6: 4.0}}, softmax(LOGITS + torch.tensor([0, 0, -100.0, 0, 0, 0, 4.0, 0]))),
    ],
)
def test_distribution(sampling: dict[str, float], probs: np.ndarray) -> None:
    counts = counts_of(sampling)
    if (probs > 0).sum() == 1:
        assert counts[probs.argmax()] == counts.sum()
    else:
        assert abs(chi_square(counts, np.where(probs < 1e-30, 0, probs))) < 4


def test_distribution_of_a_real_vocabulary() -> None:
    """A cut that needs everything sorted; many tokens with tiny probabilities are drawn rightly."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 2
    counts = counts_of({"top_p": 0.95}, logits, steps=24)
    order = logits.argsort(descending=True)
    probs = torch.from_numpy(softmax(logits))[order]
    nucleus = order[: int(((probs.cumsum(0) - probs) < 0.95).sum())]
    expected = kept(logits, nucleus.tolist())
    assert len(nucleus) > 500
    assert counts[expected == 0].sum() == 0
    groups = [part.tolist() for part in nucleus.split(100)]
    merged = np.array([counts[group].sum() for group in groups])
    assert abs(chi_square(merged, np.array([expected[group].sum() for group in groups]))) < 4


def test_wrong_distribution_shows() -> None:
    assert chi_square(counts_of({"temperature": 1.1}), softmax(LOGITS)) > 4


def test_greedy_takes_the_largest() -> None:
    assert FixedRunner(LOGITS).sample([[1], [3, 4]], [RowSampling(seed=1, temperature=0.0)] * 2, 3) == [[2] * 3] * 2


def test_a_row_samples_the_same_in_any_company() -> None:
    """Alone, among others of other kinds, and at another place in the batch."""
    mine = RowSampling(seed=77, temperature=1.3, top_p=0.97)
    others = [
        RowSampling(seed=1, temperature=0.0),
        RowSampling(seed=2, top_k=3),
        RowSampling(seed=3, min_p=0.2, presence_penalty=1.0),
        RowSampling(seed=4, temperature=0.0, logit_bias={5: 10.0}),
        RowSampling(seed=5, repetition_penalty=2.0, logprobs=2),
    ]
    alone = FixedRunner(LOGITS).sample([[6, 7]], [mine], 20)[0]
    assert len(set(alone)) > 3
    for place in range(len(others) + 1):
        samplings = [*others[:place], mine, *others[place:]]
        assert FixedRunner(LOGITS).sample([[6, 7]] * 6, samplings, 20)[place] == alone
    alone_others = [FixedRunner(LOGITS).sample([[6, 7]], [one], 20)[0] for one in others]
    assert FixedRunner(LOGITS).sample([[6, 7]] * 5, others, 20) == alone_others


def test_seed_and_position_decide_alone() -> None:
    row = [RowSampling(seed=5)]
    first = FixedRunner(LOGITS).sample([[1, 2, 3]], row, 8)[0]
    assert FixedRunner(LOGITS).sample([[1, 2, 3]], row, 8)[0] == first
    resumed = FixedRunner(LOGITS).sample([[1, 2, 3, *first[:4]]], row, 4)[0]  # recomputed after four tokens
    assert resumed == first[4:]
    assert FixedRunner(LOGITS).sample([[1, 2, 3]], [RowSampling(seed=6)], 8)[0] != first


def test_uniform_numbers() -> None:
    """Known values (a change would change everybody's seeded answers), range, mean, and no likeness of neighbours."""
    seeds, positions = np.array([0, 0, 1, -1, 2**63 - 1]), np.array([0, 1, 0, 5, 8191])
    known = [splitmix_uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert uniform(seeds, positions).tolist() == known
    grid = uniform(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    assert grid.min() >= 0 and grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.004
    for shifted in (
        np.corrcoef(grid[1:].ravel(), grid[:-1].ravel()),
        np.corrcoef(grid[:, 1:].ravel(), grid[:, :-1].ravel()),
    ):
        assert abs(shifted[0, 1]) < 0.015


def splitmix_uniform(seed: int, position: int) -> float:
    """The same in plain integers."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = mix((seed + gamma) & mask)
    return (mix((state + gamma * (position + 1)) & mask) >> 11) * 2.0**-53


def test_draw_never_takes_a_banned_token() -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(4, 1)
    ends = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(scores, ends).tolist() == [1, 1, 3, 3]


def test_min_p_zero_and_top_p_one_ban_nothing() -> None:
    scores = torch.randn(2, 50)
    assert torch.equal(mask_min_p(scores, torch.tensor([0.0, 0.0]).log()), scores)
    assert torch.equal(mask_top_k_top_p(scores, torch.tensor([50, 50]), torch.tensor([1.0, 1.0]), 50), scores)


def test_penalties_by_hand() -> None:
    """Prompt [0, 1, 1], output [1, 2, 2]; scores 1 or -1."""
    scores = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    tokens = torch.tensor([[0, 1, 1, 1, 2, 2, 3, 3]], dtype=torch.int32)  # what follows the sixth is stale

    def penalized(presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0) -> list[float]:
        numbers = {"presence": presence, "frequency": frequency, "repetition": repetition}
        return apply_penalties(
            scores, tokens, torch.tensor([3]), torch.tensor([6]), **{k: torch.tensor([v]) for k, v in numbers.items()}
        )[0].tolist()

    assert penalized(presence=0.5) == [1.0, -1.5, 0.5, 1.0]
    assert penalized(frequency=0.25) == [1.0, -1.25, 0.5, 1.0]
    assert penalized(repetition=2.0) == [0.5, -2.0, 0.5, 1.0]
    assert penalized(presence=-1.0, frequency=0.5, repetition=2.0) == [0.5, -1.5, 0.5, 1.0]
    assert penalized() == scores[0].tolist()


def test_penalties_follow_the_tokens_that_were_sampled() -> None:
    """Greedy with a presence penalty takes the tokens in falling order, each once, as long as it is large enough."""
    sampling = RowSampling(seed=0, temperature=0.0, presence_penalty=1.9)
    assert FixedRunner(LOGITS).sample([[2]], [sampling], 4)[0] == [2, 7, 4, 2]  # 3.0, 2.5, 2.0, then 1.1 above 1.0
    repetition = RowSampling(seed=0, temperature=0.0, repetition_penalty=4.0)
    assert FixedRunner(LOGITS).sample([[2]], [repetition], 3)[0] == [7, 4, 0]  # the prompt counts as well
    frequency = RowSampling(seed=0, temperature=0.0, frequency_penalty=0.3)
    assert FixedRunner(LOGITS).sample([[2]], [frequency], 4)[0] == [2, 2, 7, 2]  # 3.0, 2.7, 2.4 below 2.5


def test_logit_bias_of_one_row_only() -> None:
    biased = RowSampling(seed=0, temperature=0.0, logit_bias={6: 100.0, 99999: 5.0})
    plain = RowSampling(seed=0, temperature=0.0)
    assert FixedRunner(LOGITS).sample([[1], [1], [1]], [plain, biased, plain], 2) == [[2, 2], [6, 6], [2, 2]]


def test_min_tokens_bans_ends_until_then() -> None:
    """Prompts of different lengths: it is the generated tokens that count."""
    sampling = RowSampling(seed=0, temperature=0.0, min_tokens=3, suppress=[2, 7])
    tokens = FixedRunner(LOGITS).sample([[1], [1, 1, 1, 1]], [sampling, sampling], 5)
    assert tokens == [[4, 4, 4, 2, 2]] * 2
    resumed = RowSampling(seed=0, temperature=0.0, min_tokens=1, suppress=[2])
    assert FixedRunner(LOGITS).sample([[1]], [resumed], 2)[0] == [7, 2]


def test_logprobs_are_exact_and_before_penalties() -> None:
    samplings = [
        RowSampling(seed=1, temperature=0.0, logprobs=3, presence_penalty=2.0, logit_bias={6: 50.0}),
        RowSampling(seed=2, temperature=0.0),
        RowSampling(seed=3, temperature=7.0, top_k=2, logprobs=0),
    ]
    _, results = FixedRunner(LOGITS).results([[1], [1], [1]], samplings)
    logprobs = results[0].logprobs
    expected = LOGITS.double().log_softmax(-1)
    assert sorted(logprobs) == [0, 2]
    (first,), (third,) = logprobs[0], logprobs[2]
    assert (first.token_id, first.rank, first.top_ids) == (6, 8, [2, 7, 4])
    assert first.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    assert first.top_logprobs == pytest.approx([float(expected[i]) for i in (2, 7, 4)], abs=1e-6)
    assert third.token_id in (2, 7)
    assert third.rank == (1 if third.token_id == 2 else 2)
    assert (third.top_ids, third.top_logprobs) == ([], [])


def test_logits_of_16_bits() -> None:
    """Scores are taken to float32 before anything is done with them; the model's logits stay as they are."""
    logits = LOGITS.bfloat16()
    tokens = FixedRunner(logits).sample([[1]] * 2, [RowSampling(seed=1), RowSampling(seed=2, temperature=0.0)], 4)
    assert tokens[1] == [2] * 4
    assert torch.equal(logits, LOGITS.bfloat16())
