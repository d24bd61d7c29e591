"""What one rank of a run holds, built once at start-up and passed down."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training.config import RunConfig
from megatron.training.pipeline_setup import Pipeline
from megatron.training.throughput import ModelSizes, causal_flops_per_sample


@dataclass
class Session:
    """Configuration, device, groups and shared objects of this rank."""

    run: RunConfig
    namespace: argparse.Namespace  # Megatron's flat arguments, for users' scripts
    device: Device
    groups: ProcessGroupCollection
    pipeline: Pipeline
    tokenizer: Any
    padded_vocab_size: int
    microbatches: NumMicroBatchesCalculator
    timers: Timers

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def model_sizes(self) -> ModelSizes:
        """What the count of floating-point operations depends on."""
        model, run = self.run.model, self.run
        return ModelSizes(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=run.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=run.num_query_groups or model.num_attention_heads,
            kv_channels=run.kv_channels,
            padded_vocab_size=self.padded_vocab_size,
            seq_length=model.seq_length,
            swiglu=model.swiglu,
        )

    @cached_property
    def flops_per_sample(self) -> float:
        """Floating-point operations of one sequence, forward and backward (formula M)."""
        return causal_flops_per_sample(self.model_sizes)

    @property
    def params_dtype(self) -> torch.dtype:
        return getattr(torch, self.run.params_dtype.removeprefix("torch."))

    @property
    def is_first_rank(self) -> bool:
        """The rank that talks at start-up."""
        return self.rank == 0

    @property
    def has_loss(self) -> bool:
        return self.groups.position.pp == self.pipeline.loss_rank

    @property
    def is_logging_rank(self) -> bool:
        """The one rank that prints training lines: the last of those that have the loss."""
        return self.rank == self.logging_rank

    @property
    def logging_rank(self) -> int:
        sizes = self.groups.sizes
        return sizes.rank_of(
            tp=sizes.tp - 1, cp=sizes.cp - 1, dp=sizes.dp - 1, pp=self.pipeline.loss_rank
        )

    @property
    def reads_data(self) -> bool:
        """Whether this rank holds the embedding or the head."""
        return self.groups.position.pp in (self.pipeline.first_rank, self.pipeline.loss_rank)

    def barrier(self) -> None:
        if self.groups.world is not None:
            dist.barrier()


@dataclass
class TrainState:
    """How far training has come; saved with every checkpoint."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    floating_point_operations: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
