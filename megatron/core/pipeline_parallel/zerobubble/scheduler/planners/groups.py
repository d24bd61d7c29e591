"""The order in which interleaved schedules visit chunks: micro-batches in groups.

A rank takes one group of micro-batches through its chunk 0, then the same group through chunk 1,
and so on, then the next group. With groups of 2 on two chunks:

    forwards:   chunk 0: 0 1   chunk 1: 0 1   chunk 0: 2 3   chunk 1: 2 3
    backwards:  chunk 1: 0 1   chunk 0: 0 1   chunk 1: 2 3   chunk 0: 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Visit(NamedTuple):
    """One micro-batch in one chunk of a rank."""

    chunk: int
    microbatch: int


def even_groups(num_microbatches: int, num_groups: int) -> list[int]:
    """Sizes that differ by at most one, the larger first."""
    size, larger = divmod(num_microbatches, num_groups)
    return [size + (k < larger) for k in range(num_groups)]


def forward_visits(sizes: Sequence[int], num_chunks: int) -> list[Visit]:
    """The visits of all forwards of a rank."""
    visits = []
    first = 0
    for size in sizes:
        group = range(first, first + size)
        visits += [Visit(chunk, j) for chunk in range(num_chunks) for j in group]
        first += size
    return visits


def backward_visits(sizes: Sequence[int], num_chunks: int) -> list[Visit]:
    """The visits of all backwards of a rank: the same groups, chunks from the last to the first."""
    return [Visit(num_chunks - 1 - c, j) for c, j in forward_visits(sizes, num_chunks)]
