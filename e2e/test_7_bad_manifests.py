"""What the API server refuses, with the words that it says: the resource's schema and rules, on a real API server.

Needs no operator and no node: `e2e/cluster/apiserver.py start FOLDER` is enough. One request a manifest.
"""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kit import ROOT, CommandError, kubectl

BAD: list[dict[str, Any]] = yaml.safe_load((ROOT / "e2e" / "manifests" / "bad.yaml").read_text())
MODEL = {"uri": "builtin://tiny-kjv"}


def manifest(case: dict[str, Any], spec: dict[str, Any]) -> str:
    """The whole object; a spec without a model gets one, `model: null` is a spec that has none."""
    full = {k: v for k, v in {"model": MODEL, **spec}.items() if v is not None}
    metadata = case.get("metadata", {"name": case["name"][:40].rstrip("-")})
    return json.dumps(
        {"apiVersion": "kvern.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": full}
    )


@pytest.fixture(scope="module")
def space(crds: None) -> Iterator[str]:
    """A namespace for the few that need an older object."""
    name = f"kvern-bad-manifests-{secrets.token_hex(3)}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["name"])
def test_a_bad_manifest_is_refused_with_what_is_right(space: str, case: dict[str, Any]) -> None:
    apply = ("-n", space, "apply", "--validate=strict", "-f", "-")
    dry = () if "from" in case else ("--dry-run=server",)
    if "from" in case:
        kubectl(*apply, stdin=manifest(case, case["from"]))
    with pytest.raises(CommandError) as refused:
        kubectl(*apply, *dry, stdin=manifest(case, case["spec"]))
    for words in case["says"]:
        assert words in str(refused.value)


def test_what_is_right_is_taken(space: str) -> None:
    """So that the refusals above are not of something else."""
    good = {"name": "good"}
    said = kubectl("-n", space, "apply", "--dry-run=server", "-f", "-", stdin=manifest(good, {}))
    assert "created" in said


def test_explain_describes_every_field(crds: None) -> None:
    """kubectl explain reads the descriptions that the API server publishes."""
    for path, words in (
        ("infs.spec", "What is served."),
        ("infs.spec.parallelism.tensor.size", "Tensor-parallel size."),
        ("infs.spec.rollout.maxSurge", "Replicas above the desired number"),
        ("infs.status.conditions", "Observations"),
    ):
        assert words in kubectl("explain", path), path
    assert "<no description>" not in kubectl("explain", "infs", "--recursive")
