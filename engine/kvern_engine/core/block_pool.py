"""The pool of KV blocks: who holds which block, which free block is reused next, and which prefixes can be found again.

It knows block ids, reference counts and digests; it knows nothing of sequences, requests or tensors, and moves no
data (a copy that a fork needs is an entry in `StepPlan.copies`, made by the scheduler).

A block is *used* while its reference count is above zero. A *free* block stands in one doubly linked list, in the order
in which it will be reused: first the blocks without reusable content, then the least recently used. A free block that
still holds a published prefix is *cached*: a lookup takes it out of the middle of the list in O(1).

Prefix caching follows the hash chain of vLLM's automatic prefix caching: the digest of a full block is SHA-256 over its
parent's digest and its token ids, and the root digest covers what must not be shared between tenants (the salt). Two
different contents with one digest are out of anybody's reach, so a lookup does not compare token ids a second time.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; the scheduler checks first, so this is a fault of the caller."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by state: used + free == total, cached <= free; `evictions` counts prefixes lost to reuse since start."""

    total: int
    free: int
    cached: int
    used: int
    evictions: int


def root_digest(salt: str = "", adapter: str = "") -> bytes:
    """The parent of a sequence's first block: sequences with different salt or adapter never share a block."""
    return sha256(f"kvern-prefix\0{len(salt)}\0{salt}\0{adapter}".encode()).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block with these tokens (each 0 <= id < 2**32) behind the block with digest `parent`."""
    # Little endian on every machine: digests may travel between them.
    return sha256(parent + _packer(len(token_ids))(*token_ids)).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}I").pack


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Every operation is O(1) a block.

    Raises ValueError where a size is not positive, OutOfBlocksError from `allocate` (check `num_free` first) and
    RuntimeError where a block is released more often than it was taken.
    """

    __slots__ = (
        "_by_digest",
        "_digest",
        "_next",
        "_prev",
        "block_size",
        "enable_prefix_caching",
        "evictions",
        "num_blocks",
        "num_cached",
        "num_free",
        "ref_counts",
    )

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = num_blocks
        self.num_cached = 0
        self.evictions = 0
        self.ref_counts = [0] * num_blocks  # read by the scheduler, written here only
        self._digest: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        # Index num_blocks is the list's sentinel: its successor is reused first, its predecessor last.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, those worth least first; what prefixes they held are forgotten."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        sentinel, following, digests = self.num_blocks, self._next, self._digest
        blocks = []
        block = following[sentinel]
        for _ in range(count):
            blocks.append(block)
            self.ref_counts[block] = 1
            digest = digests[block]
            if digest is not None:
                del self._by_digest[digest]
                digests[block] = None
                self.num_cached -= 1
                self.evictions += 1
            block = following[block]
        following[sentinel] = block
        self._prev[block] = sentinel
        self.num_free -= count
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, in the order of the sequence.

        The last block becomes free first, so that tails are reused before the prefixes they hang on.
        """
        refs = self.ref_counts
        for block in reversed(blocks):
            count = refs[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            refs[block] = count
            if count == 0:
                self._append_free(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each block, whether it is used (a fork) or free (a prefix hit)."""
        refs = self.ref_counts
        for block in blocks:
            if refs[block] == 0:
                self._unlink_free(block)
            refs[block] += 1

    def make_writable(self, block: int) -> int:
        """Copy-on-write: the block itself where its holder is alone with it, else a private one in its place.

        Where the answer differs from `block`, the caller must have the contents copied before it writes.
        """
        if self.ref_counts[block] == 1:
            return block
        private = self.allocate(1)[0]
        self.ref_counts[block] -= 1
        return private

    def publish(self, block: int, digest: bytes) -> bool:
        """Let lookups find this full, used block. False where an equal one is known already: this one stays private."""
        if not self.enable_prefix_caching or digest in self._by_digest or self._digest[block] is not None:
            return False
        self._by_digest[digest] = block
        self._digest[block] = digest
        return True

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of this chain; `share` them before anything is allocated."""
        known = self._by_digest
        found: list[int] = []
        for digest in digests:
            block = known.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def known(self, digests: Iterable[bytes]) -> list[int | None]:
        """Of each digest the block that is known by it, or None."""
        return [self._by_digest.get(digest) for digest in digests]

    def cached_blocks(self) -> list[tuple[bytes, int]]:
        """(digest, block) of the free blocks that hold a prefix, least recently used first. O(free blocks)."""
        digests = [(self._digest[block], block) for block in self.free_order()] if self.num_cached else []
        return [(digest, block) for digest, block in digests if digest is not None]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free (cached), so that sharing them uses up room."""
        refs = self.ref_counts
        return sum(1 for block in blocks if refs[block] == 0)

    def stats(self) -> PoolStats:
        return PoolStats(self.num_blocks, self.num_free, self.num_cached, self.num_used, self.evictions)

    def free_order(self) -> list[int]:
        """The free blocks, next to be reused first. O(free blocks)."""
        order, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def _append_free(self, block: int) -> None:
        before = self._prev[self.num_blocks] if self._digest[block] is not None else self.num_blocks
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
        if self._digest[block] is not None:
            self.num_cached += 1

    def _unlink_free(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
        if self._digest[block] is not None:
            self.num_cached -= 1
