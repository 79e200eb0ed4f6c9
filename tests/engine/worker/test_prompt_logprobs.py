"""Logprobs of prompt tokens: over chunks, in batches, in pieces of bounded size."""

import pytest
import torch
from worker_harness import GREEDY, FixedRunner, LoadedModel, Session, plan

from kvern_engine.core.plan import AddedRow, RowSampling, TokenLogprobs
from kvern_engine.worker import logprobs as logprobs_module

ASKS = RowSampling(seed=0, temperature=0.0, prompt_logprobs=2)


def check(model: LoadedModel, ids: list[int], found: list[TokenLogprobs], first: int = 1) -> None:
    expected = model.expected(ids).log_softmax(-1)
    for place, entry in enumerate(found, start=first):
        row = expected[place - 1]
        assert entry.token_id == ids[place]
        assert entry.logprob == pytest.approx(float(row[ids[place]]), abs=1e-3)
        assert entry.rank == int((row > row[ids[place]]).sum()) + 1
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
        assert entry.top_ids[0] == int(row.argmax())


def test_chunks_and_neighbours(tiny: LoadedModel) -> None:
    ids = tiny.tokenizer.encode("And God said, Let there be light: and there was light.", add_special_tokens=False)
    run = Session(tiny)
    added = [run.add(0, ids, [1, 2], ASKS), run.add(1, ids[:5], [3], GREEDY)]
    first = run.run([(0, 0, 6, False), (1, 0, 5, True)], added=added)
    second = run.run([(1, 5, 1, True), (0, 6, len(ids) - 6, True)])
    third = run.run([(1, 6, 1, True), (0, len(ids), 1, True)])
    assert first.prompt_logprobs.keys() == second.prompt_logprobs.keys() == {0}
    assert third.prompt_logprobs == {}
    assert (len(first.prompt_logprobs[0]), len(second.prompt_logprobs[0])) == (6, len(ids) - 7)
    check(tiny, ids, first.prompt_logprobs[0] + second.prompt_logprobs[0])


def test_pieces_of_bounded_size_give_the_same(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny.tokenizer.encode("The LORD is my shepherd; I shall not want.", add_special_tokens=False)

    def run() -> list[TokenLogprobs]:
        session = Session(tiny)
        return session.run([(0, 0, len(ids), True)], added=[session.add(0, ids, [1], ASKS)]).prompt_logprobs[0]

    whole = run()
    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 3 * 4 * tiny.worker.tables.vocab_size)
    pieces = run()
    assert len(whole) == len(pieces) == len(ids) - 1
    for one, other in zip(whole, pieces, strict=True):
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_rows_that_want_different_numbers() -> None:
    runner = FixedRunner(torch.tensor([0.0, 3.0, 1.0, 2.0]))
    added = [
        AddedRow(0, "a", [0, 1, 2], 3, [0], RowSampling(seed=0, temperature=0.0, prompt_logprobs=1)),
        AddedRow(1, "b", [3], 1, [0], RowSampling(seed=0, temperature=0.0, prompt_logprobs=4)),
        AddedRow(2, "c", [2, 3], 2, [0], RowSampling(seed=0, temperature=0.0, prompt_logprobs=3)),
    ]
    steps = plan(0, [(0, 0, 3, True), (1, 0, 1, True), (2, 0, 2, True)], added=added)
    found = runner.runner.execute(steps).result().prompt_logprobs
    assert {row: [(e.token_id, e.rank, e.top_ids) for e in entries] for row, entries in found.items()} == {
        0: [(1, 1, [1]), (2, 3, [1])],
        2: [(3, 2, [1, 3, 2])],
    }


def test_a_position_has_the_same_numbers_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, with as many others as memory allows at once, or some of a batch alone."""
    logits = torch.randn(37, 5003, generator=torch.Generator().manual_seed(1)) * 3
    tokens = torch.arange(37) * 100
    whole = logprobs_module.compute_logprobs(logits, tokens, 4)
    assert whole.logprobs.tolist() == pytest.approx(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist())
    sizes = []
    compute = logprobs_module._compute

    def counted(part: torch.Tensor, *rest: object) -> object:
        sizes.append(part.shape[0])
        return compute(part, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 5 * 4 * 5003)
    monkeypatch.setattr(logprobs_module, "_compute", counted)
    pieces = logprobs_module.compute_logprobs(logits, tokens, 4)
    index = torch.tensor([3, 36, 11, 12, 13, 20, 21])
    some = logprobs_module.compute_logprobs(logits, tokens, 4, index)
    assert max(sizes) == 5
    for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name
        assert torch.equal(getattr(whole, name)[index], getattr(some, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_alternatives_the_first(dtype: torch.dtype) -> None:
    """Whatever the number asked for: 16-bit logits have many ties."""
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[0] = 0.5
    logits[1, 100:200] = 9.0
    logits[2, 7] = float("-inf")
    tokens = logits.argmax(dim=-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for count in (0, 1, 2, 5, 50):
        found = logprobs_module.compute_logprobs(logits, tokens, count)
        assert torch.equal(found.top_ids, order[:, :count])
        assert (found.top_logprobs.diff(dim=-1) <= 0).all()
