"""The registry of architectures, and plugin packages that extend it: a distribution made here, on the path, as pip
would have put it there."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvern_engine.config import EngineConfig
from kvern_engine.models.registry import MODELS, model_class
from kvern_engine.plugins import plugin_architectures
from kvern_engine.worker.worker import Worker

TINY = Path(__file__).parents[1] / "models_data" / "tiny-kjv"
MODEL = '''
import torch
from kvern_engine.models.llama import LlamaForCausalLM

class LouderForCausalLM(LlamaForCausalLM):
    """Llama whose logits are multiplied by what config.json says."""

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) * self.config.extra["loudness"]
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a package with an entry point on the path."""

    def put(entry: str, name: str = "kvern-louder", module: str = "kvern_louder", source: str = MODEL) -> None:
        site = tmp_path / name
        site.mkdir()
        (site / f"{module}.py").write_text(source)
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvern.models]\n{entry}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


def test_architectures() -> None:
    for name, found in MODELS.items():
        assert model_class(name) is found and found.__name__ == name
    with pytest.raises(ValueError, match=r"architecture 'Gpt9' is not supported; supported: GPT2LMHeadModel, Gemma"):
        model_class("Gpt9")


def test_a_plugin_is_found_without_being_imported(install: Callable[..., None]) -> None:
    install("LouderForCausalLM = kvern_louder:LouderForCausalLM")
    assert "LouderForCausalLM" in plugin_architectures()
    assert "kvern_louder" not in sys.modules
    assert model_class("LouderForCausalLM").__name__ == "LouderForCausalLM"
    with pytest.raises(ValueError, match=r"'Gpt9' is not supported; supported: .*LlamaForCausalLM, LouderForCausalLM"):
        model_class("Gpt9")


def test_a_plugins_model_is_served(install: Callable[..., None], tmp_path: Path) -> None:
    install("LouderForCausalLM = kvern_louder:LouderForCausalLM")
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LouderForCausalLM"], "loudness": 3.0, "model_type": "louder"})
    )

    def logits(model: Path) -> object:
        from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan

        worker = Worker(EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=4, max_num_seqs=1))
        worker.load()
        row = AddedRow(0, "a", [5, 6, 7], 3, [0], RowSampling(seed=0))
        pending = worker.execute(StepPlan(0, [], [row], [], [], [0], [0], [3], [True]), return_logits=True)
        assert pending.logits is not None
        return pending.logits[0]

    assert (logits(folder) == 3.0 * logits(TINY)).all()  # type: ignore[operator,attr-defined]


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        ("XForCausalLM = kvern_louder:Missing", MODEL, "cannot be loaded: AttributeError: .*Missing"),
        ("XForCausalLM = kvern_louder:X", "raise OSError('no disk')", "cannot be loaded: OSError: no disk"),
        ("XForCausalLM = kvern_louder:X", "X = 3", "is no class; see kvern_engine.models.registry.CausalLM"),
        ("XForCausalLM = kvern_louder:X", "class X: pass", "lacks forward, compute_logits, destinations"),
    ],
)
def test_a_broken_plugin_is_named(install: Callable[..., None], entry: str, source: str, message: str) -> None:
    install(entry, source=source)
    with pytest.raises(ValueError, match=message) as caught:
        model_class("XForCausalLM")
    assert "the plugin for architecture 'XForCausalLM' (entry point kvern.models: kvern_louder:" in str(caught.value)


def test_two_packages_may_not_bring_the_same(install: Callable[..., None]) -> None:
    install("XForCausalLM = kvern_louder:LouderForCausalLM")
    install("XForCausalLM = other:LouderForCausalLM", name="another", module="other")
    with pytest.raises(ValueError, match=r"two installed packages bring the architecture 'XForCausalLM'") as caught:
        plugin_architectures()
    assert "kvern_louder:LouderForCausalLM of kvern-louder" in str(caught.value)
    assert "other:LouderForCausalLM of another" in str(caught.value)


def test_a_plugin_does_not_replace_what_is_built_in(install: Callable[..., None]) -> None:
    install("LlamaForCausalLM = kvern_louder:LouderForCausalLM")
    assert model_class("LlamaForCausalLM").__module__ == "kvern_engine.models.llama"
