"""The block pool: order of reuse, reference counts, digests, copy-on-write, and a model-based property test."""

import random
from hashlib import sha256

import pytest

from kvern_engine.core.block_pool import BlockPool, OutOfBlocksError, block_digest, root_digest


def digests(count: int, salt: str = "") -> list[bytes]:
    parent, out = root_digest(salt), []
    for index in range(count):
        parent = block_digest(parent, [index, index + 1])
        out.append(parent)
    return out


def test_digest_is_sha256_over_parent_and_little_endian_ids() -> None:
    parent = root_digest()
    expected = sha256(parent + bytes([1, 0, 0, 0, 0, 2, 0, 0])).digest()
    assert block_digest(parent, [1, 512]) == expected


def test_digest_depends_on_parent_tokens_salt_and_adapter() -> None:
    roots = {root_digest(), root_digest("a"), root_digest("", "a"), root_digest("a", "b"), root_digest("ab")}
    assert len(roots) == 5
    chained = {block_digest(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 2, 0])}
    assert len(chained) == 15


def test_salt_and_adapter_cannot_be_shifted_into_each_other() -> None:
    assert root_digest("a\0b") != root_digest("a", "b")
    assert root_digest("a\0", "b") != root_digest("a", "\0b")


def test_allocate_and_release_count() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.release(blocks)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (4, 0, 0)


def test_tails_are_reused_before_prefixes_and_empty_blocks_before_cached_ones() -> None:
    pool = BlockPool(5, 2)
    first = pool.allocate(3)
    for block, digest in zip(first, digests(3), strict=True):
        assert pool.publish(block, digest)
    pool.release(first)
    assert pool.free_order() == [3, 4, 2, 1, 0]
    assert pool.num_cached == 3
    assert pool.allocate(3) == [3, 4, 2]
    assert pool.lookup(digests(3)) == [0, 1]
    assert pool.stats().evictions == 1


def test_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, 2)
    for salt in ("old", "new"):
        block = pool.allocate(1)
        pool.publish(block[0], digests(1, salt)[0])
        pool.release(block)
    hit = pool.lookup(digests(1, "old"))
    pool.share(hit)  # used again: now the other one is the older
    pool.release(hit)
    pool.allocate(1)
    assert pool.lookup(digests(1, "old")) == hit
    assert pool.lookup(digests(1, "new")) == []


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(4)
    for block, digest in zip(blocks, digests(4), strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.share([2])
    assert pool.free_order() == [3, 1, 0]
    assert (pool.num_free, pool.num_cached, pool.ref_counts[2]) == (3, 3, 1)


def test_salts_do_not_share() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], digests(1, "tenant a")[0])
    assert pool.lookup(digests(1, "tenant a")) == blocks
    assert pool.lookup(digests(1, "tenant b")) == []


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(4, 2)
    first, second = pool.allocate(2)
    assert pool.publish(first, digests(1)[0])
    assert not pool.publish(second, digests(1)[0])
    pool.release([first, second])
    assert pool.num_cached == 1


def test_copy_on_write_only_where_shared() -> None:
    pool = BlockPool(4, 2)
    (block,) = pool.allocate(1)
    assert pool.make_writable(block) == block
    pool.share([block])
    private = pool.make_writable(block)
    assert private != block
    assert (pool.ref_counts[block], pool.ref_counts[private]) == (1, 1)


def test_caching_off_publishes_nothing() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    (block,) = pool.allocate(1)
    assert not pool.publish(block, digests(1)[0])
    pool.release([block])
    assert pool.lookup(digests(1)) == []
    assert pool.num_cached == 0


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0, 16)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockPool(4, 0)
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 2 are free"):
        pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="block 0 was released more often than it was taken"):
        pool.release(blocks)
    assert pool.num_free == 2


@pytest.mark.parametrize("seed", range(20))
def test_against_a_model(seed: int) -> None:
    """Random operations beside a model made of plain lists: same blocks, same order, same hits."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12), 2)
    free = list(range(pool.num_blocks))  # next to be reused first
    digest_of: dict[int, bytes] = {}
    refs = [0] * pool.num_blocks
    held: list[list[int]] = []
    names = digests(6, "m")
    for _ in range(400):
        action = rng.randrange(4)
        if action == 0:
            count = rng.randint(0, min(3, len(free)))
            taken, free = free[:count], free[count:]
            assert pool.allocate(count) == taken
            for block in taken:
                digest_of.pop(block, None)
                refs[block] = 1
            held.append(taken)
        elif action == 1 and held:
            blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
            for block in reversed(blocks):
                refs[block] -= 1
                if refs[block] == 0:
                    free.insert(len(free) if block in digest_of else 0, block)
        elif action == 2 and held:
            blocks = rng.choice(held)
            for block in blocks:
                name = rng.choice(names)
                fresh = name not in digest_of.values() and block not in digest_of
                assert pool.publish(block, name) == fresh
                if fresh:
                    digest_of[block] = name
        else:
            name = rng.choice(names)
            hits = [block for block, digest in digest_of.items() if digest == name]
            assert pool.lookup([name]) == hits
            assert pool.num_idle(hits) == sum(1 for block in hits if block in free)
            pool.share(hits)
            for block in hits:
                refs[block] += 1
                if block in free:
                    free.remove(block)
            held.append(hits)
        assert pool.free_order() == free
        assert pool.ref_counts == refs
        assert (pool.num_free, pool.num_used) == (len(free), pool.num_blocks - len(free))
        assert pool.num_cached == sum(1 for block in free if block in digest_of)
