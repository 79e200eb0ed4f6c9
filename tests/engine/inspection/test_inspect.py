"""`kvern inspect`: what it says of models, read without torch; its arithmetic; what a person reads where a model is
damaged, unknown or too large."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern_engine.cli import main
from kvern_engine.config import EngineConfig
from kvern_engine.inspection.cards import CARDS, GIB, Card
from kvern_engine.inspection.command import inspect
from kvern_engine.inspection.report import Report, inspect_model
from kvern_engine.inspection.show import _size, _tokens
from kvern_engine.inspection.sizes import active_parameters, kv_bytes_per_token, parameters
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.parallel.layout import Layout

TINY = str(Path(__file__).parents[1] / "models_data" / "tiny-kjv")
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
}
QWEN_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
Bare = Callable[[dict[str, Any]], str]


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    """bare(content of config.json) -> a model's folder without weights."""

    def make(content: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return str(tmp_path)

    return make


def report(model: str, tensor: int | None = None, **fields: Any) -> Report:
    return inspect_model(resolve_model(model), EngineConfig(model=model, **fields), tensor)


def text_of(model: str, **fields: Any) -> tuple[int, str]:
    out = io.StringIO()
    status = inspect(EngineConfig(model=model, **fields), out)
    return status, out.getvalue()


def test_the_figures_of_known_models(bare: Bare) -> None:
    found = report(bare(LLAMA_8B))
    assert (found.parameters, found.kv_bytes_per_token) == (8_030_261_248, 131_072)
    assert found.parameters == found.active_parameters and found.tensor_sizes == [1, 2, 4, 8]
    model = report(bare(QWEN_30B)).model
    assert (parameters(model), active_parameters(model)) == (30_532_122_624, 3_353_032_704)
    assert kv_bytes_per_token(model, 2) == 98_304
    assert kv_bytes_per_token(model, 2, Layout(1, 8, 1)) == 24_576, "two ranks hold each of the four KV heads"


def test_llama_8b_on_an_h200_is_what_was_measured(bare: Bare) -> None:
    """benchmarks/results/h200.jsonl: 888,624 tokens of KV cache in bfloat16, 942,336 and 1,876,272 with weights and
    then the cache in FP8, at 92 % of the memory."""
    h200 = [card for card in CARDS if card.name.startswith("H200")]
    folder = bare(LLAMA_8B)

    def tokens(**fields: Any) -> int:
        config = EngineConfig(model=folder, **fields)
        (fit,) = inspect_model(resolve_model(folder), config, 1, h200).fits
        return fit.tokens

    assert tokens() == pytest.approx(888_624, rel=0.01)
    assert tokens(quantization="fp8") == pytest.approx(942_336, rel=0.02)
    assert tokens(quantization="fp8", kv_cache_dtype="fp8") == pytest.approx(1_876_272, rel=0.02)


def test_what_fits(bare: Bare) -> None:
    found = {(fit.card, fit.tensor): fit for fit in report(bare(LLAMA_70B)).fits}
    assert len(found) == 4 * len(CARDS)
    assert found["H100 80 GB", 1].room == found["H100 80 GB", 1].tokens == found["H100 80 GB", 1].longest == 0
    two = found["A100 80 GB", 2]
    assert 0 < two.longest == two.tokens < 131_072 and two.at_once == 0.0, "fits, but not with the longest context"
    four = found["A100 80 GB", 4]
    assert four.longest == 131_072 < four.tokens and four.at_once == four.tokens / 131_072
    assert found["A100 80 GB", 8].at_once > 2 * four.at_once
    assert two.weights + two.overhead + two.room <= 0.92 * 80 * GIB


def test_a_shorter_context_and_more_stages(bare: Bare) -> None:
    folder = bare(LLAMA_70B)
    (whole,) = inspect_model(resolve_model(folder), EngineConfig(model=folder), 2, CARDS[4:5]).fits
    config = EngineConfig(model=folder, max_model_len=8192)
    (short,) = inspect_model(resolve_model(folder), config, 2, CARDS[4:5]).fits
    assert short.tokens == whole.tokens and short.longest == 8192 and short.at_once == short.tokens / 8192
    config = EngineConfig(model=folder, pipeline_parallel_size=2)
    (staged,) = inspect_model(resolve_model(folder), config, 2, CARDS[4:5]).fits
    assert staged.tokens > 4 * whole.tokens and staged.weights < whole.weights


def test_a_window_in_all_layers_bounds_what_a_request_holds(bare: Bare) -> None:
    mistral = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 131_072}
    card = [Card("small", 21 * GIB)]
    folder = bare({**mistral, "sliding_window": None})
    (whole,) = inspect_model(resolve_model(folder), EngineConfig(model=folder), 1, card).fits
    folder = bare({**mistral, "sliding_window": 4096})
    (window,) = inspect_model(resolve_model(folder), EngineConfig(model=folder), 1, card).fits
    assert whole.longest == whole.tokens == window.tokens < 131_072
    assert window.longest == 131_072 and window.at_once == window.tokens / (4096 + 16)


