"""`batch_invariant`: the tokens and logprobs of a request to the last bit, whatever is computed beside it and in what
pieces; and seeds, which decide alone on any device."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("KVERN_CPU_THREADS", "1")

from kvern_engine import LLM, SamplingParams
from kvern_engine.outputs import RequestOutput
from kvern_engine.worker.invariant import Tiles

TINY = str(Path(__file__).parents[1] / "models_data/tiny-kjv")

FULL = os.environ.get("KVERN_TEST_FULL") == "1"
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness"
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 192, "batch_invariant": True}
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=4, prompt_logprobs=3),
    SamplingParams(seed=11, n=2, max_tokens=20, ignore_eos=True, logprobs=2, temperature=1.3, top_p=0.9),
    SamplingParams(
        seed=12,
        max_tokens=20,
        ignore_eos=True,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={5: 2.0},
        bad_words=("the", "God said"),
        min_tokens=3,
    ),
]
OTHERS = [f"{word} the LORD" + " and he said" * (i % 5) for i, word in enumerate(["Blessed is", "Then", "Praise"] * 6)]


def others(count: int) -> tuple[list[str], list[SamplingParams]]:
    kinds: list[dict[str, Any]] = [{"top_k": 7}, {"logprobs": 1}, {"temperature": 0.0}]
    params = [
        SamplingParams(seed=i, max_tokens=8 + 5 * (i % 4), ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(count)
    ]
    return OTHERS[:count], params


def answers(llm: LLM, beside: int = 0, first: bool = True) -> list[Any]:
    """What TEXT is answered, by each of ASKED: tokens and exact numbers."""
    prompts, params = others(beside)
    mine = [TEXT] * len(ASKED)
    if first:
        results = llm.generate(mine + prompts, [*ASKED, *params], use_tqdm=False)[: len(ASKED)]
    else:
        results = llm.generate(prompts + mine, [*params, *ASKED], use_tqdm=False)[-len(ASKED) :]
    return [exact(result) for result in results]


def exact(result: RequestOutput) -> Any:
    """Tokens and numbers, which are compared as they are."""
    choices = result.outputs
    return [c.token_ids for c in choices], [c.logprobs for c in choices], result.prompt_logprobs


def one_by_one(llm: LLM) -> list[Any]:
    return [exact(llm.generate(TEXT, asked, use_tqdm=False)[0]) for asked in ASKED]


@pytest.fixture(scope="module")
def roomy() -> Iterator[LLM]:
    with LLM(TINY, num_gpu_blocks_override=256, max_num_seqs=24, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(roomy: LLM) -> list[Any]:
    return one_by_one(roomy)


def test_prefix_hits_and_neighbours(roomy: LLM, alone: list[Any]) -> None:
    assert one_by_one(roomy) == alone  # behind a warm prefix cache, where prompt logprobs do not forbid it
    for count in (1, 6, 18) if FULL else (6,):
        assert answers(roomy, count) == alone
        assert answers(roomy, count, first=False) == alone


@pytest.mark.parametrize("tokens", [8, 17, 40, 64] if FULL else [17])
def test_chunks(alone: list[Any], tokens: int) -> None:
    with LLM(TINY, num_gpu_blocks_override=256, max_num_seqs=8, max_num_batched_tokens=tokens, **SIZES) as llm:
        assert one_by_one(llm) == alone
        assert answers(llm, 5) == alone


def test_preemption(alone: list[Any]) -> None:
    """Answers that were decoded are computed again as prompts are."""
    fill = [SamplingParams(seed=i, max_tokens=50, ignore_eos=True) for i in range(6)]
    with LLM(TINY, num_gpu_blocks_override=14, max_num_seqs=8, enable_prefix_caching=False, **SIZES) as llm:
        results = llm.generate([*OTHERS[:6], TEXT, TEXT, TEXT], [*fill, *ASKED], use_tqdm=False)
        assert [exact(result) for result in results[-3:]] == alone
        assert llm.core.stats().preemptions > 0


@pytest.mark.skipif(not FULL, reason="KVERN_TEST_FULL=1: processes for each rank")
@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_ranks(alone: list[Any], sizes: dict[str, Any]) -> None:
    with LLM(TINY, num_gpu_blocks_override=64, max_num_seqs=8, **SIZES, **sizes) as llm:
        own = one_by_one(llm)
        assert answers(llm, 7) == own
        # Stages compute what one rank computes; halves of a layer are added up in another order.
        assert own == alone or "tensor_parallel_size" in sizes


@pytest.mark.skipif(not FULL, reason="KVERN_TEST_FULL=1: another number of threads, a larger model")
def test_two_threads_and_a_larger_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVERN_CPU_THREADS", "2")
    try:
        llm = LLM("builtin://smollm2-135m", num_gpu_blocks_override=64, max_num_seqs=8, **SIZES)
    except ValueError as error:
        pytest.skip(str(error))
    with llm:
        own = one_by_one(llm)
        assert answers(llm, 7) == own


def test_a_machine_where_it_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Tiles.forward

    def depends_on_the_batch(self: Tiles, batch: Any, residual: Any = None) -> Any:
        return forward(self, batch, residual) * (1 + 1e-6 * len(batch.rows))

    monkeypatch.setattr(Tiles, "forward", depends_on_the_batch)
    with pytest.raises(ValueError, match="batch_invariant does not hold on cpu: the same tokens beside others"):
        LLM(TINY, num_gpu_blocks_override=64, **SIZES)


def test_more_than_two_ranks_of_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="batch-invariant with --tensor-parallel-size=4 cannot hold"):
        LLM(TINY, tensor_parallel_size=4, **SIZES)


def test_seeds_decide_alone_however_a_request_is_scheduled() -> None:
    """On the simulated device, whose tokens follow from seed and position as everywhere: alone, in chunks among others,
    under preemption, with a prefix from the cache."""
    mine = SamplingParams(n=3, seed=5, max_tokens=40, ignore_eos=True, detokenize=False)
    prompt = [list(range(10, 80))]
    found = []
    ways: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"max_num_batched_tokens": 16}, 6),
        ({"num_gpu_blocks_override": 16}, 6),
    ]
    for sizes, count in ways:
        with LLM(TINY, device="sim", sim_speed=50, max_model_len=256, max_num_seqs=8, **sizes) as llm:
            fill = [[3 + i, *range(100, 140)] for i in range(count)]
            params = [SamplingParams(seed=i, max_tokens=50, ignore_eos=True, detokenize=False) for i in range(count)]
            for _ in range(2):
                results = llm.generate(fill + prompt, [*params, mine], use_tqdm=False)
                found.append([choice.token_ids for choice in results[-1].outputs])
            preemptions = llm.core.stats().preemptions
    assert preemptions > 0
    assert all(each == found[0] for each in found) and len({tuple(tokens) for tokens in found[0]}) == 3
