"""How many rows the embedding gets for a vocabulary."""

from __future__ import annotations

from .base import TokenizerError


def padded_vocab_size(
    vocab_size: int, *, divisible_by: int = 128, tensor_parallel_size: int = 1
) -> int:
    """Smallest multiple of `divisible_by` x `tensor_parallel_size` that holds `vocab_size` ids.

    The added rows are ordinary parameters and take part in the softmax, so the initial weights
    depend on the tensor parallel size through this number.
    """
    for name, value in (
        ("vocabulary size", vocab_size),
        ("--make-vocab-size-divisible-by", divisible_by),
        ("--tensor-model-parallel-size", tensor_parallel_size),
    ):
        if value < 1:
            raise TokenizerError(f"{name} {value} is below 1; use a positive number")
    unit = divisible_by * tensor_parallel_size
    return -(-vocab_size // unit) * unit
