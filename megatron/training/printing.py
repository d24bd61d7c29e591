"""Whole lines on stdout, and Megatron's print helpers for scripts."""

from __future__ import annotations

import sys

import torch.distributed as dist


def print_line(text: str) -> None:
    """Write a line to stdout at once and whole.

    Several ranks write to one stdout, and `print` may write its newline by itself: lines of two
    ranks would then run into each other.
    """
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_rank_0(message: str) -> None:
    """Print on rank 0, or when there is only one process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_line(message)


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print on the last rank, or when there is only one process."""
    if is_last_rank():
        print_line(message)
