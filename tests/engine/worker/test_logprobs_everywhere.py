"""Logprobs of prompts and answers against a softmax of transformers' logits: in chunks, behind a warm prefix cache,
with several choices, and under preemption. Each position is reported once."""

from collections.abc import Iterator

import pytest
import torch
from worker_harness import LoadedModel

from kvern_engine import LLM, SamplingParams
from kvern_engine.outputs import RequestOutput

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness"
BOTH = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
FILLERS = [f"And the {word} of the LORD came unto me, saying," for word in ("word", "hand", "spirit", "angel", "voice")]


@pytest.fixture(scope="module")
def small(tiny_path: str) -> Iterator[LLM]:
    """Sixteen tokens a step and twelve blocks of sixteen tokens: prompts come in pieces, and not everybody fits."""
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 6, "num_gpu_blocks_override": 12, "max_model_len": 128}
    with LLM(tiny_path, device="cpu", serving=True, long_prefill_token_threshold=11, **sizes) as llm:
        yield llm


def check(tiny: LoadedModel, result: RequestOutput) -> None:
    ids = result.prompt_token_ids
    for choice in result.outputs:
        expected = tiny.expected(ids + choice.token_ids[:-1]).log_softmax(-1)
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        given = [None, *choice.logprobs]
        for position, (token, found) in enumerate(zip(choice.token_ids, given[1:], strict=True), start=len(ids)):
            check_entry(expected[position - 1], token, found, 3)
    assert result.prompt_logprobs is not None
    first, *rest = result.prompt_logprobs
    assert first is None and len(rest) == len(ids) - 1
    for position, found in enumerate(rest, start=1):
        assert found is not None
        check_entry(expected[position - 1], ids[position], found, 2)


def check_entry(expected: torch.Tensor, token: int, found: dict, most: int) -> None:
    assert found[token].logprob == pytest.approx(float(expected[token]), abs=1e-3)
    assert found[token].rank == int((expected > expected[token]).sum()) + 1
    tops = sorted((entry.rank, entry.logprob) for key, entry in found.items() if entry.rank <= most)
    assert [value for _, value in tops] == pytest.approx(expected.topk(most).values.tolist(), abs=1e-3)
    assert len(found) <= most + 1


def test_chunks_and_prefix_hits(tiny: LoadedModel, small: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (first,) = small.generate(TEXT, plain, use_tqdm=False)
    (again,) = small.generate(TEXT, plain, use_tqdm=False)
    assert again.metrics is not None and again.metrics.num_cached_tokens > 0
    (result,) = small.generate(TEXT, BOTH, use_tqdm=False)
    # Logprobs of tokens that were found in the cache are computed all the same: nothing is taken from there.
    assert result.metrics is not None and result.metrics.num_cached_tokens == 0
    assert result.outputs[0].token_ids == first.outputs[0].token_ids == again.outputs[0].token_ids
    check(tiny, result)


def test_a_caller_may_leave_the_prefix_cache_out(small: LLM) -> None:
    skips = SamplingParams(temperature=0.0, max_tokens=2, skip_reading_prefix_cache=True)
    for _ in range(2):
        (result,) = small.generate(TEXT, skips, use_tqdm=False)
        assert result.metrics is not None and result.metrics.num_cached_tokens == 0


def test_preemption_and_several_choices(tiny: LoadedModel, small: LLM) -> None:
    several = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    fill = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    before = small.core.stats().preemptions
    results = small.generate([*FILLERS, TEXT], [fill] * len(FILLERS) + [several], use_tqdm=False)
    assert small.core.stats().preemptions > before
    for result in results:
        check(tiny, result)


def test_a_prompt_of_one_token(tiny: LoadedModel, small: LLM) -> None:
    (result,) = small.generate([[7]], BOTH, use_tqdm=False)
    assert result.prompt_logprobs == [None]
    check(tiny, result)
