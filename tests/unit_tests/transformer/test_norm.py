"""Norms against the formulas, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.norm import LayerNorm, RMSNorm, WrappedTorchNorm

WIDTH, EPS = 10, 1e-3


def _norm(normalization: str, **changes: Any) -> LayerNorm | RMSNorm:
    fields: dict[str, Any] = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 1}
    config = TransformerConfig(**fields | {"normalization": normalization} | changes)
    norm = WrappedTorchNorm(config, WIDTH, EPS, persist_layer_norm=True)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(WIDTH).to(parameter.dtype))
    return norm


def _formula(norm: LayerNorm | RMSNorm, x: torch.Tensor, gamma_offset: float) -> torch.Tensor:
    weight = norm.weight.to(x.dtype) + gamma_offset
    if isinstance(norm, LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
        return scaled * weight + norm.bias.to(x.dtype)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_output_and_gradients_equal_the_formula(normalization: str, zero_centered: bool) -> None:
    norm = _norm(
        normalization,
        params_dtype=torch.float64,
        layernorm_zero_centered_gamma=zero_centered,
    )
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    inputs = (x, *norm.parameters())
    found, expected = norm(x), _formula(norm, x, 1.0 if zero_centered else 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for actual, value in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-12)


def test_rms_norm_equals_torchs_in_every_precision() -> None:
    """The accelerator's path is torch's own: both must be one function."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        norm = _norm("RMSNorm", params_dtype=dtype)
        x = (3.0 * torch.randn(7, 2, WIDTH)).to(dtype).requires_grad_()
        grad = torch.randn(7, 2, WIDTH).to(dtype)
        torchs = torch.nn.functional.rms_norm(x, (WIDTH,), norm.weight, EPS)
        torch.testing.assert_close(norm(x), torchs, rtol=tolerance, atol=tolerance)
        inputs = (x, norm.weight)
        wide_inputs = [t.detach().double().requires_grad_() for t in inputs]
        wide = torch.nn.functional.rms_norm(wide_inputs[0], (WIDTH,), wide_inputs[1], EPS)
        for actual, exact in zip(
            torch.autograd.grad(norm(x), inputs, grad),
            torch.autograd.grad(wide, wide_inputs, grad.double()),
            strict=True,
        ):
            error = (actual.double() - exact).abs().max() / exact.abs().max()
            assert error < 2 * tolerance


def test_frozen_inputs_or_weights_get_no_gradient() -> None:
    norm = _norm("RMSNorm")
    x = torch.randn(3, WIDTH, requires_grad=True)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None and x.grad is not None
    norm.weight.requires_grad_(True)
    norm(x.detach()).sum().backward()
    assert norm.weight.grad is not None


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_an_fp32_stream_is_normalised_in_fp32_for_a_16_bit_model(normalization: str) -> None:
    norm = _norm(normalization, params_dtype=torch.bfloat16)
    x = torch.randn(5, WIDTH)
    found = norm(x)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, _formula(norm, x.double(), 0.0).to(torch.bfloat16))


def test_initial_values_and_attributes() -> None:
    fields: dict[str, Any] = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 1}
    norm = LayerNorm(TransformerConfig(**fields), WIDTH)
    assert (norm.weight == 1.0).all() and not norm.bias.any()
    centered = LayerNorm(TransformerConfig(**fields, layernorm_zero_centered_gamma=True), WIDTH)
    assert not centered.weight.any()
    for parameter in norm.parameters():
        assert callable(parameter.init_method) and parameter.sequence_parallel is False
