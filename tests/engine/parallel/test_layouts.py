"""The same plans at every layout: logits within 1e-3 of one rank's, the same tokens, logprobs and row tables.

The plans come from the real scheduler: shared prefixes, chunked prompts, forks, preemption, every sampling feature.
"""

from typing import Any

import numpy as np
import pytest
from parallel_harness import Ranks, Scenario, run_scenario

from kvern_engine.config import EngineConfig
from kvern_engine.parallel.layout import Layout

TOLERANCE = 1e-3
LAYOUTS = [Layout(1, 2, 1), Layout(1, 4, 1), Layout(1, 1, 2), Layout(1, 1, 4), Layout(1, 2, 2)]


def config(model: str, layout: Layout = Layout(), **fields: Any) -> EngineConfig:  # noqa: B008 - frozen
    return EngineConfig(
        model=model,
        device="cpu",
        max_num_seqs=8,
        max_num_batched_tokens=40,
        block_size=4,
        num_gpu_blocks_override=30,
        max_model_len=128,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        **fields,
    )


@pytest.fixture(scope="module", params=["tiny_path", "made_path"])
def scenario(request: pytest.FixtureRequest) -> Scenario:
    model = request.getfixturevalue(request.param)
    found = run_scenario(config(model), [(7 * i * i + 3 * i) % 500 + 2 for i in range(70)])
    assert found.preemptions > 0, "too many blocks: nothing was preempted"
    assert found.cached_tokens >= 32, "no prefix was shared"
    assert any(plan.copies for plan in found.plans), "no block was copied for a fork"
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plans_give_the_same_everywhere(scenario: Scenario, ranks: Ranks, layout: Layout) -> None:
    # Half of them where four ranks wait for each other at every sum: the other model goes through all.
    steps = len(scenario.plans) // (2 if layout.tensor == 4 and "tiny" not in scenario.config.model else 1)
    answers = ranks.run(config(scenario.config.model, layout), scenario.plans[:steps])
    assert not [answer["trace"] for answer in answers if "error" in answer]
    assert [rank for rank, answer in enumerate(answers) if answer["answers"]] == [layout.answering_rank(0)]
    assert [answer["knows"] for answer in answers] == [
        layout.coordinates(rank)[1] == layout.pipeline - 1 for rank in range(layout.world)
    ]
    for answer in answers:
        np.testing.assert_array_equal(answer["tokens"], answers[0]["tokens"], "the row tables differ between ranks")
        if answer["knows"]:
            check_logits(answer["logits"], scenario.logits[:steps])
            check_results(answer["results"], scenario.results[:steps])


def check_logits(found: list[dict[int, Any]], expected: list[dict[int, Any]]) -> None:
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        worst = max([worst, *(float(np.abs(ours[row] - theirs[row]).max()) for row in ours)])
    assert worst < TOLERANCE, f"logits differ by {worst:.2e}"


def check_results(found: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.step, ours.rows, ours.tokens) == (theirs.step, theirs.rows, theirs.tokens)
        for kind in ("logprobs", "prompt_logprobs"):
            mine, other = getattr(ours, kind), getattr(theirs, kind)
            assert mine.keys() == other.keys()
            for row in mine:
                for one, two in zip(mine[row], other[row], strict=True):
                    assert (one.token_id, one.rank, one.top_ids) == (two.token_id, two.rank, two.top_ids)
                    np.testing.assert_allclose(one.logprob, two.logprob, atol=TOLERANCE)
                    np.testing.assert_allclose(one.top_logprobs, two.top_logprobs, atol=TOLERANCE)
