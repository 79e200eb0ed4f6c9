"""`batch_invariant` on a GPU: tokens and logprobs of a request to the last bit, alone, among others, in chunks, behind
a prefix hit and computed again after a preemption."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import LLAMA

from kvern_engine import LLM, SamplingParams
from kvern_engine.outputs import RequestOutput

NUMBERS = torch.randint(10, 31000, (40, 900), generator=torch.Generator().manual_seed(4)).tolist()
MINE = {"prompt_token_ids": NUMBERS[0][:700]}
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=4, detokenize=False),
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=2, detokenize=False),
    SamplingParams(temperature=1.1, top_p=0.9, seed=5, n=2, max_tokens=24, logprobs=2, detokenize=False),
]


@contextmanager
def engine(folder: Path, **config: Any) -> Iterator[LLM]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    settings = {"device": "cuda", "load_format": "dummy", "batch_invariant": True, "num_gpu_blocks_override": 2000}
    settings |= {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 1024}
    with LLM(str(folder), **{**settings, **config}) as llm:
        yield llm
    torch.cuda.empty_cache()


def answers(llm: LLM, beside: int, first: bool = True) -> list[Any]:
    """Of ASKED, among `beside` other requests: tokens and numbers as they are."""
    mine, others = (
        [MINE] * len(ASKED),
        [{"prompt_token_ids": NUMBERS[i + 1][: 3 + 37 * i % 800]} for i in range(beside)],
    )
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=5 + 7 * i % 40, ignore_eos=True, detokenize=False)
        for i in range(beside)
    ]
    if first:
        results = llm.generate(mine + others, [*ASKED, *params], use_tqdm=False)[: len(ASKED)]
    else:
        results = llm.generate(others + mine, [*params, *ASKED], use_tqdm=False)[-len(ASKED) :]
    return [exact(result) for result in results]


def exact(result: RequestOutput) -> Any:
    """Tokens and numbers as they are."""
    return [c.token_ids for c in result.outputs], [c.logprobs for c in result.outputs], result.prompt_logprobs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_rank_and_two(tmp_path: Path, dtype: str) -> None:
    with engine(tmp_path, dtype=dtype) as llm:
        alone = answers(llm, 0)
    with engine(tmp_path, dtype=dtype, tensor_parallel_size=2) as llm:
        assert answers(llm, 20) == alone


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}],
    ids=["bfloat16", "float32", "fp8"],
)
def test_neighbours_chunks_hits_and_preemptions(tmp_path: Path, changes: dict[str, Any]) -> None:
    with engine(tmp_path, **changes) as llm:
        alone = answers(llm, 0)
        assert answers(llm, 0) == alone  # behind its own prefix
        assert answers(llm, 20) == alone
        assert answers(llm, 29, first=False) == alone
    with engine(tmp_path, max_num_batched_tokens=100, **changes) as llm:
        assert answers(llm, 9) == alone
    fill = [SamplingParams(seed=i, max_tokens=200, ignore_eos=True, detokenize=False) for i in range(20)]
    short = [{"prompt_token_ids": NUMBERS[i][:20]} for i in range(20)]
    with engine(tmp_path, num_gpu_blocks_override=200, enable_prefix_caching=False, **changes) as llm:
        results = llm.generate(short + [MINE] * len(ASKED), [*fill, *ASKED], use_tqdm=False)[len(fill) :]
        assert [exact(result) for result in results] == alone
        assert llm.core.stats().preemptions > 0
