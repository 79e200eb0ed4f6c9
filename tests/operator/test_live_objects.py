"""Objects as the API server gives them back: what counts as a difference, what stays frozen, and for how long."""

from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, as_stored, service

from kvern_operator.apply import without_empty_maps
from kvern_operator.desired import meta
from kvern_operator.settings import Settings

OLD = Settings(operator_key=b"k", engine_image="engine:typo", operator_image="operator:typo")
NEW = Settings(operator_key=b"k", engine_image="engine:2", operator_image="operator:2")


def image(cluster: FakeCluster, kind: str, name: str) -> str:
    return cluster.objects[kind, name]["spec"]["template"]["spec"]["containers"][0]["image"]


def lose_image(cluster: FakeCluster, *components: str, reason: str = "ImagePullBackOff") -> None:
    for name, pod in cluster.pods.items():
        if pod.component in components:
            cluster.change(name, reason=reason, message="not found")


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"])
def test_an_image_that_never_came_is_not_frozen_once_the_operators_settings_are_corrected(reason):
    cluster, svc = FakeCluster(settings=OLD), service("")
    cluster.step(svc)
    lose_image(cluster, "engine", "router", reason=reason)
    assert cluster.plan(svc).empty, "nothing better is known"
    cluster.settings = NEW
    cluster.step(svc)
    assert image(cluster, "Deployment", "smol-router") == "operator:2"
    for name in ("smol-router-0", "smol-router-1"):  # as the Deployment's new pods
        cluster.change(name, reason="", message="")
    cluster.settle(svc)
    (name,) = cluster.replicas
    assert image(cluster, "StatefulSet", name) == "engine:2"
    assert cluster.status.condition("Ready").status == "True"


def test_replicas_that_serve_are_kept_while_one_beside_them_gets_the_new_image():
    cluster, svc = FakeCluster(settings=OLD), service("replicas: 2")
    cluster.step(svc)
    cluster.let_start("smol-r0-0", "smol-router-0", "smol-router-1")
    cluster.change("smol-r1-0", reason="ImagePullBackOff")  # a node that has not the image
    cluster.settings = NEW
    cluster.settle(svc)
    assert image(cluster, "StatefulSet", "smol-r0") == "engine:typo"
    assert [image(cluster, "StatefulSet", n) for n in cluster.replicas if n != "smol-r0"] == ["engine:2"]
    assert image(cluster, "Deployment", "smol-router") == "operator:typo"


def test_an_image_of_the_spec_is_no_business_of_the_operators_settings():
    for spec in (
        "engine: {image: mine}",
        "overrides: {podTemplate: {spec: {containers: [{name: engine, image: mine}]}}}",
    ):
        cluster, svc = FakeCluster(settings=OLD), service(spec)
        cluster.step(svc)
        lose_image(cluster, "engine")
        cluster.settings = NEW
        assert not [o for o in cluster.plan(svc).apply if o["kind"] == "StatefulSet"], spec


def test_what_somebody_else_changed_in_a_frozen_template_is_put_back():
    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    before = cluster.objects["StatefulSet", "smol-r0"]
    cluster.settings = replace(cluster.settings, engine_image="another:9")
    spec = before["spec"] | {"replicas": 0}
    cluster.objects["StatefulSet", "smol-r0"] = {**before, "spec": spec}
    (applied,) = cluster.plan(svc).apply
    assert applied["spec"]["replicas"] == 1
    assert applied["spec"]["template"]["spec"]["containers"][0]["image"] == image(cluster, "StatefulSet", "smol-r0")
    template = spec["template"] | {"spec": spec["template"]["spec"] | {"serviceAccountName": "root"}}
    cluster.objects["StatefulSet", "smol-r0"] = {**before, "spec": before["spec"] | {"template": template}}
    (applied,) = cluster.plan(svc).apply
    assert applied["spec"]["template"]["spec"]["serviceAccountName"] == "smol-pods"


def test_a_copy_that_somebody_has_edited_is_not_trusted_blindly():
    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    for text in ("not json", "[]", ""):
        spoiled = meta.with_annotations(cluster.objects["StatefulSet", "smol-r0"], **{meta.APPLIED: text})
        cluster.objects["StatefulSet", "smol-r0"] = spoiled
        (applied,) = cluster.plan(svc).apply
        assert applied["spec"]["template"]["spec"]["containers"][0]["command"] == ["kvern", "serve"]


@pytest.mark.parametrize(
    ("wanted", "live", "same"),
    [
        ("0.5", "500m", True),
        ("1024Mi", "1Gi", True),
        (2, "2", True),
        ("2", "2000m", True),
        ("1", "2", False),
        ("1Gi", "1G", False),
        ("", None, True),
        ([], None, True),
        ({}, None, True),
        (None, None, True),
        (0, None, False),
        (False, None, False),
        (True, 1, True),
        ("a", "b", False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ([{"a": 1}], [{"a": 1, "b": 2}], True),
    ],
)
def test_what_counts_as_the_same(wanted, live, same):
    obj = {"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"key": wanted}}
    stamped = meta.stamped(obj)
    stored = {**stamped, "data": {} if live is None else {"key": live}}
    assert meta.differs(stamped, stored) is not same


def test_a_key_that_is_not_wanted_any_more_is_a_difference():
    before = meta.stamped({"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "1", "b": "2"}})
    after = meta.stamped({"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "1"}})
    assert meta.differs(after, as_stored(before))


def test_the_admin_secret_is_left_alone_once_it_is_known_to_exist():
    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    secrets = [key for key in cluster.objects if key[0] == "Secret"]
    for key in secrets:
        del cluster.objects[key]  # nobody may read it
    assert [meta.key(o) for o in cluster.plan(svc).apply] == secrets
    seen = replace(cluster.observed(), admin_secret=True)
    from kvern_operator.reconcile import reconcile

    assert reconcile(svc, seen, cluster.now, cluster.settings).empty


def test_a_service_that_is_made_again_under_its_name_has_another_secret():
    one = service("")
    other = one.model_copy(update={"metadata": one.metadata.model_copy(update={"uid": "u-2"})})
    assert meta.admin_secret_name(one) != meta.admin_secret_name(other)


def test_a_claim_and_a_secret_are_never_deleted_by_reconcile():
    cluster = FakeCluster()
    cluster.settle(service("cache: {pvc: {size: 1Gi}}"))
    kinds = {kind for kind, _ in cluster.plan(service("", generation=2)).delete}
    assert not kinds & {"PersistentVolumeClaim", "Secret"}


def test_a_status_is_applied_without_empty_maps():
    """Server-side apply makes null of a map that `{}` empties, and the CRD refuses that (test_control_plane.py)."""
    given = {"mode": "External", "lastDecision": {"to": 2, "inputs": {}, "terms": []}, "history": [{"inputs": {}}, {}]}
    expected = {"mode": "External", "lastDecision": {"to": 2, "terms": []}, "history": [{}, {}]}
    assert without_empty_maps(given) == expected
