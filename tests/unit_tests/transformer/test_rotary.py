"""Rotary embeddings: angles, pairing, splitting, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.transformer.rotary import (
    RotaryEmbedding,
    Rotation,
    apply_rotary_pos_emb,
    split_and_rotate_qkv,
    split_qkv,
)

CPU = torch.device("cpu")
S, B, G, D = 6, 2, 2, 8


def _rotation(dtype: torch.dtype = torch.float64, **options: object) -> Rotation:
    return RotaryEmbedding(D, **options)(S, CPU, dtype)  # type: ignore[arg-type]


def test_frequencies() -> None:
    found = RotaryEmbedding(8, rotary_base=100).inverse_frequencies()
    torch.testing.assert_close(found, torch.tensor([100.0 ** -(i / 8) for i in (0, 2, 4, 6)]))


def test_llama_3_1_scaling_keeps_fast_slows_slow_and_blends_between() -> None:
    plain = RotaryEmbedding(128, rotary_base=500000.0).inverse_frequencies()
    scaled = RotaryEmbedding(
        128, rotary_base=500000.0, rope_scaling=True, rope_scaling_factor=8.0
    ).inverse_frequencies()
    wavelength = 2 * math.pi / plain
    ratio = plain / scaled
    assert (ratio[wavelength < 8192 / 4] == 1.0).all()
    torch.testing.assert_close(
        ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0)
    )
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) > 3 and ((between > 1.0) & (between < 8.0)).all()
    assert (ratio.diff() >= 0).all()


def test_llama_3_1_scaling_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    found = RotaryEmbedding(128, rotary_base=500000.0, rope_scaling=True).inverse_frequencies()
    torch.testing.assert_close(found, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_pairs_turn_like_complex_numbers(interleaved: bool, percent: float) -> None:
    rotation = _rotation(rotary_percent=percent, rotary_interleaved=interleaved)
    x = torch.randn(S, B, G, D, dtype=torch.float64)
    found = apply_rotary_pos_emb(x, rotation)
    dim = int(D * percent)
    first = range(0, dim, 2) if interleaved else range(dim // 2)
    for i, channel in enumerate(first):
        partner = channel + (1 if interleaved else dim // 2)
        for position in range(S):
            angle = position * 10000.0 ** (-2.0 * i / dim)
            turned = torch.complex(x[position, ..., channel], x[position, ..., partner])
            turned = turned * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(
                found[position, ..., channel], turned.real, atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                found[position, ..., partner], turned.imag, atol=1e-5, rtol=0
            )
    assert torch.equal(found[..., dim:], x[..., dim:])


def test_scores_depend_on_distance_alone() -> None:
    rotation = RotaryEmbedding(D)(32, CPU, torch.float64)
    q, k = (torch.randn(1, 1, 1, D, dtype=torch.float64).expand(32, 1, 1, D) for _ in range(2))
    q, k = apply_rotary_pos_emb(q, rotation), apply_rotary_pos_emb(k, rotation)
    scores = torch.einsum("sbhd,tbhd->st", q, k)
    for distance in range(0, 31, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)


def test_interpolation_divides_positions() -> None:
    squeezed = RotaryEmbedding(D, seq_len_interpolation_factor=2)(S, CPU, torch.float64)
    full = RotaryEmbedding(D)(S, CPU, torch.float64)
    assert torch.equal(squeezed.cos[::2], full.cos[: S // 2])


def test_tables_are_made_once_and_in_the_asked_dtype() -> None:
    embedding = RotaryEmbedding(D)
    table = embedding(S, CPU, torch.bfloat16)
    assert embedding(S, CPU, torch.bfloat16).cos is table.cos
    assert table.cos.dtype is torch.bfloat16
    exact = embedding(S, CPU, torch.float32)
    assert torch.equal(table.cos, exact.cos.bfloat16())  # angles in fp32, rounded once
    assert not embedding.state_dict()


def test_odd_rotations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rotary_percent 0\.4 of kv_channels 8 rotates 3"):
        RotaryEmbedding(8, rotary_percent=0.4)


@pytest.mark.parametrize("heads_per_group", [1, 3])
def test_a_group_holds_its_query_heads_then_key_then_value(heads_per_group: int) -> None:
    qkv = torch.arange(S * B * G * (heads_per_group + 2) * D, dtype=torch.float64)
    qkv = qkv.view(S, B, -1)
    q, k, v = split_qkv(qkv, heads_per_group, D)
    assert q.shape == (S, B, G * heads_per_group, D) and k.shape == v.shape == (S, B, G, D)
    per_group = (heads_per_group + 2) * D
    for group in range(G):
        part = qkv[..., group * per_group : (group + 1) * per_group].split(D, dim=-1)
        for head in range(heads_per_group):
            assert torch.equal(q[:, :, group * heads_per_group + head], part[head])
        assert torch.equal(k[:, :, group], part[-2])
        assert torch.equal(v[:, :, group], part[-1])


@pytest.mark.parametrize("heads_per_group", [1, 3])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_splitting_and_rotating_at_once_equals_one_after_the_other(
    heads_per_group: int, percent: float, interleaved: bool
) -> None:
    rotation = _rotation(rotary_percent=percent, rotary_interleaved=interleaved)
    qkv = torch.randn(S, B, G * (heads_per_group + 2) * D, dtype=torch.float64, requires_grad=True)
    at_once = split_and_rotate_qkv(qkv, heads_per_group, D, rotation)
    q, k, v = split_qkv(qkv, heads_per_group, D)
    apart = (_plainly_rotated(q, rotation), _plainly_rotated(k, rotation), v)
    grads = [torch.randn_like(t) for t in apart]
    for found, expected in zip(at_once, apart, strict=True):
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous()
        assert found.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
    (found_grad,) = torch.autograd.grad(at_once, qkv, grads)
    (expected_grad,) = torch.autograd.grad(apart, qkv, grads)
    torch.testing.assert_close(found_grad, expected_grad)


def test_gradient_of_rotation() -> None:
    rotation = _rotation()
    x = torch.randn(S, 1, 1, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_pos_emb(x, rotation), x)


def _plainly_rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """The textbook formula, in operations that torch differentiates."""
    cos, sin = rotation.cos.squeeze(3), rotation.sin.squeeze(3)
    dim = 2 * cos.shape[-1]
    turning, rest = x[..., :dim], x[..., dim:]
    if rotation.interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)
