"""`--use-checkpoint-args`: take the shape of the model from a checkpoint's stored arguments."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from megatron.training.cli import shown

# Taken from the checkpoint even where the command line says otherwise.
FORCED = (
    "add_bias_linear",
    "add_position_embedding",
    "add_qkv_bias",
    "apply_layernorm_1p",
    "apply_query_key_layer_scaling",
    "attention_dropout",
    "group_query_attention",
    "hidden_dropout",
    "normalization",
    "num_experts",
    "num_query_groups",
    "position_embedding_type",
    "rotary_base",
    "rotary_interleaved",
    "rotary_percent",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "use_rotary_position_embeddings",
)

# Taken where the command line says nothing.
FILLED = (
    "ffn_hidden_size",
    "hidden_size",
    "kv_channels",
    "max_position_embeddings",
    "num_attention_heads",
    "num_layers",
    "padded_vocab_size",
    "seq_length",
)

# Taken where the command line says nothing, unless it says to keep its own tokenizer.
TOKENIZER = ("tokenizer_type", "tokenizer_model", "tiktoken_pattern")

STORED_UNDER = {"apply_layernorm_1p": "layernorm_zero_centered_gamma"}  # in newer Megatron


def take_checkpoint_args(
    namespace: argparse.Namespace, explicit: Collection[str], stored: Mapping[str, Any]
) -> list[str]:
    """Put stored values into `namespace`; returns one notice per replacement.

    Not taken: the norm epsilon, which Megatron does not restore either, and parallel sizes, since
    a checkpoint loads under any.
    """
    tokenizer = TOKENIZER if namespace.use_tokenizer_model_from_checkpoint_args else ()
    notices = []
    for name in (*FORCED, *FILLED, *tokenizer):
        source = name if name in stored else STORED_UNDER.get(name, name)
        if source not in stored or (name not in FORCED and name in explicit):
            continue
        old, new = getattr(namespace, name), stored[source]
        if new is None or new == old:
            continue
        setattr(namespace, name, new)
        notices.append(f"{name} is {shown(new)} from the checkpoint (was {shown(old)})")
    return notices
