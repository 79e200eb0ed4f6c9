"""`--kv-cache-dtype fp8` on a CPU: what it costs in the logits, what it saves, that chunks and hits change nothing."""

import logging

import pytest
import torch
from worker_harness import GREEDY, plan

from kvern_engine import LLM, SamplingParams
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow
from kvern_engine.worker import limits
from kvern_engine.worker.worker import Worker
from kvern_kernels import AttentionMetadata, attention, cpu_attention
from kvern_kernels.fp8 import FP8

IDS = [(7 * i * i + 3) % 2000 for i in range(70)]


def make(spec: str, **config: object) -> Worker:
    worker = Worker(
        EngineConfig(model=spec, device="cpu", num_gpu_blocks_override=24, max_num_seqs=4, **config)  # type: ignore[arg-type]
    )
    worker.load()
    return worker


def logits(worker: Worker, cuts: list[int]) -> torch.Tensor:
    """Of the prompt IDS computed in pieces that end at `cuts`, [n, V]."""
    added, found, start = [AddedRow(0, "a", IDS, len(IDS), [5, 2, 9, 1, 7], GREEDY)], [], 0
    for step, end in enumerate(cuts):
        done = plan(step, [(0, start, end - start, end == len(IDS))], added=added if step == 0 else [])
        pending = worker.execute(done, return_logits=True)
        assert pending.logits is not None
        found.append(pending.logits[0])
        start = end
    worker.reset()
    return torch.cat(found)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_logits_are_near_those_of_a_wide_cache(tiny_path: str, name: str) -> None:
    wide = logits(make(tiny_path), [len(IDS)])
    narrow = logits(make(tiny_path, kv_cache_dtype=name), [len(IDS)])
    error = float((narrow - wide).norm() / wide.norm())
    assert 1e-4 < error < 0.05
    assert float((narrow.argmax(-1) == wide.argmax(-1)).float().mean()) > 0.85


def test_chunks_change_nothing(tiny_path: str) -> None:
    """A token of this step is read as it was stored, like one of an earlier step or of a cached prefix."""
    worker = make(tiny_path, kv_cache_dtype="fp8")
    assert worker.runner is not None and worker.runner.arena[0].dtype == FP8
    whole = logits(worker, [len(IDS)])
    torch.testing.assert_close(logits(worker, [1, 17, 18, 64, len(IDS)]), whole, rtol=2e-3, atol=2e-3)


def test_twice_the_tokens_in_the_same_memory(tiny_path: str) -> None:
    sizes = []
    for choice in ("auto", "fp8"):
        config = EngineConfig(
            model=tiny_path,
            device="cpu",
            dtype="bfloat16",
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 20,
            kv_cache_dtype=choice,  # type: ignore[arg-type]
        )
        sizes.append(Worker(config).load().num_blocks)
    assert sizes[1] == 2 * sizes[0]


def test_a_model_without_scales_is_told(tiny_path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make(tiny_path, kv_cache_dtype="fp8")
    assert "brings no scales for a KV cache in FP8" in caplog.text


def test_scales_are_found_at_start(tiny_path: str, caplog: pytest.LogCaptureFixture) -> None:
    """`calculate_kv_scales`: of the sizes that K and V have, the same at every start, and nearer to a wide cache's
    logits than scales of 1 where K and V do not fit E4M3."""
    with caplog.at_level(logging.INFO):
        worker = make(tiny_path, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert "scales of the KV cache: K " in caplog.text and "brings no scales" not in caplog.text
    found = [layer.attention.attention.kv_scales for layer in worker.model.layers]  # type: ignore[attr-defined]
    again = make(tiny_path, kv_cache_dtype="fp8", calculate_kv_scales=True)
    for layer, scales in zip(again.model.layers, found, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(layer.attention.attention.kv_scales, scales)
    wide = make(tiny_path)
    cache = logits(wide, [len(IDS)])
    assert wide.runner is not None
    error = float((logits(worker, [len(IDS)]) - cache).norm() / cache.norm())
    assert 1e-4 < error < 0.05
    assert worker.runner is not None
    layers = torch.stack(worker.runner.arena)
    stored = layers.float().abs().amax(dim=(2, 3, 4, 5))  # of the prompt above, not of that of the start
    assert (stored[:, 0] < 448).all() and (stored[:, 0] > 50).all()
    assert (stored[:, 1] < 448).all() and (stored[:, 1] > 25).all()


def test_scales_without_such_a_cache_are_told(tiny_path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make(tiny_path, calculate_kv_scales=True)
    assert "calculate_kv_scales has no effect: the KV cache is not in FP8" in caplog.text


def test_answers_with_forks_preemption_and_prefix_hits(tiny_path: str) -> None:
    """Few blocks, equal prefixes, several choices: the tokens are those of a roomy engine."""
    prompts = [{"prompt_token_ids": IDS[:48] + IDS[i : i + 4]} for i in range(5)]
    params = [SamplingParams(temperature=0.9, seed=i, n=2, max_tokens=30, ignore_eos=True) for i in range(5)]
    found = []
    for blocks in (100, 12):
        with LLM(tiny_path, device="cpu", kv_cache_dtype="fp8", num_gpu_blocks_override=blocks, max_num_seqs=8) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            found.append([[choice.token_ids for choice in out.outputs] for out in outs])
            stats = llm.core.stats()
            assert stats.prefix_hits > 0
    assert stats.preemptions > 0
    assert found[0] == found[1]


@torch.inference_mode()
def test_the_references_agree() -> None:
    """The CPU's path against the plain reference, with scales a head."""
    torch.manual_seed(1)
    meta = AttentionMetadata.build([1, 1, 12, 3], [40, 7, 30, 19], [[4, 1, 7], [2], [9, 8], [6, 5]], 16)
    scales = torch.rand(2, 2) * 0.02 + 0.01
    kv = (torch.randn(2, 2, 10, 16, 32) / scales[:, :, None, None, None]).to(FP8)
    q = torch.randn(17, 6, 32)
    expected = attention.paged_attention(q, kv, meta, 0.2, scales)
    torch.testing.assert_close(cpu_attention.paged_attention(q, kv, meta, 0.2, scales), expected, rtol=2e-4, atol=2e-4)
    wide = kv.float() * scales[:, :, None, None, None]
    torch.testing.assert_close(attention.paged_attention(q, wide, meta, 0.2), expected)
    with pytest.raises(ValueError, match=r"a KV cache in FP8 needs kv_scales of shape \(2, 2\), got none"):
        cpu_attention.paged_attention(q, kv, meta, 0.2)


def test_a_gpu_without_fp8_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype=fp8 needs a GPU of .* 8\.9 or later, this one has 8\.0; leave"
    ):
        limits.check_fp8(None, "cuda", (8, 0), "fp8")
    limits.check_fp8(None, "cuda", (9, 0), "fp8")
    limits.check_fp8(None, "cpu", None, "fp8")
