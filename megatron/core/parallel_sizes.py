"""Sizes of the parallel axes and the rank arithmetic that follows from them.

Nothing here needs `torch.distributed`: process groups are built elsewhere from the rank lists.

    8 ranks, tp 2, dp 2, pp 2, default order (tp varies fastest, pp slowest):

                 pp 0          pp 1
        dp 0    0   1         4   5
        dp 1    2   3         6   7      groups("tp") = [[0, 1], [2, 3], [4, 5], [6, 7]]
              tp 0  tp 1    tp 0  tp 1   groups("pp") = [[0, 4], [1, 5], [2, 6], [3, 7]]
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["tp", "cp", "dp", "pp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA_ORDER = "tp-cp-ep-pp-dp"  # --use-tp-pp-dp-mapping


class Coordinates(NamedTuple):
    """Position of a rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Tensor, context, data and pipeline parallel sizes; `order` names the fastest axis first.

    `order` is Megatron's string. Its `ep` takes no part in this grid: expert parallelism divides
    the same ranks a second time.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for axis in AXES:
            size = self.size_of(axis)
            if size < 1:
                raise ValueError(f"{axis} is {size}; a parallel size is at least 1")
        if sorted(self._axes) != sorted(AXES):
            raise ValueError(
                f"order {self.order!r} does not name each of {', '.join(AXES)} once; "
                f"write it like {DEFAULT_ORDER!r}"
            )

    @classmethod
    def for_world(
        cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, order: str = DEFAULT_ORDER
    ) -> ParallelSizes:
        """Sizes whose data-parallel size fills the world. Raises ValueError if it cannot."""
        model = tp * cp * pp
        if min(tp, cp, pp) < 1 or world_size < 1 or world_size % model:
            raise ValueError(
                f"world size {world_size} is not a multiple of tp {tp} x cp {cp} x pp {pp} "
                f"= {model}"
            )
        return cls(tp=tp, cp=cp, dp=world_size // model, pp=pp, order=order)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def size_of(self, axis: Axis) -> int:
        return int(getattr(self, axis))

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank at a position. Raises ValueError for a position outside the grid."""
        position = Coordinates(tp, cp, dp, pp)
        rank, stride = 0, 1
        for axis in self._axes:
            index, size = getattr(position, axis), self.size_of(axis)
            if not 0 <= index < size:
                raise ValueError(f"{axis} position {index} is outside 0..{size - 1}")
            rank += stride * index
            stride *= size
        return rank

    def coordinates_of(self, rank: int) -> Coordinates:
        """Position of a global rank: the inverse of `rank_of`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        position = {}
        for axis in self._axes:
            rank, position[axis] = divmod(rank, self.size_of(axis))
        return Coordinates(**position)

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Rank lists that differ only along `axes`, ordered by first rank; ranks ascend.

        `groups("dp")` are the data-parallel groups, `groups("tp", "pp")` the model-parallel ones.
        """
        fixed = [axis for axis in AXES if axis not in axes]
        ranks = range(self.world_size)
        key = {r: tuple(getattr(self.coordinates_of(r), axis) for axis in fixed) for r in ranks}
        gathered: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            gathered.setdefault(key[rank], []).append(rank)
        expected = math.prod(self.size_of(axis) for axis in axes)
        assert all(len(group) == expected for group in gathered.values()), "the grid is dense"
        return list(gathered.values())

    def group_of(self, rank: int, *axes: Axis) -> list[int]:
        """The one group along `axes` that holds `rank`."""
        home = self.coordinates_of(rank)
        spans = [
            range(self.size_of(axis)) if axis in axes else [getattr(home, axis)] for axis in AXES
        ]
        return sorted(
            self.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp, pp in itertools.product(*spans)
        )

    @property
    def _axes(self) -> list[Axis]:
        """The axes, fastest first."""
        return [axis for axis in self.order.split("-") if axis != "ep"]  # type: ignore[misc]
