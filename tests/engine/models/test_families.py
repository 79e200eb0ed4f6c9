"""Every family against transformers in float32, over what the real scheduler makes of requests: batches, chunked
prompts, shared prefixes, forks, preemption; and at every layout.

The layouts are run on a diagonal (each family at one of them); KVERN_TEST_FULL=1 runs five configurations of each
family at all of them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_families import FAMILIES, LONGEST, make_family, reference_logits
from parallel_harness import Scenario, run_scenario
from thread_ranks import run_ranks

from kvern_engine.config import EngineConfig
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.parallel.layout import Layout

TOLERANCE = 1e-3
FULL = os.environ.get("KVERN_TEST_FULL") == "1"
LAYOUTS = [Layout(1, 2, 1), Layout(1, 4, 1), Layout(1, 1, 2), Layout(1, 2, 2)]
MODELS = [(name, seed) for name in FAMILIES for seed in range(5 if FULL else 1)]
SHORT = 12  # steps of the scenario that a diagonal's layout runs


@dataclass
class Made:
    """A model of a family, what one rank made of the requests, and the token lists of which they are pieces."""

    name: str
    reference: Any
    scenario: Scenario


def config(folder: Path, layout: Layout | None = None) -> EngineConfig:
    layout = layout or Layout()
    windowed = read_model_config(resolve_model(str(folder))).window_of_all is not None  # it gives blocks back
    return EngineConfig(
        model=str(folder),
        device="cpu",
        max_num_seqs=8,
        max_num_batched_tokens=40,
        block_size=4,
        num_gpu_blocks_override=21 if windowed else 30,
        max_model_len=LONGEST,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
    )


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[1]}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    name, seed = request.param
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(name)
    reference = make_family(name, seed, folder)
    vocab = reference.config.vocab_size
    long = [(7 * i * i + 3 * i) % (vocab - 2) + 2 for i in range(70)]
    yield Made(name, reference, run_scenario(config(folder), long, fork_tokens=20))


def pieces(scenario: Scenario) -> list[tuple[list[int], int, np.ndarray]]:
    """(tokens of a row, first position, logits) of everything that was computed; the lists hold all tokens in the
    end."""
    rows: dict[int, list[int]] = {}
    found = []
    for plan, result, logits in zip(scenario.plans, scenario.results, scenario.logits, strict=True):
        for new in plan.added:
            rows[new.row] = list(new.token_ids)
        for row, start in zip(plan.rows, plan.starts, strict=True):
            found.append((rows[row], start, logits[row]))
        for row, tokens in zip(result.rows, result.tokens, strict=True):
            rows[row] += tokens
    return found


def windowed_everywhere(config: Any) -> bool:
    """All layers have a window: blocks behind it are given back, so that a pool for some of the requests of other
    models may do for all of them here, and little of a prefix is left to share."""
    everywhere = "full_attention" not in (getattr(config, "layer_types", None) or ())
    return everywhere and getattr(config, "sliding_window", None) is not None


def test_logits_equal_transformers(made: Made) -> None:
    scenario = made.scenario
    windowed = windowed_everywhere(made.reference.config)
    assert scenario.preemptions > 0 or windowed, "too many blocks: nothing was preempted"
    assert scenario.cached_tokens >= (1 if windowed else 32), "no prefix was shared"
    assert any(plan.copies for plan in scenario.plans), "no block was copied for a fork"
    assert any(1 < count < 40 for plan in scenario.plans for count in plan.counts)
    computed = pieces(scenario)
    lists = {id(tokens): tokens for tokens, *_ in computed}
    expected = dict(zip(lists, reference_logits(made.reference, list(lists.values())), strict=True))
    worst = scale = 0.0
    for tokens, start, logits in computed:
        right = expected[id(tokens)][start : start + len(logits)].numpy()
        worst, scale = max(worst, float(np.abs(logits - right).max())), max(scale, float(np.abs(right).max()))
    assert worst < TOLERANCE, f"logits differ by {worst:.2e}"
    assert scale > 1000 * TOLERANCE, "logits so small prove nothing"


def test_layouts_give_the_same(made: Made) -> None:
    diagonal = list(FAMILIES).index(made.name) % len(LAYOUTS)
    for layout in LAYOUTS if FULL else LAYOUTS[diagonal : diagonal + 1]:
        scenario, steps = made.scenario, None if FULL else SHORT
        results, logits = run_ranks(config(Path(scenario.config.model), layout), scenario.plans[:steps])
        for ours, theirs in zip(results, scenario.results[:steps], strict=True):
            assert (ours.step, ours.rows, ours.tokens) == (theirs.step, theirs.rows, theirs.tokens), str(layout)
        for mine, other in zip(logits, scenario.logits[:steps], strict=True):
            assert mine.keys() == other.keys()
            for row in mine:
                assert np.abs(mine[row].numpy() - other[row]).max() < TOLERANCE, str(layout)
