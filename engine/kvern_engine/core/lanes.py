"""Micro-batches: the decoding sequences of an engine in as many lanes as the pipeline has stages.

With one stage there is one lane, which holds them all. With p stages each lane's step is followed by those of the
others, so that p steps are on their way through the stages at once; a sequence is in one lane, so it is not computed
again before its last token is there (micro-batches of GPipe, arXiv 1811.06965, in turns as in PipeDream-Flush).

Pure: who decodes is decided in `scheduler.py`; here, whose turn it is and that lanes are of equal length.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvern_engine.core.sequence import Sequence, State


class Lane:
    """Sequences that decode in the same steps. `last_step` is the newest plan it was in, -1 before the first.

    Lists handed to a plan are replaced, never changed in place. `due`: those whose `limit` is reached, seen before the
    lane's next step is planned. `joining`: those that decode from its next step on.
    """

    __slots__ = ("changed", "decodes", "due", "joining", "last_step", "rows")

    def __init__(self) -> None:
        self.decodes: list[Sequence] = []
        self.rows: list[int] = []
        self.due: list[Sequence] = []
        self.joining: list[Sequence] = []
        self.changed = False
        self.last_step = -1

    def refresh(self) -> None:
        """Make `decodes` and `rows` current."""
        if self.changed:
            self.decodes = [seq for seq in self.decodes if seq.state is State.DECODE]
            self.decodes += [seq for seq in self.joining if seq.state is State.DECODE]
            self.rows = [seq.row for seq in self.decodes]
            self.joining = []
            self.changed = False

    def join(self, seq: Sequence) -> None:
        seq.lane = self
        if seq.num_computed == seq.limit:
            self.due.append(seq)
        self.joining.append(seq)
        self.changed = True

    def leave(self, seq: Sequence) -> None:
        """A sequence no longer decodes here (its state says so at the next refresh)."""
        if seq.num_computed == seq.limit and seq in self.due:
            self.due.remove(seq)
        self.changed = True


def whose_turn(lanes: Items[Lane], step: int, oldest_in_flight: int) -> Lane:
    """The lane of plan `step`: of those that may be computed the one that has waited longest, with decodes if there is
    one; an empty lane takes prompts. `oldest_in_flight`: the first step whose result is not known (`step`: none).

    A lane may be computed again once as many steps as there are stages lie behind its last one, or its result is known.
    Some lane always may: of p lanes at most p - 1 were in the last p - 1 steps. Lanes must be fresh (`Lane.refresh`).
    """
    ready = [lane for lane in lanes if lane.last_step <= step - len(lanes) or lane.last_step < oldest_in_flight]
    return min(ready, key=lambda lane: (not lane.decodes, lane.last_step))


def even_out(lane: Lane, lanes: Iterable[Lane]) -> None:
    """Move what `lane` has beyond its share to shorter ones, newest first. Lanes must be fresh, and are afterwards.

    To be called in the lane's turn, when it may be computed: then those that move may be computed later as well.
    """
    others = [other for other in lanes if other is not lane]
    total = len(lane.decodes) + sum(len(other.decodes) for other in others)
    share = -(-total // (len(others) + 1))
    if len(lane.decodes) <= share:
        return
    staying, moving = lane.decodes[:share], lane.decodes[share:]
    due = {id(seq) for seq in lane.due}
    lane.decodes, lane.rows = staying, lane.rows[:share]
    moved = set()
    for other in sorted(others, key=lambda other: len(other.decodes)):
        room = max(0, share - len(other.decodes))
        for seq in moving[:room]:
            seq.lane = other
            other.joining.append(seq)
            if id(seq) in due:
                other.due.append(seq)
            moved.add(id(seq))
            other.changed = True
        moving = moving[room:]
        other.refresh()
    if not due.isdisjoint(moved):
        lane.due = [seq for seq in lane.due if id(seq) not in moved]
