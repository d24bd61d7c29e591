"""A small Llama for benchmarks: our stages of it, and the same with torch's ordinary layers."""

# S sequence, B micro-batch, H hidden, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.layer_split import split_layers, stage_offsets
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.stage_context import StageContext
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitEmbedding,
)
from megatron.core.transformer import TransformerConfig

_SEED = 1234


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """The model, and how many tokens a micro-batch of it has."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        return (self.seq_length, self.micro_batch_size, self.hidden_size)

    def config(self, *, recompute: bool = False) -> TransformerConfig:
        """RMSNorm, SwiGLU, no biases, no dropout, fp32; `recompute`: each layer in full."""
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            recompute_granularity="full" if recompute else None,
            recompute_method="uniform" if recompute else None,
            recompute_num_layers=1 if recompute else None,
        )


def build_model(sizes: LlamaSizes, context: StageContext, *, recompute: bool = False) -> GPTModel:
    """One stage, its weights keyed by their global names: the same for every placement."""
    model = GPTModel(
        config=sizes.config(recompute=recompute),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.seq_length,
        pre_process=context.is_first,
        post_process=context.is_last,
        position_embedding_type="rope",
        stage=context,
    )
    model.initialize_weights(_SEED)
    return model


def stage_contexts(
    sizes: LlamaSizes, placement: Placement, stages: Sequence[int]
) -> list[StageContext]:
    """Contexts of these stages of an even split; a ValueError says why there is none."""
    layers = split_layers(sizes.num_layers, placement)
    offsets = stage_offsets(layers)
    return [
        StageContext(
            stage=stage,
            num_stages=placement.num_stages,
            layer_offset=offsets[stage],
            num_layers=layers[stage],
        )
        for stage in stages
    ]


def with_gradient_buffer(model: GPTModel, context: StageContext) -> StageCompute:
    """The stage as the runtime takes it."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    return StageCompute(wrapped, context)


class OrdinaryStage(torch.nn.Module):
    """The stage as torch's pipelining takes it: plain autograd, input and output as arguments.

    The model's split layers are replaced by torch's linear and embedding, on the same weights.
    """

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model = _with_ordinary_layers(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, S) on the first stage, else (S, B, H) -> (S, B, H), or logits (B, S, V)."""
        if self.model.pre_process:
            return self.model(x)
        self.model.set_input_tensor(x)
        return self.model(None)


def _with_ordinary_layers(model: GPTModel) -> GPTModel:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                setattr(parent, name, _Linear(child.weight, child.bias))
            elif isinstance(child, SplitEmbedding):
                setattr(parent, name, _Embedding(child.weight))
    return model


class _Linear(torch.nn.Module):
    """torch's linear behind the interface of ours."""

    def __init__(self, weight: Any, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.tied_use = None

    def forward(self, x: torch.Tensor, weight: None = None) -> tuple[torch.Tensor, None]:
        return functional.linear(x, self.weight, self.bias), None


class _Embedding(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, self.weight)
