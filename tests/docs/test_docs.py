"""The documentation builds with every link checked, and says what the code does."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvern_operator.advice import REASONS, advice
from kvern_operator.api.load import load_text
from kvern_operator.api.status import ConditionType

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator/kvern_operator"
SOURCES = ("conditions", "reconcile", "causes", "crashes", "reporting", "controller", "events", "notices")
# Words in capitals that those files hold and that are no reasons: kinds, modes, statuses, types of conditions.
NO_REASONS = {
    *("StatefulSet", "Deployment", "ReplicaSet", "Pod", "PersistentVolumeClaim", "ConfigMap", "Secret", "Service"),
    *("Job", "InferenceService", "PodMonitor", "NetworkPolicy", "ServiceAccount", "PodDisruptionBudget", "Event"),
    *("True", "False", "Unknown", "Normal", "Warning", "None", "Pending", "Failed", "Succeeded", "Running"),
    *("Embedded", "InferencePool", "Internal", "Recommend", "Fixed", "Auto", "Surge", "DrainSwap", "Recreate"),
    *("Retain", "Delete", "Apply", "DryRun", "FailedMapVolume", "ProvisioningFailed", "FailedScheduling"),
    *ConditionType.__args__,
    *("Plan", "Reconcile"),  # names of Python
    "Stable",  # a phase of a layout
}


def reasons_in_code() -> set[str]:
    """Every string of the operator's deciding files that looks like a reason."""
    found = set()
    for name in SOURCES:
        for node in ast.walk(ast.parse((OPERATOR / f"{name}.py").read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text for text in found if re.fullmatch(r"[A-Z][a-z]+[A-Za-z]*", text)}


def test_every_reason_that_the_operator_can_give_is_explained():
    unknown = reasons_in_code() - set(REASONS) - NO_REASONS
    assert not unknown, f"add these to kvern_operator/advice/ (or to NO_REASONS, if they are none): {sorted(unknown)}"


def test_reasons_that_need_somebody_say_what_to_do():
    for name, known in REASONS.items():
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) and known.meaning.endswith("."), name
        assert known.kind != "trouble" or (known.short and known.steps), name
        assert not known.short.endswith(".") and known.short[:1] == known.short[:1].lower(), name
        for step in known.steps:
            step.format(name="n", pod="p", node="o", k="kubectl")
    assert advice("OOMKilled") == "raise spec.resources.memory" and advice("NeverHeardOf") == ""


def test_generated_pages_are_fresh():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = [str(path.relative_to(ROOT)) for path, text in module.pages().items() if path.read_text() != text]
    assert not stale, f"run make generate: {stale}"
    page = (ROOT / "docs/reference/inferenceservice.md").read_text()
    assert "### spec.parallelism.tensor" in page and "| `uri`<br>**required** |" in page
    troubles = (ROOT / "docs/troubleshooting.md").read_text()
    assert all(f"#### {reason}\n" in troubles or f"| `{reason}` |" in troubles for reason in REASONS)


def test_it_builds_with_every_link_checked(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site/reference/inferenceservice.html").read_text()
    for link in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{link}"' in page, f"no anchor {link}"
    # Pages fetch nothing from elsewhere: they open from a folder, and tell nobody who reads them.
    for file in (tmp_path / "site").rglob("*.html"):
        loads = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', file.read_text())
        assert not loads, f"{file.name} loads {loads}"


def markdown_files() -> list[Path]:
    """What people read on the repository's page, outside the site."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("charts/*/README.md"))]


@pytest.mark.parametrize("file", markdown_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_of_other_pages_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text()):
        if "://" not in target:
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def manifests() -> list[tuple[str, str]]:
    """Whole InferenceServices, and specs of them, in the YAML blocks of the pages."""
    found = []
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```yaml\n(.*?)^```", file.read_text(), re.M | re.S):
            document = yaml.safe_load(block)
            if document.get("kind") == "InferenceService":
                found.append((file.name, block))
            elif set(document) == {"spec"}:
                found.append((file.name, spec_of(document["spec"])))
            elif set(document) == {"resources"} and "requests" not in document["resources"]:
                found.append((file.name, spec_of({"resources": document["resources"]})))
    return found


def spec_of(part: dict) -> str:
    whole = {"model": {"uri": "builtin://smollm2-135m"}, **part}
    head = {"apiVersion": "kvern.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "x"}}
    return yaml.safe_dump({**head, "spec": whole})


def test_every_manifest_that_is_shown_is_valid():
    shown = manifests()
    assert len(shown) >= 8
    for file, text in shown:
        load_text(text, file)
