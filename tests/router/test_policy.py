"""Properties of the choice of a replica and of the key it goes by."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_router.policy import Policy, choose, load_bound, prefix_key, replica_seed, request_key, session_key

KEYS = st.integers(0, 2**64 - 1)


@dataclass
class Cand:
    name: str
    weight: float = 1.0
    inflight: int = 0

    @property
    def seed(self) -> int:
        return replica_seed(self.name)


def names(n: int) -> list[Cand]:
    return [Cand(f"svc-{i}") for i in range(n)]


FLEETS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 3.5]), st.integers(0, 50)), min_size=1, max_size=12).map(
    lambda rows: [Cand(f"svc-{i}", w, n) for i, (w, n) in enumerate(rows)]
)


@given(FLEETS, KEYS, st.randoms(), st.sampled_from(list(Policy)))
def test_two_routers_agree_whatever_the_order_of_their_lists(
    fleet: list[Cand], key: int, rng: random.Random, policy: Policy
) -> None:
    other = list(fleet)
    rng.shuffle(other)
    assert choose(policy, fleet, key, tie=7) is choose(policy, other, key, tie=7)


@given(st.integers(2, 10), KEYS, st.data())
def test_a_replica_that_leaves_moves_only_its_own_keys(n: int, key: int, data: st.DataObject) -> None:
    fleet = names(n)
    before = choose(Policy.SESSION, fleet, key, 0)
    gone = data.draw(st.sampled_from(fleet))
    after = choose(Policy.SESSION, [c for c in fleet if c is not gone], key, 0)
    assert after is before or before is gone


@given(FLEETS, KEYS, st.floats(0.0, 1.0))
def test_a_replica_over_its_bound_is_passed_over_and_one_is_always_below(
    fleet: list[Cand], key: int, epsilon: float
) -> None:
    chosen = choose(Policy.PREFIX_AWARE, fleet, key, 0, epsilon)
    assert chosen is not None
    if len(fleet) > 1:
        assert chosen.inflight + 1 <= load_bound(fleet, chosen.weight, epsilon)


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 4]])
def test_one_hot_prefix_fills_replicas_up_to_the_bound_and_no_further(weights: list[float]) -> None:
    fleet = [Cand(f"svc-{i}", w) for i, w in enumerate(weights)]
    key = prefix_key(b'{"prompt": "the same for all"}')
    for placed in range(1, 401):
        chosen = choose(Policy.PREFIX_AWARE, fleet, key, 0, 0.25)
        assert chosen is not None
        chosen.inflight += 1
        for c in fleet:
            assert c.inflight <= math.ceil(1.25 * placed * c.weight / sum(weights))
    loads = sorted((c.inflight / c.weight for c in fleet), reverse=True)
    assert loads[0] > 1.2 * 400 / sum(weights), "affinity fills the first replica to the bound"


def test_keys_are_spread_in_proportion_to_weights() -> None:
    fleet = [Cand("a", 1.0), Cand("b", 2.0), Cand("c", 1.0)]
    rng = random.Random(1)
    counts = dict.fromkeys("abc", 0)
    for _ in range(8000):
        counts[choose(Policy.SESSION, fleet, rng.getrandbits(64), 0).name] += 1  # type: ignore[union-attr]
    assert counts["a"] == pytest.approx(2000, rel=0.1)
    assert counts["b"] == pytest.approx(4000, rel=0.1)


@given(FLEETS, KEYS)
def test_least_load_takes_a_least_loaded_one_by_weight(fleet: list[Cand], tie: int) -> None:
    chosen = choose(Policy.LEAST_LOAD, fleet, None, tie)
    assert chosen is not None
    assert (chosen.inflight + 1) / chosen.weight == min((c.inflight + 1) / c.weight for c in fleet)


def test_equally_loaded_replicas_share_what_has_no_key() -> None:
    rng = random.Random(2)
    chosen = {choose(Policy.PREFIX_AWARE, names(4), None, rng.getrandbits(64)).name for _ in range(200)}  # type: ignore[union-attr]
    assert len(chosen) == 4


def test_nobody_to_choose_from() -> None:
    assert choose(Policy.PREFIX_AWARE, [], 1, 1) is None


@given(st.binary(max_size=400))
def test_no_body_makes_the_key_fail(body: bytes) -> None:
    prefix_key(body)
    prefix_key(b'{"messages": [' + body)
    prefix_key(b'{"prompt": ' + body)
    session_key(None, body)


def chat(*messages: tuple[str, str], **extra: object) -> bytes:
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in messages], **extra}).encode()


@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=300), st.text(max_size=300))
def test_later_turns_of_a_conversation_have_its_key(system: str, first: str, answer: str, second: str) -> None:
    opening = chat(("system", system), ("user", first))
    later = chat(("system", system), ("user", first), ("assistant", answer), ("user", second), temperature=0.5)
    assert prefix_key(opening) == prefix_key(later) is not None


def test_conversations_have_keys_of_their_own_and_field_order_does_not_matter() -> None:
    one, two = chat(("system", "s" * 50_000), ("user", "a")), chat(("system", "s" * 50_000), ("user", "b"))
    assert prefix_key(one) != prefix_key(two)
    plain = b'{"model": "m", "stream": true, "messages" : [{"content":"hi","role":"user"}]}'
    assert prefix_key(plain) == prefix_key(chat(("user", "hi"), model="m"))
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    other = {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}]}
    assert prefix_key(json.dumps(parts).encode()) != prefix_key(json.dumps(other).encode())


def test_prompts_that_share_their_beginning_share_a_key() -> None:
    shared = "x" * 2000
    assert prefix_key(json.dumps({"prompt": shared + "a"}).encode()) == prefix_key(
        json.dumps({"prompt": shared}).encode()
    )
    assert prefix_key(b'{"prompt": [1, 2, 3]}') != prefix_key(b'{"prompt": [1, 2, 4]}')
    assert prefix_key(b'{"input": "embed me"}') is not None
    assert prefix_key(b"") is None


def test_a_session_is_the_header_or_the_user_or_else_the_prefix() -> None:
    body = chat(("user", 'a text with "user": "not me" in it'), user="me")
    assert session_key(b"s1", body) == session_key(b"s1", b"") != session_key(b"s2", b"")
    assert session_key(None, body) == session_key(None, b'{"user" : "me"}')
    nobody = chat(("user", "hi"))
    assert session_key(None, nobody) is None
    assert request_key(Policy.SESSION, None, nobody) == prefix_key(nobody)
    assert request_key(Policy.LEAST_LOAD, b"s1", body) is None


@pytest.mark.parametrize(
    "messages",
    [
        json.dumps([{"role": "user", "content": "x" * 5_000_000}]),
        "[" + " " * 250_000 + '{"role": "user"}]',
        "[" + "{}," * 80_000 + '{"role": "user"}]',
        '[{"role": "user", "content": [' + '"",' * 80_000 + '""]}]',
        "[" * 250_000,
    ],
    ids=["text", "blanks", "messages", "parts", "depth"],
)
def test_the_key_is_cheap_for_a_large_body(messages: str) -> None:
    import time

    body = f'{{"messages": {messages}}}'.encode()
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        prefix_key(body)
        best = min(best, time.process_time() - start)
    assert best < 0.01
