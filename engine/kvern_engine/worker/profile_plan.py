"""The largest step there can be: what a worker runs to measure its memory, and to load what it needs. No torch."""

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.request import MAX_LOGPROBS
from kvern_engine.worker import memory


def profile_plan(tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> StepPlan:
    """A step of `tokens` tokens in as many rows as there may be, all sampling with the costliest features and logprobs
    of everything, except for one (where not all rows ask for something, theirs are copied). Every block is block 0."""
    rows = min(max_num_seqs, tokens)
    each = min(max(1, tokens // rows), max_model_len)
    costly = RowSampling(
        seed=0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    samplings = [costly] * max(rows - 1, 1) + [RowSampling(seed=0)] * (rows > 1)
    blocks = [0] * memory.blocks_for(each, block_size)
    return StepPlan(
        step=0,
        removed=[],
        added=[AddedRow(row, f"profile-{row}", [0] * each, each, blocks, samplings[row]) for row in range(rows)],
        block_edits=[],
        copies=[],
        rows=list(range(rows)),
        starts=[0] * rows,
        counts=[each] * rows,
        samples=[True] * rows,
    )
