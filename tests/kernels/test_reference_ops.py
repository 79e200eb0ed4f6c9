"""The torch references of norm, rotary + KV write and SwiGLU against their formulas, written down independently."""

import pytest
import torch

from kvern_kernels import add_rms_norm, rms_norm, rope_and_cache, silu_and_mul

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_rms_norm(dtype, size):
    x = (torch.randn(3, 576) * size).to(dtype)
    weight = torch.randn(576).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_add_rms_norm_overwrites_the_residual():
    x, residual, weight = torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)
    total = x + residual
    normed, kept = add_rms_norm(x, residual, weight, 1e-5)
    assert kept is residual
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_and_mul(dtype):
    x = torch.randn(3, 10).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_and_mul(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rotated(x, angles):
    """Rotation as multiplication of complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rope_and_cache(tokens, adjacent, dtype):
    heads, kv_heads, dim, block_size = 6, 2, 8, 4
    q, k, v = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype).split((heads, kv_heads, kv_heads), dim=1)
    if not adjacent:
        q, k, v = q.clone(), k.clone(), v.clone()
    angles = torch.rand(30, dim // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    positions = torch.tensor([29, 0, 3, 7])[:tokens]
    slots = torch.tensor([5, 0, -1, 18])[:tokens]
    cache = {}
    for _ in range(2):  # the second layer of a step reuses the first one's preparations
        arena = torch.zeros(3, 2, kv_heads, 5, block_size, dim, dtype=dtype)
        got = rope_and_cache(q, k, v, cos_sin, positions, arena[1], slots, cache=cache)
        tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(got.double(), rotated(q, angles[positions]), **tolerance)
        flat = arena[1].view(2, kv_heads, -1, dim)
        expected_k = rotated(k, angles[positions])
        written = [(i, slot) for i, slot in enumerate(slots.tolist()) if slot >= 0]
        for i, slot in written:
            torch.testing.assert_close(flat[0, :, slot].double(), expected_k[i], **tolerance)
            torch.testing.assert_close(flat[1, :, slot], v[i])
        assert (flat.abs().sum(dim=(0, 1, 3)) > 0).sum() == len(written)
        assert arena[0].abs().sum() == 0 and arena[2].abs().sum() == 0


def test_a_single_padded_token_writes_nothing():
    q, k, v = torch.randn(1, 4, 8).split((2, 1, 1), dim=1)
    kv = torch.zeros(2, 1, 3, 4, 8)
    rope_and_cache(q, k, v, torch.randn(5, 8), torch.tensor([0]), kv, torch.tensor([-1]))
    assert kv.abs().sum() == 0


def test_qk_norm_comes_before_the_rotation():
    q, k, v = torch.randn(2, 4, 8).split((2, 1, 1), dim=1)
    angles = torch.rand(5, 4, dtype=torch.float64)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    q_norm, k_norm, positions = torch.rand(8), torch.rand(8), torch.tensor([1, 4])
    kv = torch.zeros(2, 1, 1, 4, 8)
    got = rope_and_cache(q, k, v, cos_sin, positions, kv, torch.tensor([0, 1]), q_norm, k_norm, 1e-6)
    expected = rotated(rms_norm(q, q_norm, 1e-6), angles[positions])
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=1e-5)
    keys = rotated(rms_norm(k, k_norm, 1e-6), angles[positions]).float()
    torch.testing.assert_close(kv[0, 0, 0, :2], keys[:, 0], atol=1e-5, rtol=1e-5)
