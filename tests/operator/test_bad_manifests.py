"""The manifests that the API server refuses in the end-to-end tests: the loader refuses the same ones.

e2e/test_7_bad_manifests.py asks a real API server; here the models do, so that `kvern up` and `kubectl apply` agree.
"""

from pathlib import Path

import pytest
import yaml

from kvern_operator.api.load import ManifestError, parse_service

FILE = Path(__file__).parents[2] / "e2e" / "manifests" / "bad.yaml"
BAD = yaml.safe_load(FILE.read_text())


def document(case: dict, spec: dict) -> dict:
    full = {k: v for k, v in {"model": {"uri": "builtin://tiny-kjv"}, **spec}.items() if v is not None}
    metadata = case.get("metadata", {"name": case["name"][:40].rstrip("-")})
    return {"apiVersion": "kvern.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": full}


@pytest.mark.parametrize("case", [c for c in BAD if "loader" not in c], ids=lambda c: c["name"])
def test_the_loader_refuses_it_too(case):
    with pytest.raises(ManifestError) as refused:
        parse_service(document(case, case["spec"]))
    assert len(refused.value.problems) <= 2, "one mistake a manifest (two for the one with two flags)"


@pytest.mark.parametrize("case", [c for c in BAD if "from" in c], ids=lambda c: c["name"])
def test_what_is_applied_first_is_valid(case):
    parse_service(document(case, case["from"]))


def test_there_are_enough_of_them_and_each_says_what_would_be_right():
    assert len(BAD) >= 20 and len({c["name"] for c in BAD}) == len(BAD)
    assert all(c["says"] and set(c) <= {"name", "spec", "says", "metadata", "from", "loader"} for c in BAD)
