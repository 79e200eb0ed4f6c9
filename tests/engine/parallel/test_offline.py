"""`LLM` over several ranks, with the scheduler of that layout: the answers of one rank, whatever the layout.

An ordinary run has stages of two ranks, which is both; KVERN_TEST_FULL=1 each by itself too."""

import os
from typing import Any

import pytest

from kvern_engine import LLM, SamplingParams

FULL = os.environ.get("KVERN_TEST_FULL") == "1"
TEXTS = ["In the beginning God", "And he said unto them,", "The LORD is my", "In the beginning God created the"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, n=3, top_p=0.95, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, top_k=40, presence_penalty=0.3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=1),
]


def answers(tiny_path: str, **sizes: Any) -> tuple[list[list[list[int]]], list[list[float]]]:
    """(token ids by prompt and choice, logprobs of the first and the last prompt's)."""
    # Six sequences of up to three blocks each: they do not all fit at their longest.
    with LLM(tiny_path, device="cpu", num_gpu_blocks_override=14, max_num_seqs=8, max_model_len=128, **sizes) as llm:
        outs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    tokens = [[choice.token_ids for choice in out.outputs] for out in outs]
    own = outs[0].outputs[0]
    chosen = [entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs or [], strict=True)]
    given = [
        entry[token].logprob
        for token, entry in zip(outs[3].prompt_token_ids, outs[3].prompt_logprobs or [], strict=True)
        if entry is not None
    ]
    return tokens, [chosen, given]


@pytest.fixture(scope="module")
def alone(tiny_path: str) -> tuple[list[list[list[int]]], list[list[float]]]:
    return answers(tiny_path)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)] if FULL else [(2, 2)])
def test_the_same_answers(
    tiny_path: str, alone: Any, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVERN_DEBUG_RANKS", "1")  # all ranks of the last stage answer and are compared
    tokens, logprobs = answers(tiny_path, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    assert tokens == alone[0]
    for ours, theirs in zip(logprobs, alone[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_ranks_share_a_cache_in_fp8(tiny_path: str) -> None:
    """Each rank writes and reads its own heads by the layer's scales."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found = []
    for ranks in (1, 2):
        with LLM(
            tiny_path,
            device="cpu",
            kv_cache_dtype="fp8",
            tensor_parallel_size=ranks,
            num_gpu_blocks_override=14,
            max_num_seqs=4,
            max_model_len=128,
        ) as llm:
            found.append([out.outputs[0].token_ids for out in llm.generate(TEXTS, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_channel"] if FULL else ["fp8_per_channel"])
def test_weights_in_fp8_over_stages(tiny_path: str, quantization: str) -> None:
    """A stage hands on the sum that the next layer's norm would have made: tokens and logprobs are those of one rank to
    the last bit (stages batch rows in another way, so that this shows where that changes nothing)."""
    sizes = {"quantization": quantization, "batch_invariant": True}
    assert answers(tiny_path, pipeline_parallel_size=2, **sizes) == answers(tiny_path, **sizes)


def test_weights_in_fp8_over_stages_of_two_ranks(tiny_path: str) -> None:
    """Ranks that share a layer add up in another order, which rounds to other numbers of 8 bits now and then."""
    alone = answers(tiny_path, quantization="fp8")
    shared = answers(tiny_path, quantization="fp8", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert shared[0][0][0][0] == alone[0][0][0][0]
    assert shared[1][0][0] == pytest.approx(alone[1][0][0], abs=0.2)
