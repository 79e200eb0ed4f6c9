"""A namespace's GPUs among services."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.autoscale.budget import Claim, share


def test_priority_comes_first_and_minimums_before_it():
    claims = [Claim("chat", 10, 2, 1, 5, 0), Claim("batch", 0, 2, 1, 5, 0)]
    grants = share(10, claims)
    assert (grants["chat"].later, grants["batch"].later) == (4, 1)
    assert grants["chat"].words == "4 of the 5 replicas wanted fit into the namespace's 10 GPUs at its priority"


def test_equals_end_up_alike():
    grants = share(8, [Claim("a", 0, 1, 1, 9, 0), Claim("b", 0, 1, 1, 9, 0)])
    assert (grants["a"].now, grants["b"].now) == (4, 4)


def test_nothing_is_given_before_it_is_let_go():
    claims = [Claim("chat", 10, 1, 1, 6, 2), Claim("batch", 0, 1, 1, 4, 4)]
    grants = share(6, claims)
    assert (grants["chat"].now, grants["chat"].later) == (2, 5)
    assert grants["chat"].words == "5 of the 6 replicas wanted fit into the namespace's 6 GPUs at its priority"
    assert grants["batch"].now == 1  # three of its replicas drain; then chat gets their places
    later = share(6, [Claim("chat", 10, 1, 1, 6, 2), Claim("batch", 0, 1, 1, 4, 1)])
    assert later["chat"].now == 5


def test_services_on_cpus_need_none():
    assert share(1, [Claim("small", 0, 0, 1, 7, 2)])["small"].now == 7


_CLAIMS = st.lists(
    st.builds(
        Claim,
        name=st.text("abcdefgh", min_size=1, max_size=6),
        priority=st.integers(-2, 2),
        gpus=st.integers(0, 8),
        least=st.integers(0, 3),
        wanted=st.integers(0, 9),
        held=st.integers(0, 4),
    ),
    max_size=8,
    unique_by=lambda c: c.name,
)


@settings(max_examples=150, deadline=None)
@given(_CLAIMS, st.integers(0, 64))
def test_never_more_than_the_budget_and_always_the_same(claims, budget):
    grants = share(budget, claims)
    assert share(budget, list(reversed(claims))) == grants
    assert sum(grants[c.name].later * c.gpus for c in claims) <= budget
    held = sum(c.held * c.gpus for c in claims)
    # What is held while it drains counts until it is gone: only a budget that was lowered is exceeded, by nobody new.
    taken = sum(max(grants[c.name].now, c.held) * c.gpus for c in claims)
    assert taken <= max(budget, held)
    for claim in claims:
        assert grants[claim.name].now <= claim.wanted
