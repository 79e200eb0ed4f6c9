"""Logits of every computed token against transformers in float32, over the ways in which a sequence can be computed."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from worker_harness import GREEDY, LoadedModel, Session, plan

from kvern_engine.core.plan import AddedRow, RowSampling
from kvern_kernels import rotary

TOLERANCE = 1e-3
TEXTS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    "was upon the face of the deep. And the Spirit of God moved upon the face of the waters.",
    "And he said unto them, Go ye into all the world",
    "The LORD is my shepherd; I shall not want.",
)


@pytest.fixture(params=["tiny", "smol"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param)


def prompt(model: LoadedModel, index: int, length: int) -> list[int]:
    ids = model.tokenizer.encode(TEXTS[index], add_special_tokens=False)
    return (ids * (length // len(ids) + 1))[:length]


def lives(model: LoadedModel) -> Session:
    """A session in which rows are chunked, batched, preempted and resumed, share prefixes and are forked."""
    run = Session(model)
    long, short = prompt(model, 0, 53), prompt(model, 1, 13)
    # Chunks that end inside and at the end of a block, beside another row's prompt and decodes.
    run.run([(0, 0, 7, False)], added=[run.add(0, long, [5, 9, 3, 12])])
    run.run([(0, 7, 25, False), (1, 0, 13, True)], added=[run.add(1, short, [7])])
    run.run([(0, 32, 21, True), (1, 13, 1, True)])
    run.run([(1, 14, 1, True), (0, 53, 1, True)])
    run.run([(0, 54, 1, True), (1, 15, 1, True)])
    run.run([(0, 55, 1, True), (1, 16, 1, True)], edits=[(1, 1, [20])])
    # Row 0 is preempted; it comes back as row 4 with other blocks and computes everything again, in two chunks.
    kept = run.tokens[0]
    back = AddedRow(4, "request-0", kept, 53, [30, 31, 32, 33], GREEDY)
    run.run([(1, 17, 1, True)], removed=[0])
    run.run([(4, 0, 40, False), (1, 18, 1, True)], added=[back])
    run.run([(4, 40, len(kept) - 40, True), (1, 19, 1, True)])
    # A prompt that begins with two full blocks of row 4: only the rest is computed.
    shared = kept[:32] + prompt(model, 2, 9)
    run.run([(2, 32, 9, True), (4, len(kept), 1, True)], added=[run.add(2, shared, [30, 31, 40])])
    # Row 1 is forked: the full block is shared, the partial one copied; then the two go different ways.
    parent = run.tokens[1]
    hot = RowSampling(seed=11, temperature=5.0)
    child = AddedRow(3, "request-1b", list(parent), 13, [7, 41], hot)
    last = len(parent) - 1
    run.run([(1, last, 1, True), (3, last, 1, True), (2, 41, 1, True)], added=[child], copies=[(20, 41)])
    for step in range(1, 4):
        run.run([(3, last + step, 1, True), (1, last + step, 1, True), (2, 41 + step, 1, True)])
    assert run.tokens[1] != run.tokens[3], "parent and child must differ, or the copy proves nothing"
    return run


def test_logits_equal_transformers(model: LoadedModel) -> None:
    run = lives(model)
    assert len(run.plans) == 14
    assert run.worst() < TOLERANCE


def test_a_wrong_block_shows(tiny: LoadedModel) -> None:
    """The comparison can fail: a block table that points elsewhere is far outside the tolerance."""
    run = Session(tiny)
    ids = prompt(tiny, 0, 40)
    run.run([(0, 0, 32, False)], added=[run.add(0, ids, [1, 2, 3])])
    assert run.worst() < TOLERANCE
    run.run([(0, 32, 8, True)], edits=[(0, 0, [50])])
    assert run.worst() > 100 * TOLERANCE


def test_the_next_step_needs_no_read_back(tiny: LoadedModel) -> None:
    """Four steps are launched before the first result is read; tokens are those of one step at a time."""
    from worker_harness import plan

    ids = prompt(tiny, 1, 10)
    one = Session(tiny)
    one.run([(0, 0, 10, True)], added=[one.add(0, ids, [4])])
    for start in range(10, 13):
        one.run([(0, start, 1, True)])
    tiny.worker.reset()
    first = plan(0, [(0, 0, 10, True)], added=[one.add(0, ids, [8])])
    rest = [plan(1 + n, [(0, 10 + n, 1, True)]) for n in range(3)]
    pending = [tiny.worker.execute(made) for made in (first, *rest)]
    assert [p.result().tokens for p in pending] == [[[token]] for token in one.tokens[0][10:]]


REPLAY = """
import sys, msgspec, torch
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import StepPlan
from kvern_engine.worker import create_worker
spec, plans, out = sys.argv[1:]
worker = create_worker(EngineConfig(model=spec, device="cpu", num_gpu_blocks_override=64, max_num_seqs=8))
worker.load()
with open(plans, "rb") as file:
    steps = msgspec.msgpack.decode(file.read(), type=list[StepPlan])
