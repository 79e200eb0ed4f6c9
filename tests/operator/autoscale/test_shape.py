"""Tensor sizes before any pod has run: from the model's shape, as its download tells, and the memory of the card."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lonely import LonelyAutoscaler

from kvern_operator.api.load import load_text
from kvern_operator.api.status import CacheStatus, InferenceServiceStatus, ModelShape, ParallelismStatus
from kvern_operator.autoscale.layout import Look, Sizes, State, plan
from kvern_operator.autoscale.shape import card_bytes, expected
from kvern_operator.autoscale.subject import subject_of
from kvern_operator.autoscale.terms import Limits, View
from kvern_operator.desired.layout import target_layout
from kvern_operator.events import news
from kvern_operator.observed import Observed

SEVENTY = CacheStatus(
    phase="Ready",
    total=141_000_000_000,
    shape=ModelShape(layers=80, heads=64, kv_heads=8, head_dim=128, max_model_len=8192),
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ("team", "large")


def service(tensor: str = "mode: Auto", resources: str = "gpuType: NVIDIA-H100-80GB-HBM3", more: str = ""):
    return load_text(f"""
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {{name: large, namespace: team, uid: u1}}
spec:
  model: {{uri: hf://org/large}}
  cache: {{claimName: c}}
  resources: {{gpusPerPod: 8, {resources}}}
  parallelism: {{tensor: {{{tensor}}}}}
  {more}
""")


def sizes(found) -> dict[int, int]:
    return dict(found.kv)


@pytest.mark.parametrize(
    ("product", "gigabytes"),
    [
        ("NVIDIA-H200", 141),
        ("NVIDIA-H100-80GB-HBM3", 80),
        ("NVIDIA-H100-NVL", 94),
        ("NVIDIA-A100-SXM4-40GB", 40),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 5),
        ("NVIDIA-GH200-480GB", 96),  # 480 are the processor's
        ("NVIDIA-L4", 24),
        ("NVIDIA-L40S", 48),
        ("NVIDIA-L40S-SHARED", 48),
        ("Tesla-T4", 16),
        ("Tesla-V100-SXM2-32GB", 32),
    ],
)
def test_the_memory_of_a_card_by_its_name(product, gigabytes):
    assert card_bytes(product) == gigabytes * 1e9


def test_a_card_that_nobody_knows():
    assert card_bytes("ACME-9000") is None
    assert expected(service(resources="gpuType: ACME-9000").spec, SEVENTY).unknown == (
        "how much memory a ACME-9000 has is not known"
    )


def test_what_seventy_billion_weights_leave_of_eight_cards():
    """141 GB of weights: one card of 80 GB holds them never, two hardly, four and eight well."""
    found = sizes(expected(service().spec, SEVENTY))
    assert found[1] == 0 and found[2] == 0
    assert 400_000 < found[4] < found[8] < 1_500_000
    halved = sizes(expected(service(more="engine: {quantization: fp8}").spec, SEVENTY))
    assert halved[1] == 0 and halved[2] > 0 and halved[4] > found[4]
    twice = sizes(expected(service(more="engine: {kvCacheDtype: fp8}").spec, SEVENTY))
    assert twice[8] == pytest.approx(2 * found[8], rel=1e-3)
    staged = sizes(expected(service("mode: Auto}, pipeline: {size: 2").spec, SEVENTY))
    assert set(staged) == {1, 2, 4} and staged[2] > 0  # 2 x 2 devices hold it


@pytest.mark.parametrize(
    ("svc", "cache", "words"),
    [
        (service(resources="cpu: '4'"), SEVENTY, "resources.gpuType does not name the card"),
        (service(), CacheStatus(), "before its download into spec.cache has ended"),
        (service(), CacheStatus(phase="Ready", total=10), "before its download into spec.cache has ended"),
    ],
)
def test_what_it_waits_for_is_said(svc, cache, words):
    found = expected(svc.spec, cache)
    assert found.kv == () and words in found.unknown
    made, state = plan(Sizes("Auto"), Limits(gpus=8), View(0.0, 1), look(found), State(8))
    assert not made.changed and state.size == 8
    assert made.reason.startswith("no pod has run yet, and ") and words in made.reason


def look(found, **more: object) -> Look:
    return Look(0.0, None, 8, (), expected=found.kv, unknown=found.unknown, **more)  # type: ignore[arg-type]


def early(size: int, mode: str = "Auto", low: int = 1, high: int = 8):
    found = expected(service().spec, SEVENTY)
    return plan(Sizes(mode, low, high), Limits(gpus=8), View(0.0, 1), look(found), State(size))


def test_a_size_that_cannot_hold_the_model_gives_way_to_the_next_larger_one():
    made, state = early(1)
    assert (made.changed, made.target, state.size, state.phase) == (True, 4, 4, "Stable")
    assert "the model does not fit" in made.reason and "fits at size 4" in made.reason
    assert state.changes == ()  # nothing ran: nothing has been changed
    again, same = early(state.size)
    assert (again.changed, same.size) == (False, 4) and "fits at size 4, beside" in again.reason


def test_a_size_that_fits_stays_and_bounds_are_kept():
    assert not early(8)[0].changed
    made, state = early(1, high=2)
    assert (made.changed, state.size) == (False, 1) and "no other size fits" in made.reason
    made, state = early(1, low=8)
    assert state.size == 8


def test_recommend_says_it_and_changes_nothing():
    made, state = early(1, "Recommend")
    assert (made.changed, made.target, made.recommended, state.size) == (False, 1, 4, 1)


@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 8), st.integers(1, 8), st.dictionaries(
    st.sampled_from([1, 2, 4, 8]), st.integers(0, 10**6)))  # fmt: skip
def test_an_early_choice_is_one_that_fits_or_none(size, low, high, kv):
    seen = Look(0.0, None, 8, (), expected=tuple(kv.items()))
    made, state = plan(Sizes("Auto", low, high), Limits(gpus=8), View(0.0, 1), seen, State(size))
    if made.changed:
        assert low <= state.size <= high and kv[state.size] > 0 and state.size != size
        assert not (low <= size <= high and kv.get(size))
        assert not plan(Sizes("Auto", low, high), Limits(gpus=8), View(0.0, 1), seen, state)[0].changed
    else:
        assert state.size == size


def test_what_pods_say_takes_the_place_of_the_estimate():
    seen = replace(look(expected(service().spec, SEVENTY)), kv=((1, 1000),))
    made, _ = plan(Sizes("Auto"), Limits(gpus=8), View(0.0, 1), seen, State(1))
    assert not made.changed and "are missing" in made.reason


async def cycle(svc, status: InferenceServiceStatus) -> InferenceServiceStatus:
    loop = LonelyAutoscaler(NOW)
    loop.watch(KEY, subject_of(svc, Observed(), [], status, NOW), status)
    await loop.cycle()
    return loop.record(KEY, svc, status, NOW)


async def test_through_the_loop_replicas_are_made_with_a_size_that_fits():
    svc = service("mode: Auto, size: 1")
    status = InferenceServiceStatus(cache=SEVENTY, parallelism=ParallelismStatus(target=1))
    assert target_layout(svc.spec, status).tensor == 1
    status = await cycle(svc, status)
    assert target_layout(svc.spec, status).tensor == 4
    (event,) = news(InferenceServiceStatus(cache=SEVENTY), status, [])
    assert event.reason == "LayoutChange" and event.note.startswith("tensor size 1 -> 4: no pod has run yet; size 1: ")
    said = status.parallelism.last_decision
    assert (said.from_, said.to) == (1, 4) and status.parallelism.history == [said]
    assert [(o.size, bool(o.why_not)) for o in said.options] == [(1, True), (2, True), (4, False), (8, False)]
    again = await cycle(svc, status)
    assert target_layout(svc.spec, again).tensor == 4 and again.parallelism.history == [said]


async def test_through_the_loop_a_size_that_fits_is_left_to_the_spec():
    """No record of the planner's is made of it: whoever edits the size before anything runs is obeyed."""
    svc, status = service(), InferenceServiceStatus(cache=SEVENTY)
    status = await cycle(svc, status)
    assert status.parallelism.plan is None and "fits at size 8" in status.parallelism.last_decision.reason
    assert await cycle(svc, status) == status  # said once
    edited = service("mode: Auto, size: 4")
    assert target_layout(edited.spec, status).tensor == 4


async def test_through_the_loop_it_says_what_it_waits_for():
    status = await cycle(service(), InferenceServiceStatus())
    assert status.parallelism.plan is None
    assert "its download into spec.cache has ended" in status.parallelism.last_decision.reason
