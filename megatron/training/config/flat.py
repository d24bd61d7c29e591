"""The flat namespace that Megatron scripts read through `get_args()`. Nothing of ours reads it."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training.cli import flag_fields

from .run_config import GROUPS, RunConfig

# Properties of RunConfig that replace what the user wrote, or add to it, under the same name.
DERIVED = (
    "accumulate_allreduce_grads_in_fp32",
    "add_qkv_bias",
    "apply_rope_fusion",
    "attention_backend",
    "attention_softmax_in_fp32",
    "bias_gelu_fusion",
    "check_for_nan_in_loss_and_grad",
    "data_parallel_size",
    "dataloader_type",
    "end_weight_decay",
    "ffn_hidden_size",
    "global_batch_size",
    "kv_channels",
    "lr_decay_iters",
    "lr_decay_samples",
    "no_load_optim",
    "num_experts",
    "num_query_groups",
    "overlap_p2p_comm",
    "pipeline_schedule",
    "position_embedding_type",
    "rank",
    "recompute_granularity",
    "recompute_modules",
    "sequence_parallel",
    "start_weight_decay",
    "train_iters",
    "virtual_pipeline_model_parallel_size",
    "world_size",
)

# Another name for the same value: where two Megatron versions store a flag differently.
ALIASES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "fp8": "fp8_format",
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "transformer_pipeline_model_parallel_size": "pipeline_model_parallel_size",
}


def flat_namespace(run: RunConfig) -> argparse.Namespace:
    """Every flag and derived value as an attribute; `params_dtype` is a torch dtype."""
    import torch  # here, so that --help and the checks of the command line need not wait for it

    values: dict[str, Any] = dict(run.unused)
    for name, cls in GROUPS.items():
        group = getattr(run, name)
        values |= {field.name: getattr(group, field.name) for field in flag_fields(cls)}
    values |= {name: getattr(run, name) for name in DERIVED}
    values |= {name: values[source] for name, source in ALIASES.items()}
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    values["params_dtype"] = getattr(torch, run.params_dtype)
    values["enable_zb_runtime"] = True  # one runtime runs every schedule
    values["consumed_train_samples"] = values["consumed_valid_samples"] = 0
    values["variable_seq_lengths"] = False
    return argparse.Namespace(**values)
