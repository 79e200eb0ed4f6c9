"""What each sampling parameter means, in a few lines of numpy: the distribution that a token is drawn from."""

import math
from typing import Any

import numpy as np


def distribution(logits: np.ndarray, prompt: list[int], output: list[int], **asked: Any) -> np.ndarray:
    """Probabilities [V] of the next token after `prompt` and `output`, by RowSampling's fields in `asked`."""
    scores = logits.astype(np.float64)
    if (allowed := asked.get("allowed")) is not None:
        scores[[token for token in range(len(scores)) if token not in allowed]] = -math.inf
    for token, bias in (asked.get("logit_bias") or {}).items():
        scores[token] += bias
    banned = scores.copy()
    for *before, last in asked.get("bad_words", []):
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            banned[last] = -math.inf
    if len(output) < asked.get("min_tokens", 0):
        banned[asked.get("suppress", [])] = -math.inf
    if np.isfinite(banned).any():
        scores = banned
    repetition = asked.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token in set(output):
        scores[token] -= asked.get("presence_penalty", 0.0) + output.count(token) * asked.get("frequency_penalty", 0.0)
    if asked.get("temperature", 1.0) == 0:
        return np.eye(len(scores))[scores.argmax()]
    probs = np.exp((scores - scores.max()) / asked.get("temperature", 1.0))
    probs[probs < asked.get("min_p", 0.0) * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if asked.get("top_k", 0) > 0:
        probs[order[asked["top_k"] :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    if asked.get("top_p", 1.0) < 1:
        probs[order[before >= asked["top_p"]]] = 0
    return probs / probs.sum()


def normal_deviate(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic of `counts` lies above its mean under `probs` (Wilson and
    Hilferty, 1931): above 4 is one in 30,000. Rare tokens are counted together. Raises AssertionError for a token that
    cannot be drawn."""
    assert counts[probs == 0].sum() == 0, f"banned tokens were drawn: {np.flatnonzero((probs == 0) & (counts > 0))}"
    order = np.argsort(-probs)
    expected, seen = probs[order] * counts.sum(), counts[order]
    often = max(int((expected >= 8).sum()), 1)
    expected = np.append(expected[:often], expected[often:].sum())
    seen = np.append(seen[:often], seen[often:].sum())
    if expected[-1] < 8:  # too few to be a class of their own
        expected, seen = np.append(expected[:-2], expected[-2:].sum()), np.append(seen[:-2], seen[-2:].sum())
    freedom = len(seen) - 1
    if freedom == 0:
        return 0.0
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))
