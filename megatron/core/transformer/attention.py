"""Self-attention: query/key/value projection, core attention, output projection."""

# S sequence, B micro-batch, H hidden, G key/value heads (groups), D head width;
# /t: split over the tensor-parallel ranks.

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.stage_context import StageContext
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import (
    Rotation,
    apply_rotary_pos_emb,
    split_and_rotate_qkv,
    split_qkv,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class SelfAttentionSubmodules:
    """Parts of SelfAttention; the two norms act on each head's queries and keys."""

    linear_qkv: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type
    q_layernorm: ModuleSpec | type = IdentityOp
    k_layernorm: ModuleSpec | type = IdentityOp


class SelfAttention(MegatronModule):
    """Multi-head or grouped-query attention of a sequence with itself."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        self.stage = stage if stage is not None else StageContext()
        head_dim, groups = config.head_dim, config.query_groups
        self.head_dim = head_dim
        self._recomputes_core = config.recomputes("core_attn")
        self.heads_per_group = config.num_attention_heads // groups
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (config.num_attention_heads + 2 * groups) * head_dim,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear or config.add_qkv_bias,
            gather_output=False,
            skip_bias_add=False,
            stage=self.stage,
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            stage=self.stage,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            stage=self.stage,
        )
        norm = {"config": config, "hidden_size": head_dim, "eps": config.layernorm_epsilon}
        self.q_layernorm = build_module(submodules.q_layernorm, **norm)
        self.k_layernorm = build_module(submodules.k_layernorm, **norm)
        self._norms_heads = not (
            isinstance(self.q_layernorm, IdentityOp) and isinstance(self.k_layernorm, IdentityOp)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(S, B, H) -> ((S, B, H), the output bias if it was not added)."""
        qkv, _ = self.linear_qkv(hidden_states)  # (S, B, (heads + 2 G) D/t)
        query, key, value = self._split(qkv, rotary_pos_emb)
        if self._recomputes_core and self.training:
            context = recomputed(
                self.core_attention, self.stage.random, query, key, value, attention_mask
            )
        else:
            context = self.core_attention(query, key, value, attention_mask)  # (S, B, heads D/t)
        return self.linear_proj(context)

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        self.linear_proj.backward_dw()
        self.linear_qkv.backward_dw()

    def _split(
        self, qkv: torch.Tensor, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if rotation is not None and not self._norms_heads:
            return split_and_rotate_qkv(qkv, self.heads_per_group, self.head_dim, rotation)
        query, key, value = split_qkv(qkv, self.heads_per_group, self.head_dim)
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotation is not None:
            query = apply_rotary_pos_emb(query, rotation)
            key = apply_rotary_pos_emb(key, rotation)
        return query, key, value
