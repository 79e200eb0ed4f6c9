"""The tutorial and the page on operations, word for word: what a reader copies is what is run.

Last of all, since they install Kvern by themselves and take everything away. Images have the names that the charts have
by default, given to those of make e2e on the nodes.
"""

from collections.abc import Iterator
from pathlib import Path

import kit
import nodes
import pages
import pytest
import yaml
from conftest import image_values, make_namespace_of
from kit import Client, CommandError, eventually, helm, kubectl

pytestmark = [pytest.mark.alone, pytest.mark.full, pytest.mark.timeout(1500)]
SPACE = ("-n", kit.OPERATOR_NAMESPACE)
DOCS = kit.ROOT / "docs"


@pytest.fixture(scope="module")
def bare(operator: None, client: Client) -> Iterator[None]:
    """A cluster without Kvern; afterwards the operator is as other tests want it."""
    version = yaml.safe_load((kit.ROOT / "charts/kvern/Chart.yaml").read_text())["appVersion"]
    for name in ("operator", "engine"):
        nodes.second_name(f"kvern/{name}:e2e", f"ghcr.io/kvern/{name}:{version}")
    if client.exec("sh", "-c", "command -v curl || true").strip():
        nodes.second_name("kvern/client:e2e", "curlimages/curl:8.17.0")
    everything_away()
    yield
    everything_away()
    make_namespace_of(kit.OPERATOR_NAMESPACE)
    helm("install", "kvern-crds", "charts/kvern-crds", *SPACE)
    helm("install", "kvern", "charts/kvern", *SPACE, *image_values(), "--wait", "--timeout=3m")


def everything_away() -> None:
    """No service, operator, resource or namespace of Kvern's."""
    kubectl("delete", "infs", "--all", "--all-namespaces", "--timeout=120s", timeout=130, check=False)
    for release in ("kvern", "kvern-crds"):
        helm("uninstall", release, *SPACE, "--wait", "--ignore-not-found")
    kubectl("delete", "crd", "inferenceservices.kvern.dev", "--ignore-not-found")
    kubectl("delete", "namespace", kit.OPERATOR_NAMESPACE, "--ignore-not-found", "--timeout=120s", timeout=130)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pages.workspace(tmp_path)


def test_tutorial(bare: None, client: Client, folder: Path) -> None:
    """Every command, in order; the manifest that it shows is the example's; the Python runs in a pod."""
    page = DOCS / "tutorial.md"
    answers = []
    for block in pages.blocks(page):
        if block.language == "yaml":
            shown, example = (yaml.safe_load(text) for text in (block.text, Path("examples/smollm2.yaml").read_text()))
            assert {**shown, "spec": {"replicas": 1, **shown["spec"]}} == example
        elif block.language == "python":
            answers.append(client.exec("python3", "-c", block.text))
        else:
            said = pages.run_block(block, folder)
            if "capital of France" in block.text:
                answers.append(said)
    assert len(answers) == 3 and all("Paris" in answer for answer in answers), answers
    assert not kubectl("get", "infs", "-A", "-o", "name", check=False).startswith("infer")


def test_operations(bare: None, folder: Path) -> None:
    """Every command of the page, in order, on a cluster that serves smollm2; at its end nothing is left."""
    if not kubectl("get", "crd", "inferenceservices.kvern.dev", "--ignore-not-found", "-o", "name"):
        helm("install", "kvern-crds", "charts/kvern-crds", *SPACE, "--create-namespace")
        helm("install", "kvern", "charts/kvern", *SPACE, "--wait", "--timeout=3m")
    kubectl("apply", "-f", "examples/smollm2.yaml")
    kubectl("wait", "--for=condition=Ready", "infs/smollm2", "--timeout=180s", timeout=200)
    said = pages.run_page(DOCS / "operations.md", folder)
    assert any("healthy" in text or "Phase:" in text for text in said.values()), said
    saved = list(yaml.safe_load_all((folder / "kvern-services.yaml").read_text()))
    assert [item["metadata"]["name"] for item in saved[0]["items"]] == ["smollm2"]
    eventually("the resource is gone", lambda: "inferenceservices" not in kubectl("api-resources", "-o", "name"), 30)
    with pytest.raises(CommandError, match="not found"):
        kubectl("get", "namespace", kit.OPERATOR_NAMESPACE)
    roles = kubectl("get", "clusterroles,clusterrolebindings", "-o", "name").split()
    assert not [name for name in roles if "/kvern" in name and "/kvern-e2e" not in name], roles  # e2e: the cluster's