def test_more_than_the_models_own_length_is_noted(bare: Bare) -> None:
    found = report(bare(LLAMA_8B), max_model_len=10_000)
    assert found.max_model_len == 10_000
    assert found.notes == [
        "max_model_len 10000 is above 8192, the model's max_position_embeddings: answers there are likely nonsense"
    ]


def test_what_is_read_from_files(smollm2: str) -> None:
    found = report(TINY)
    assert [(item.dtype, item.tensors) for item in found.stored] == [("BF16", 38)]
    assert found.parameters == 1_049_728 and found.weights_error is None
    assert found.stored[0].nbytes == 2 * 1_049_728
    found = report(smollm2)
    assert [item.dtype for item in found.stored] == ["Q4_1", "Q8_0", "F32"] and found.parameters == 134_515_008
    assert sum(item.nbytes for item in found.stored) == pytest.approx(98_362_432, rel=0.03)
    assert (found.kind, found.family, found.tensor_sizes) == ("GGUF", "Llama", [1, 3])


@pytest.fixture(scope="session")
def smollm2() -> str:
    return "builtin://smollm2-135m"


def test_the_picture_of_several_sizes(bare: Bare) -> None:
    status, text = text_of(bare(LLAMA_70B))
    assert status == 1, "there are no weights"
    lines = text.splitlines()
    text = " ".join(text.split())  # a path as long as this machine's breaks lines anywhere
    assert lines[0] == "Llama  LlamaForCausalLM"
    assert max(map(len, lines)) <= 100
    for words in (
        "parameters 70.6 billion",
        "weights ",
        "no .safetensors file",
        "80 layers of width 8,192, 64 heads of 128 (8 KV heads), vocabulary 128,256",
        "context 131,072 tokens",
        "320 KiB a token in bfloat16",
        "--tensor-parallel-size 1, 2, 4, 8",
        "x: requests of 131,072 tokens at once",
    ):
        assert words in text
    header = next(line for line in lines if "fits on" in line)
    assert header.split() == ["fits", "on", "1", "GPU", "2", "GPUs", "4", "GPUs", "8", "GPUs"]
    row = next(line for line in lines if line.strip().startswith("H200"))
    assert row.split()[:4] == ["H200", "141", "GB", "-"] and row.split()[4] == "128K" and row.split()[5][0] == "x"


