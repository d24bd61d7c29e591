"""The MLP and its activations against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, build_module
from megatron.core.transformer.activations import SwiGLU, openai_gelu, squared_relu
from megatron.core.transformer.mlp import MLP


def _mlp(**changes: Any) -> MLP:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 12,
        "params_dtype": torch.float64,
        "init_method_std": 0.5,
    }
    config = TransformerConfig(**fields | changes)
    return build_module(get_gpt_layer_local_spec().submodules.mlp, config=config)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, functional.gelu),
        ({"activation_func": openai_gelu}, _gelu_tanh),
        ({"bias_activation_fusion": True}, _gelu_tanh),
        ({"bias_activation_fusion": True, "add_bias_linear": False}, functional.gelu),
        ({"activation_func": squared_relu}, lambda x: x.clamp(min=0) ** 2),
    ],
)
def test_plain_mlp(changes: dict[str, Any], activation: Any) -> None:
    mlp = _mlp(**changes)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    inner = activation(functional.linear(x, fc1.weight, fc1.bias))
    output, bias = mlp(x)
    assert bias is None
    torch.testing.assert_close(output, functional.linear(inner, fc2.weight, fc2.bias))


@pytest.mark.parametrize("activation", [functional.silu, functional.gelu])
def test_gated_mlp_takes_gate_then_up(activation: Any) -> None:
    mlp = _mlp(gated_linear_unit=True, activation_func=activation, add_bias_linear=False)
    assert mlp.linear_fc1.weight.shape == (24, 8)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    gate, up = mlp.linear_fc1.weight[:12], mlp.linear_fc1.weight[12:]
    inner = activation(x @ gate.t()) * (x @ up.t())
    torch.testing.assert_close(mlp(x)[0], inner @ mlp.linear_fc2.weight.t())


def test_swiglu_gradient_and_what_it_keeps() -> None:
    gate_up = torch.randn(4, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SwiGLU.apply, gate_up)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        SwiGLU.apply(gate_up)
    assert [tensor.data_ptr() for tensor in saved] == [gate_up.data_ptr()]
