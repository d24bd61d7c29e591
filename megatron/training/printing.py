"""Megatron's print helpers for scripts; our own code logs."""

from __future__ import annotations

import torch.distributed as dist


def print_rank_0(message: str) -> None:
    """Print on rank 0, or when there is only one process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print on the last rank, or when there is only one process."""
    if is_last_rank():
        print(message, flush=True)
