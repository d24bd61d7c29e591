"""From Megatron's flat arguments to the configuration objects of `megatron.core`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from torch.nn import functional

from megatron.core.transformer.activations import squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """The transformer's configuration: same-named arguments, and those that have other names."""
    cls = config_class or TransformerConfig
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    values: dict[str, Any] = {k: v for k, v in vars(args).items() if k in fields}
    values["layernorm_epsilon"] = args.norm_epsilon
    values["layernorm_zero_centered_gamma"] = args.apply_layernorm_1p
    values["num_moe_experts"] = args.num_experts
    values["num_layers_in_first_pipeline_stage"] = args.decoder_first_pipeline_num_layers
    values["num_layers_in_last_pipeline_stage"] = args.decoder_last_pipeline_num_layers
    values["virtual_pipeline_model_parallel_size"] = None  # the plan's placement decides
    values["bias_activation_fusion"] = args.bias_gelu_fusion
    if args.swiglu:
        values["activation_func"] = functional.silu
        values["gated_linear_unit"] = True
        values["bias_activation_fusion"] = args.bias_swiglu_fusion
    elif args.squared_relu:
        values["activation_func"] = squared_relu
    if getattr(args, "init_method_xavier_uniform", False):
        values["init_method"] = torch.nn.init.xavier_uniform_
    return cls(**values)
