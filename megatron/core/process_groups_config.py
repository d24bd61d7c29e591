"""The process groups of this rank, built once from the parallel sizes and passed down."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from megatron.core.parallel_sizes import Axis, Coordinates, ParallelSizes


@dataclass(frozen=True)
class ProcessGroupCollection:
    """This rank's groups. A group of one rank is None: there is nobody to talk to."""

    sizes: ParallelSizes
    rank: int
    world: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    model: dist.ProcessGroup | None  # tensor and pipeline: one replica of the model
    embedding: dist.ProcessGroup | None  # first and last pipeline rank of one pipeline

    @property
    def position(self) -> Coordinates:
        return self.sizes.coordinates_of(self.rank)

    @classmethod
    def build(
        cls, sizes: ParallelSizes, timeout: datetime.timedelta | None = None
    ) -> ProcessGroupCollection:
        """Make every group of the job. Collective; without torch.distributed, one rank alone."""
        if not dist.is_initialized():
            if sizes.world_size != 1:
                raise ValueError(
                    f"{sizes.world_size} ranks need torch.distributed; start them with torchrun"
                )
            return cls(sizes, 0, *[None] * 7)
        if dist.get_world_size() != sizes.world_size:
            raise ValueError(
                f"the sizes tp {sizes.tp} x cp {sizes.cp} x dp {sizes.dp} x pp {sizes.pp} need "
                f"{sizes.world_size} ranks, but torch.distributed has {dist.get_world_size()}"
            )

        def mine(*axes: Axis) -> dist.ProcessGroup | None:
            return _my_group(sizes.groups(*axes), timeout)

        return cls(
            sizes=sizes,
            rank=dist.get_rank(),
            world=dist.group.WORLD,
            tp=mine("tp"),
            cp=mine("cp"),
            dp=mine("dp"),
            pp=mine("pp"),
            model=mine("tp", "pp"),
            embedding=_my_group(_first_and_last(sizes.groups("pp")), timeout),
        )


def _first_and_last(pipelines: list[list[int]]) -> list[list[int]]:
    return [[ranks[0], ranks[-1]] for ranks in pipelines]


def _my_group(
    rank_lists: list[list[int]], timeout: datetime.timedelta | None
) -> dist.ProcessGroup | None:
    """Make a group of each list; every rank of the job takes part in making each."""
    if len({*rank_lists[0]}) == 1:
        return None
    me, found = dist.get_rank(), None
    for ranks in rank_lists:
        group = dist.new_group(ranks, timeout=timeout)
        if me in ranks:
            found = group
    return found
