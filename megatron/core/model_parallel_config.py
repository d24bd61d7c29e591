"""Settings that every parallel module reads, under Megatron's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class ModelParallelConfig:
    """How a model is split, in which precision it runs, and what a training loop hooks in.

    An ordinary mutable dataclass: Megatron scripts assign to its fields. ValueError for a value
    that cannot work, or that would be silently without effect although it promises another model.
    """

    # Parallel sizes.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1

    # Initialisation. Layers fill their parameters when built unless perform_initialization is off;
    # GPTModel.initialize_weights then draws them again, keyed by global name.
    perform_initialization: bool = True
    use_cpu_initialization: bool = False

    # Precision.
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    deterministic_mode: bool = False

    # What the training loop hooks in.
    timers: Any = None
    finalize_model_grads_func: Callable[..., None] | None = None
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    pipeline_runtime: Any = None  # runs the plan behind get_forward_backward_func()

    # Weight gradients. delay_wgrad_compute keeps a layer's weight gradients until the caller's
    # backward_dw(); schedules of this project split backward without it.
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0

    # Pipeline. Without a dtype, what travels between stages has the residual stream's.
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None

    # Accepted so that Megatron callers can set them; here they choose nothing.
    cross_entropy_loss_fusion: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    async_tensor_model_parallel_allreduce: bool = False
    barrier_with_L1_time: bool = True

    # Refused: what they promise does not exist here.
    cpu_offloading: bool = False

    def __post_init__(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both set; a model has one precision, choose one")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel is set with tensor_model_parallel_size 1; it splits the "
                "sequence over tensor-parallel ranks, so turn it off"
            )
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a parallel size is at least 1")
        refuse(self, context_parallel_size=1, expert_model_parallel_size=1)
        refuse(self, variable_seq_lengths=False, cpu_offloading=False, enable_autocast=False)


def refuse(config: ModelParallelConfig, **supported: Any) -> None:
    """Raise ValueError for a field that has another value than the one that is supported."""
    for name, value in supported.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} is {getattr(config, name)!r}; only {value!r} is supported")
