"""Which kernel computes large products: the choice and where it is kept; the products themselves on a GPU."""

import json

import pytest
import torch
import torch.nn.functional as F

from kvern_kernels import Fp8Weight, large_products
from kvern_kernels.cublaslt import CublasLtError, Shape

GATE_UP = Shape(8192, 28672, 4096, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("times", "place"),
    [
        ([2.0, 1.9, 2.5], 1),
        ([2.0, 1.99, 2.5], 0),  # within the noise of the measurement
        ([1.0, 2.0], 0),
        ([1.0], 0),
        ([2.0, float("inf"), 1.0], 2),
    ],
)
def test_another_kernel_must_be_clearly_faster(times, place):
    assert large_products.pick(times) == place


def test_a_choice_holds_for_a_card_a_library_and_a_shape():
    name = large_products.label("NVIDIA H200", 130100, GATE_UP)
    assert name == "NVIDIA H200, cuBLASLt 130100, 28672 x 4096 bfloat16->bfloat16, 8192 rows"


def test_choices_are_added_to_those_of_earlier_starts(tmp_path):
    path = tmp_path / "cache" / "products.json"
    assert large_products.read_choices(path) == {}
    large_products.write_choices(path, {"a": [1, 2**63, 3], "b": None})
    large_products.write_choices(path, {"b": [4], "c": None})
    assert large_products.read_choices(path) == {"a": [1, 2**63, 3], "b": [4], "c": None}
    assert [entry.name for entry in path.parent.iterdir()] == ["products.json"]


@pytest.mark.parametrize("text", ["", '{"a": [1', json.dumps([1, 2])])
def test_a_torn_file_counts_as_empty(tmp_path, text):
    path = tmp_path / "products.json"
    path.write_text(text)
    assert large_products.read_choices(path) == {}
    large_products.write_choices(path, {"a": None})
    assert large_products.read_choices(path) == {"a": None}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO"):
        large_products.write_choices(tmp_path / "file" / "products.json", {"a": None})
    assert "the choice of kernels cannot be kept in" in caplog.text


def test_choices_lie_beside_tritons_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert large_products.folder() == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert large_products.folder() == tmp_path / ".triton" / "cache"


def test_nothing_is_chosen_on_a_cpu():
    weight = torch.randn(8, 4)
    large_products.choose([weight], 8192, torch.float32)
    assert large_products.linear(torch.randn(4096, 4), weight, torch.float32) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLASLt needs a GPU")
class TestOnAGpu:
    def test_every_candidate_computes_the_product(self):
        from kvern_kernels.cublaslt import CublasLt

        torch.manual_seed(0)
        library = CublasLt(torch.device("cuda", 0))
        x = torch.randn(3000, 512, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(768, 512, dtype=torch.bfloat16, device="cuda")
        shape = Shape(3000, 768, 512, torch.bfloat16, torch.bfloat16)
        candidates = library.candidates(shape, 8)
        assert candidates
        for algo in candidates:
            got = library.linear(x, weight, algo, torch.bfloat16)
            torch.testing.assert_close(got, F.linear(x, weight), atol=0.2, rtol=2e-2)
            other = x[:2500].contiguous()  # found for 3,000 rows
            if library.fits(Shape(2500, 768, 512, torch.bfloat16, torch.bfloat16), algo):
                assert torch.equal(library.linear(other, weight, algo, torch.bfloat16), got[:2500])

    @pytest.mark.parametrize("per_channel", [False, True])
    def test_fp8(self, per_channel):
        from kvern_kernels import fp8
        from kvern_kernels.cublaslt import FP8, CublasLt

        torch.manual_seed(1)
        library = CublasLt(torch.device("cuda", 0))
        x = fp8.quantize_rows(torch.randn(2048, 512, device="cuda"))
        weight = Fp8Weight.quantize(torch.randn(768, 512, device="cuda"), per_channel)
        expected = x.values.float() @ weight.values.float().T * weight.scale
        for algo in library.candidates(Shape(2048, 768, 512, FP8, torch.bfloat16), 8):
            got = library.linear(x.values, weight.values, algo, torch.bfloat16, weight.scale)
            assert float((got.float() - expected).norm() / expected.norm()) < 1e-2

    def test_a_choice_is_used_and_kept(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(large_products, "pick", lambda times: len(times) - 1)
        monkeypatch.setattr(large_products, "_chosen", {})
        weight = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(4096, 512, dtype=torch.bfloat16, device="cuda")
        assert large_products.linear(x, weight, torch.bfloat16) is None
        large_products.choose([weight, weight], 4096, torch.bfloat16)
        kept = large_products.read_choices(tmp_path / "kvern-products.json")
        (algo,) = kept.values()
        assert algo is not None
        torch.testing.assert_close(
            large_products.linear(x, weight, torch.bfloat16), F.linear(x, weight), atol=0.2, rtol=2e-2
        )
        assert large_products.linear(x[:100], weight, torch.bfloat16) is None
        monkeypatch.setattr(large_products, "_fastest", None)  # a later start measures nothing
        large_products.choose([weight], 4096, torch.bfloat16)
        assert large_products.linear(x, weight, torch.bfloat16) is not None

    def test_without_the_library_prompts_go_the_usual_way(self, monkeypatch, caplog):
        def missing(device):
            raise CublasLtError("cuBLASLt: none of libcublasLt.so.13 can be loaded")

        monkeypatch.setattr(large_products, "CublasLt", missing)
        monkeypatch.setattr(large_products, "_chosen", {})
        weight = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda")
        large_products.choose([weight], 4096, torch.bfloat16)
        assert "long prompts use the library's own choice of kernels: cuBLASLt: none of" in caplog.text
        assert large_products.linear(torch.randn(4096, 512, device="cuda"), weight, torch.bfloat16) is None
