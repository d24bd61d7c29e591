"""Options of data parallelism, under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistributedDataParallelConfig:
    """How a stage's gradients are kept and summed over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True  # main gradients are always fp32 here
    overlap_grad_reduce: bool = False  # start the sum of a stage right after its last W
    use_distributed_optimizer: bool = False  # each rank receives only its slices of the sum
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
