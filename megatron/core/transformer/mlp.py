"""The MLP of a transformer layer, plain or gated."""

# S sequence, B micro-batch, H hidden, F inner width; /t: split over the tensor-parallel ranks.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from megatron.core.stage_context import StageContext
from megatron.core.transformer.activations import SwiGLU, openai_gelu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class MLPSubmodules:
    """The two linear layers of an MLP."""

    linear_fc1: ModuleSpec | type
    linear_fc2: ModuleSpec | type


class MLP(MegatronModule):
    """fc2(activation(fc1(x))); gated: fc1 gives [gate; up], and the activation acts on gate."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        stage = stage if stage is not None else StageContext()
        gated = config.gated_linear_unit
        assert config.ffn_hidden_size is not None, "derived in the config's __post_init__"
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size,
            config.ffn_hidden_size * (2 if gated else 1),
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
            gather_output=False,
            stride=2 if gated else 1,  # gate and up are each split over the ranks
            skip_bias_add=False,
            stage=stage,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            stage=stage,
        )
        self.activation = _activation(config)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(S, B, H) -> ((S, B, H), the output bias if it was not added)."""
        inner, _ = self.linear_fc1(hidden_states)  # (S, B, F/t), gated (S, B, 2F/t)
        return self.linear_fc2(self.activation(inner))

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()


def _activation(config: TransformerConfig) -> Activation:
    function = config.activation_func
    if config.gated_linear_unit:
        return SwiGLU.apply if function is functional.silu else _gated(function)
    if function is functional.gelu and config.bias_activation_fusion and config.add_bias_linear:
        # Megatron's fused bias-GELU computes the tanh form: its checkpoints expect it.
        return openai_gelu
    return function


def _gated(function: Activation) -> Activation:
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return gated
