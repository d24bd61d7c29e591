"""What a GPT or Llama layer is built from."""

from __future__ import annotations

import importlib.util

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.bias_dropout import get_bias_dropout_add
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.norm import WrappedTorchNorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)


def get_gpt_layer_local_spec(
    num_experts: int | None = None, moe_grouped_gemm: bool = False, qk_layernorm: bool = False
) -> ModuleSpec:
    """A layer of this repository's modules. ValueError for experts, which do not exist here."""
    if num_experts is not None or moe_grouped_gemm:
        raise ValueError(
            f"num_experts is {num_experts} and moe_grouped_gemm {moe_grouped_gemm}; "
            "mixture-of-experts layers are not supported, leave both unset"
        )
    head_norm = WrappedTorchNorm if qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None, moe_grouped_gemm: bool = False, qk_layernorm: bool = False
) -> ModuleSpec:
    """Always a ValueError: no layer of Transformer Engine can be built here."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    reason = "there is no adapter for its layers" if installed else "the package is not installed"
    raise ValueError(
        f"Transformer Engine layers were asked for, but {reason}; use get_gpt_layer_local_spec "
        "(--transformer-impl local), whose layers split their backward as well"
    )
