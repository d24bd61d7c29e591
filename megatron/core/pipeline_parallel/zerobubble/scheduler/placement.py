"""Which rank holds which stage: plain, looped and V placements.

plain, p = 4         looped, p = 2, two chunks     V, p = 2
rank 0: stage 0      rank 0: stages 0, 2           rank 0: stages 0, 3
rank 1: stage 1      rank 1: stages 1, 3           rank 1: stages 1, 2
...
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .instruction import ScheduleError


class Slot(NamedTuple):
    """Where a stage lives: its rank, and its position among that rank's stages."""

    rank: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """One slot per stage, in model order; `slots[0]` holds the embedding, `slots[-1]` the head."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        chunks = Counter(slot.rank for slot in self.slots)
        expected = [Slot(r, c) for r in range(len(chunks)) for c in range(chunks[r])]
        if not self.slots or sorted(self.slots) != expected:
            raise ScheduleError(
                f"placement {[tuple(s) for s in self.slots]} is not a map of stages onto ranks: "
                "every rank from 0 must hold chunks 0, 1, ... once each"
            )

    @classmethod
    def plain(cls, num_ranks: int) -> Placement:
        """Stage r on rank r."""
        return cls.looped(num_ranks, 1)

    @classmethod
    def looped(cls, num_ranks: int, num_chunks: int) -> Placement:
        """Stage s on rank s mod p (arXiv:2104.04473, section 2.2)."""
        stages = range(num_ranks * num_chunks)
        return cls(tuple(Slot(s % num_ranks, s // num_ranks) for s in stages))

    @classmethod
    def v_shape(cls, num_ranks: int) -> Placement:
        """Stages 0..p-1 down the ranks, p..2p-1 back up (arXiv:2401.10241, section 6)."""
        down = [Slot(r, 0) for r in range(num_ranks)]
        return cls(tuple(down + [Slot(r, 1) for r in reversed(range(num_ranks))]))

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max((slot.rank for slot in self.slots), default=-1)

    @property
    def num_stages(self) -> int:
        return len(self.slots)

    @property
    def last_stage(self) -> int:
        return len(self.slots) - 1

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, its stages in chunk order."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, slot in sorted(enumerate(self.slots), key=lambda item: item[1].chunk):
            stages[slot.rank].append(stage)
        return tuple(tuple(held) for held in stages)

    @property
    def max_chunks(self) -> int:
        """The largest number of stages a rank holds."""
        return max(len(held) for held in self.stages_by_rank)

    def rank_of(self, stage: int) -> int:
        return self.slots[stage].rank

    @property
    def name(self) -> str:
        """`plain`, `looped`, `v`, or `custom`."""
        p, v = self.num_ranks, self.max_chunks
        if self == Placement.looped(p, v):
            return "plain" if v == 1 else "looped"
        return "v" if self == Placement.v_shape(p) else "custom"