def test_the_picture_of_one_size(bare: Bare) -> None:
    mixture = {**QWEN_30B, "auto_map": {"AutoModelForCausalLM": "modeling_q.Q"}}
    _, text = text_of(bare(mixture), tensor_parallel_size=2, kv_cache_dtype="fp8", max_model_len=16_000)
    for words in (
        "Qwen 3 (mixture of experts)  Qwen3MoeForCausalLM",
        "30.5 billion, 3.35 billion of them for a token",
        "128 a layer, 8 for each token",
        "48 KiB a token in float8_e4m3",
        "Note: the model brings code, modeling_q.py (class Q), which is not run",
        "does not fit",
        "16,000 at once",
        "28.4 GiB",
    ):
        assert words in text, words
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_windows_scalings_and_gemma(bare: Bare) -> None:
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    }
    _, text = text_of(bare(content))
    assert "Gemma 3  Gemma3ForCausalLM" in text
    assert "131,072 tokens, linear scaling x8, a window of 4,096 in 29 of 34 layers" in text
    with pytest.raises(ValueError, match="dtype float16 does not fit Gemma3ForCausalLM"):
        text_of(bare(content), dtype="float16")
    linear = {**LLAMA_8B, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert "8,192 tokens, up to 32,768 where asked for, linear scaling x4" in text_of(bare(linear))[1]


def test_json_for_programs(bare: Bare, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["model"]["architecture"], found["parameters"]) == (
        "Llama",
        "LlamaForCausalLM",
        1_049_728,
    )
    assert found["own_length"] == {
        "usual": 512,
        "most": 512,
        "why": "the model's max_position_embeddings",
        "hard": False,
    }
    assert found["stored"] == [{"dtype": "BF16", "tensors": 38, "nbytes": 2 * 1_049_728}]
    assert {fit["card"] for fit in found["fits"]} == {card.name for card in CARDS}
    assert {fit["tensor"] for fit in found["fits"]} == {1, 2, 4}
    assert main(["inspect", TINY, "--json", "-tp", "2"]) == 0
    assert {fit["tensor"] for fit in json.loads(capsys.readouterr().out)["fits"]} == {2}


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["/nowhere"], 1, "kvern inspect: error: model '/nowhere': no such folder or file"),
        (
            [TINY, "-tp", "3"],
            1,
            "tensor_parallel_size=3 does not divide the model's 4 attention heads; sizes that work",
        ),
        ([TINY, "--max-modellen", "4"], 2, "unknown flag --max-modellen; did you mean --max-model-len?"),
        ([TINY, "--port", "80"], 2, "unknown flag --port"),
        ([], 2, "which model? Name one"),
    ],
)
def test_mistakes(argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *argv]) == status
    assert words in capsys.readouterr().err


def test_a_damaged_model(bare: Bare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", bare({"architectures": ["MambaForCausalLM"]})]) == 1
    problem = capsys.readouterr().err
    assert "architecture 'MambaForCausalLM' is not supported" in problem and "Qwen3MoeForCausalLM" in problem
    bare(json.loads(Path(TINY, "config.json").read_text()))
    (tmp_path / "model.safetensors").write_bytes(Path(TINY, "model.safetensors").read_bytes()[:-1])
    assert main(["inspect", str(tmp_path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "truncated: tensor" in text and "download it again" in text and "fits on" in text


def test_checked_against_what_the_model_needs(bare: Bare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TINY, "--check"]) == 0
    assert "Note: every tensor that the model needs is there, with its shape and type" in capsys.readouterr().out
    content = json.loads(Path(TINY, "config.json").read_text())
    bare({**content, "intermediate_size": 400})
    (tmp_path / "model.safetensors").write_bytes(Path(TINY, "model.safetensors").read_bytes())
    assert main(["inspect", str(tmp_path), "--check"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "is [384, 128], must be [400, 128]" in text and "12 of the wrong shape" in text


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = (
        "import sys; from kvern_engine.cli import main; status = main(['inspect', sys.argv[1]]); "
        "print([name for name in ('torch', 'numpy', 'transformers', 'zmq') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, TINY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "1.05 million" in done.stdout


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (131_072, "128 KiB"), (1 << 40, "1,024 GiB")],
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert _size(nbytes) == text


def test_lengths_in_words() -> None:
    assert [_tokens(n) for n in (512, 1024, 131_072, 32_000)] == ["512", "1K", "128K", "32,000"]
