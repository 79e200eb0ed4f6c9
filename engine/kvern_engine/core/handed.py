"""What one engine core hands to the next when the layout changes: plain messages (msgspec), no behaviour.

Nothing is in flight when a core hands over: every token that was sampled is known, and what a running choice has
computed lies in its blocks. How requests and blocks are shared out is in `placement.py`, how a scheduler writes these
and reads them in `handover.py`.
"""

import msgspec

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.ipc import AddRequest


class HeldChoice(msgspec.Struct, array_like=True, frozen=True):
    """A choice that has not ended. `tokens` are those generated so far.

    `state`: waiting (in the queue; whatever it had computed is gone), deferred (will fork from a sibling) or running:
    then `blocks` hold K and V of its first `computed` tokens and have room for all known ones; -1 stands for a block
    behind the model's window.
    """

    index: int
    state: str
    tokens: list[int] = []
    blocks: list[int] = []
    computed: int = 0
    cached: int = -1  # prompt tokens found in the prefix cache when it was first let in, -1 before
    lost: int = 0  # tokens computed and thrown away
    told: bool = False  # its first output has been sent
    prompt_logprobs: list[TokenLogprobs] | None = None


class HeldRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request and those of its choices that have not ended."""

    message: AddRequest
    choices: list[HeldChoice]
    scheduled_at: float | None = None


class Handover(msgspec.Struct, array_like=True, frozen=True):
    """All that a core knows. `cached`: (digest, block) of free blocks that hold a prefix, least recently used first."""

    engine: int
    requests: list[HeldRequest]
    cached: list[tuple[bytes, int]] = []
    max_model_len: int = 0  # the longest sequence that it could hold, in tokens

    def unmoved(self) -> "Share":
        """What the same engine takes back, where nothing has become of the switch."""
        return Share(self.engine, self.requests, self.cached)


class Share(msgspec.Struct, array_like=True, frozen=True):
    """What an engine of the new layout takes over. Blocks are its own, all that are not named are free. `cached` as in
    `Handover`."""

    engine: int
    requests: list[HeldRequest]
    cached: list[tuple[bytes, int]] = []