pending = [worker.execute(step, return_logits=True) for step in steps]
torch.save([(p.result().tokens, p.logits) for p in pending], out)
"""


def test_plans_replayed_in_another_process_give_equal_logits(tiny: LoadedModel, tmp_path: Path) -> None:
    run = lives(tiny)
    plans, out = tmp_path / "plans", tmp_path / "out"
    plans.write_bytes(msgspec.msgpack.encode(run.plans))
    subprocess.run([sys.executable, "-c", REPLAY, tiny.spec, plans, out], check=True, timeout=120)
    replayed = torch.load(out)  # noqa: TID251 - a file of its own
    assert len(replayed) == len(run.plans)
    for (_, theirs), ours in zip(replayed, run.logits, strict=True):
        assert theirs.keys() == ours.keys()
        for row in ours:
            assert torch.equal(theirs[row], ours[row])


def test_france(smol: LoadedModel) -> None:
    """The chat format, greedy: Paris."""
    text = smol.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = smol.tokenizer.encode(text, add_special_tokens=False)
    run = Session(smol)
    run.run([(0, 0, len(ids), True)], added=[run.add(0, ids, [0, 1, 2, 3])])
    while run.tokens[0][-1] not in smol.tokenizer.eos_token_ids and len(run.tokens[0]) < 63:
        run.run([(0, len(run.tokens[0]) - 1, 1, True)])
    assert smol.tokenizer.decode(run.tokens[0][len(ids) :]).strip() == "The capital of France is Paris."
    assert run.worst() < TOLERANCE


def test_what_nobody_samples_from_is_not_computed_in_the_last_layer(model: LoadedModel) -> None:
    """The same plans without a look at all logits: only the tokens behind which a row samples go through all layers."""
    plans = lives(model).plans
    results = []
    for everything in (True, False):
        model.worker.reset()
        steps = [model.worker.execute(step, return_logits=everything).result() for step in plans]
        results.append([(step.rows, step.tokens) for step in steps])
    assert results[0] == results[1]


def test_layers_share_what_positions_and_slots_decide(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles and write slots are looked up once a step, not once a layer."""
    made = []
    of = rotary._Rows.of
    monkeypatch.setattr(rotary._Rows, "of", lambda *arguments: made.append(1) or of(*arguments))
    run = Session(tiny)
    run.run([(0, 0, 20, True)], added=[run.add(0, prompt(tiny, 0, 20), [1, 2])])
    run.run([(0, 20, 1, True)])
    assert len(made) == 2
    assert run.worst() < TOLERANCE


def test_wanted_hidden_states_are_those_of_the_whole_step(tiny: LoadedModel) -> None:
    run = Session(tiny)
    runner = tiny.worker.runner
    assert runner is not None
    added = [run.add(0, prompt(tiny, 0, 40), [1, 2, 3]), run.add(1, prompt(tiny, 1, 9), [4])]
    steps = [
        plan(0, [(0, 0, 20, False), (1, 0, 9, True)], added=added),
        plan(1, [(1, 9, 1, True), (0, 20, 20, True)]),
        plan(2, [(0, 40, 1, False)]),
    ]
    for step in steps:
        batch = runner._builder.build(step, runner.tables.apply(step))
        with torch.inference_mode():
            every = tiny.worker.model.forward(batch.token_ids, batch.positions, runner.arena, batch.meta)
            assert batch.wanted is not None or all(step.samples)
            some = tiny.worker.model.forward(batch.token_ids, batch.positions, runner.arena, batch.meta, batch.wanted)
        if batch.wanted is not None:
            assert len(some) == sum(step.samples)
            torch.testing.assert_close(some, every[batch.wanted.index], atol=1e-5, rtol=1e-5)
