"""docs/autoscaling.md leads an on-call engineer from a word to a formula: every word in it is one of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/autoscaling.md").read_text()
SOURCES = (
    "\n".join(
        path.read_text()
        for folder in (
            "operator/kvern_operator",
            "operator/kvern_cli",
            "engine/kvern_engine/worker/sim_profiles",
            "simulator",
        )
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".json")
    )
    + (ROOT / "crds/kvern.dev_inferenceservices.yaml").read_text()
)
TERMS = set(re.findall(r'Term\("(\w+)"', SOURCES))


def names() -> list[str]:
    """Single words in backticks; of dotted ones each part."""
    found = set()
    for text in re.findall(r"`([^`\n]+)`", PAGE):
        if re.fullmatch(r"[A-Za-z0-9.\-]+", text) and not text.startswith("-"):
            found |= {part for part in text.split(".") if re.fullmatch(r"[A-Za-z][A-Za-z0-9\-]{2,}", part)}
    return sorted(found)


@pytest.mark.parametrize("name", names())
def test_every_name_exists(name):
    assert re.search(rf"\b{re.escape(name)}\b", SOURCES) or (ROOT / "docs" / name).exists(), name


def test_every_term_and_limit_of_the_code_stands_in_the_page():
    limits = set(
        re.findall(r'"(missingMetrics|stabilization|settling|panic|layoutChange|unschedulable|slowStart)"', SOURCES)
    )
    assert {"kv", "rate", "slo", "queue", "preemptions", "ttft", "itl", "held"} <= TERMS
    missing = [
        name for name in (TERMS | limits | {"maxReplicas", "gpuBudget", "namespaceBudget"}) if f"`{name}`" not in PAGE
    ]
    assert not missing
