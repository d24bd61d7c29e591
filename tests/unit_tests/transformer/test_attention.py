"""Attention against softmax(q k^T) v written out; masks, scales, dropout, norms of heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.stage_context import StageContext
from megatron.core.transformer import TransformerConfig, build_module
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

S, B, HEADS, D = 7, 2, 4, 6


def _config(**changes: Any) -> TransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HEADS * D,
        "num_attention_heads": HEADS,
        "params_dtype": torch.float64,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**fields | changes)


def _core(
    config: TransformerConfig,
    mask_type: AttnMaskType = AttnMaskType.causal,
    stage: StageContext | None = None,
) -> DotProductAttention:
    return DotProductAttention(config, 3, mask_type, stage=stage)


def _qkv(groups: int = HEADS) -> tuple[torch.Tensor, ...]:
    shapes = ((S, B, HEADS, D), (S, B, groups, D), (S, B, groups, D))
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> torch.Tensor:
    repeats = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("mask_type", "hidden"),
    [
        (AttnMaskType.causal, CAUSAL),
        (AttnMaskType.padding_causal, CAUSAL),
        (AttnMaskType.no_mask, None),
        (AttnMaskType.padding, None),
    ],
)
def test_core_attention_equals_the_formula(
    groups: int, mask_type: AttnMaskType, hidden: torch.Tensor | None
) -> None:
    inputs = _qkv(groups)
    found = _core(_config(num_query_groups=groups), mask_type)(*inputs)
    expected = _written_out(*inputs, hidden, 1 / math.sqrt(D))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(found)
    for actual, value in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-12)


def test_a_mask_that_is_passed_says_all_of_it() -> None:
    inputs = _qkv()
    hidden = torch.rand(B, 1, S, S) < 0.4
    hidden[..., 0] = False
    found = _core(_config())(*inputs, hidden)
    expected = _written_out(*inputs, hidden, 1 / math.sqrt(D))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_scales() -> None:
    inputs = _qkv()
    found = _core(_config(softmax_scale=0.7))(*inputs)
    torch.testing.assert_close(found, _written_out(*inputs, CAUSAL, 0.7))
    # Division by the layer number is undone in the softmax: the result is the same.
    plain, scaled = _core(_config()), _core(_config(apply_query_key_layer_scaling=True))
    assert torch.equal(plain(*inputs), scaled(*inputs))


def test_dropout_of_probabilities_is_keyed_and_keeps_the_mean() -> None:
    stage = StageContext()
    core = _core(_config(attention_dropout=0.5), stage=stage)
    q, k, _ = _qkv()
    ones = torch.ones(S, B, HEADS, D, dtype=torch.float64)
    first = core(q, k, ones)
    torch.manual_seed(5)
    assert torch.equal(core(q, k, ones), first)
    stage.random.microbatch = 1
    assert not torch.equal(core(q, k, ones), first)
    samples = []
    for stage.random.microbatch in range(400):
        samples.append(core(q, k, ones).mean())
    assert torch.stack(samples).mean().item() == pytest.approx(1.0, abs=0.05)
    core.eval()
    torch.testing.assert_close(core(q, k, ones), ones.flatten(2))


def _self_attention(config: TransformerConfig, **spec_options: Any) -> SelfAttention:
    spec = get_gpt_layer_local_spec(**spec_options).submodules.self_attention
    return build_module(spec, config=config, layer_number=1)


def test_heads_are_normalised_when_asked() -> None:
    config = _config(num_query_groups=2, qk_layernorm=True)
    attention = _self_attention(config, qk_layernorm=True)
    assert attention.q_layernorm.weight.shape == attention.k_layernorm.weight.shape == (D,)
    seen: dict[str, torch.Tensor] = {}

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["q"], seen["k"] = inputs[0], inputs[1]

    attention.core_attention.register_forward_pre_hook(keep)
    attention(torch.randn(S, B, HEADS * D, dtype=torch.float64))
    for heads in seen.values():
        norms = heads.norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(D)), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("changes", "on_qkv", "on_proj"),
    [
        ({}, True, True),
        ({"add_bias_linear": False}, False, False),
        ({"add_bias_linear": False, "add_qkv_bias": True}, True, False),
    ],
)
def test_biases(changes: dict[str, Any], on_qkv: bool, on_proj: bool) -> None:
    attention = _self_attention(_config(**changes))
    assert (attention.linear_qkv.bias is not None) is on_qkv
    assert (attention.linear_proj.bias is not None) is on_proj
