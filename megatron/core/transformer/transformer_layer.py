"""One pre-norm transformer layer: attention and MLP, each added to the residual stream."""

# S sequence, B micro-batch, H hidden.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.stage_context import StageContext
from megatron.core.transformer.bias_dropout import BiasDropoutAdd
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerLayerSubmodules:
    """Parts of a layer. The cross-attention places exist for Megatron's specs and stay empty."""

    input_layernorm: ModuleSpec | type = IdentityOp
    self_attention: ModuleSpec | type = IdentityOp
    self_attn_bda: ModuleSpec | Any = IdentityFuncOp
    pre_cross_attn_layernorm: ModuleSpec | type = IdentityOp
    cross_attention: ModuleSpec | type = IdentityOp
    cross_attn_bda: ModuleSpec | Any = IdentityFuncOp
    pre_mlp_layernorm: ModuleSpec | type = IdentityOp
    mlp: ModuleSpec | type = IdentityOp
    mlp_bda: ModuleSpec | Any = IdentityFuncOp


class TransformerLayer(MegatronModule):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    `layer_number` counts from 1 within the stage; the attribute counts within the whole model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        if get_module(submodules.cross_attention) is not IdentityOp:
            raise ValueError("cross_attention of the layer's spec is set; it is not supported")
        self.stage = stage if stage is not None else StageContext()
        self.layer_number = self.stage.layer_offset + layer_number
        self._recomputes_mlp = config.recomputes("mlp")
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        norm = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.self_attention = build_module(
            submodules.self_attention,
            config=config,
            layer_number=self.layer_number,
            stage=self.stage,
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_module(submodules.mlp, config=config, stage=self.stage)
        self.mlp_bda = build_module(submodules.mlp_bda)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
    ) -> torch.Tensor:
        """(S, B, H) -> (S, B, H); `attention_mask` as in DotProductAttention."""
        normed = self.input_layernorm(hidden_states)
        attended = self.self_attention(normed, attention_mask, rotary_pos_emb=rotary_pos_emb)
        hidden_states = self._add(self.self_attn_bda, attended, hidden_states, "attention_output")
        normed = self.pre_mlp_layernorm(hidden_states)
        if self._recomputes_mlp and self.training:
            transformed = recomputed(self.mlp, self.stage.random, normed)
        else:
            transformed = self.mlp(normed)
        return self._add(self.mlp_bda, transformed, hidden_states, "mlp_output")

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        self.mlp.backward_dw()
        self.self_attention.backward_dw()

    def _add(
        self,
        bias_dropout_add: Any,
        branch: tuple[torch.Tensor, torch.Tensor | None],
        residual: torch.Tensor,
        site: str,
    ) -> torch.Tensor:
        add: BiasDropoutAdd = bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        if self.training and self.hidden_dropout > 0.0:
            with self.stage.random.dropout(residual, self.layer_number, site):
                return add(branch, residual, self.hidden_dropout)
        return add(branch, residual, self.hidden_dropout)
