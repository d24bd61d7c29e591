"""Scaled dot-product attention through torch's kernels."""

# S sequence, B micro-batch, D head width.

from __future__ import annotations

import math

import torch
from torch.nn import functional

from megatron.core.stage_context import StageContext
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class DotProductAttention(MegatronModule):
    """softmax(q k^T scale) v, with dropout on the probabilities.

    Torch's kernels hold scores and softmax in fp32, so `attention_softmax_in_fp32` is always met,
    and `apply_query_key_layer_scaling`, which divides scores by the layer number and multiplies
    them back in the softmax to keep fp16 from overflowing, needs nothing done.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.attention_dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.softmax_scale = 1.0 / math.sqrt(config.head_dim) if scale is None else scale
        self.stage = stage if stage is not None else StageContext()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query (S, B, heads, D), key and value (S, B, groups, D) -> (S, B, heads D).

        `attention_mask` is bool, broadcasts to (B, heads, S, S), and is True where a key is hidden
        (Megatron's sense). Without one the mask is the layer's type, and no (S, S) tensor is made.
        """
        if not self.training or self.attention_dropout == 0.0:
            return self._attend(query, key, value, attention_mask, 0.0)
        # The heads are split over tensor-parallel ranks, and so are the dropped probabilities.
        place = (self.layer_number, "attention")
        with self.stage.random.dropout(query, *place, per_tensor_rank=True):
            return self._attend(query, key, value, attention_mask, self.attention_dropout)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden_keys: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        context = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if hidden_keys is None else ~hidden_keys,
            dropout_p=dropout,
            is_causal=hidden_keys is None and self.attn_mask_type.is_causal,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).flatten(2)
