"""Derived fields, Megatron's names, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig


def _config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4} | changes
    )


def test_derived_fields() -> None:
    config = _config()
    assert config.kv_channels == config.head_dim == 16
    assert config.num_query_groups == config.query_groups == 4
    assert config.ffn_hidden_size == 256
    assert config.pipeline_dtype is torch.float32
    assert config.recompute_modules == ["core_attn"]
    assert _config(kv_channels=10, num_query_groups=2, ffn_hidden_size=7).head_dim == 10
    assert _config(params_dtype=torch.bfloat16).pipeline_dtype is torch.bfloat16
    softmax = _config(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=False)
    assert softmax.attention_softmax_in_fp32


def test_init_methods() -> None:
    config = _config(init_method_std=0.5)
    sample = torch.empty(40000)
    config.init_method(sample)
    assert sample.std().item() == pytest.approx(0.5, rel=0.02)
    config.output_layer_init_method(sample)
    assert sample.std().item() == pytest.approx(0.5 / 4.0, rel=0.02)  # sqrt(2 x 8 layers)
    given = _config(init_method=torch.nn.init.zeros_)
    assert given.init_method is torch.nn.init.zeros_


def test_fields_that_training_scripts_assign_to() -> None:
    config = _config()
    for name in ("timers", "grad_scale_func", "finalize_model_grads_func", "no_sync_func"):
        assert getattr(config, name) is None
        setattr(config, name, len)
    assert config.perform_initialization and config.overlap_p2p_comm is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"num_query_groups": 3}, "num_query_groups 3 does not divide"),
        ({"hidden_dropout": 1.5}, "hidden_dropout is 1.5"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm'; choose LayerNorm"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16"),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size is 0"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2; only 1"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2"),
        ({"variable_seq_lengths": True}, "variable_seq_lengths is True"),
        ({"cpu_offloading": True}, "cpu_offloading is True"),
        ({"enable_autocast": True}, "enable_autocast is True"),
        ({"num_moe_experts": 8}, "num_moe_experts is 8"),
        ({"window_size": (4, 0)}, "window_size is"),
        ({"fp8": "e4m3"}, "fp8 is 'e4m3'"),
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm is True"),
        ({"distribute_saved_activations": True}, "distribute_saved_activations is True"),
        ({"recompute_granularity": "half"}, "recompute_granularity is 'half'"),
        ({"recompute_granularity": "full"}, "recompute_method is None; .*uniform, block"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "recompute_num_layers is None",
        ),
        (
            {"recompute_granularity": "selective", "recompute_method": "block"},
            "recompute_method 'block' needs recompute_granularity full",
        ),
        ({"recompute_modules": ["core_attn", "moe"]}, "names moe; choose from core_attn, mlp"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_the_parallel_config_stands_alone() -> None:
    assert ModelParallelConfig().params_dtype is torch.float32
