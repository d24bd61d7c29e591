"""fp32 main gradients of one stage in one flat tensor, cut so that data-parallel ranks can share.

Each parameter has a region whose length is a multiple of the data-parallel size; slice d of
every region belongs to data-parallel rank d. Slices depend on the parameter and the data-parallel
size alone, never on which other parameters a stage holds, so sums over slices round alike for
every pipeline size (design: numerics do not depend on the schedule).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.core.weight_grad_store import GradTarget

# Regions and slices start at multiples of 64 bytes in every dtype of 2 bytes or more: matrix
# kernels may round differently on differently aligned data.
_ALIGNMENT = 32


class Region(NamedTuple):
    """One parameter's (or further use's) part of the flat buffer, in elements."""

    name: str  # global parameter name
    target: torch.nn.Parameter | GradTarget
    start: int
    numel: int
    slice_numel: int  # of each data-parallel rank, padding included

    @property
    def parameter(self) -> torch.nn.Parameter:
        return self.target.parameter if isinstance(self.target, GradTarget) else self.target


class GradBuffer:
    """The main gradients of `named_targets`, all in one fp32 tensor; sets each `main_grad`."""

    def __init__(
        self,
        named_targets: Sequence[tuple[str, torch.nn.Parameter | GradTarget]],
        data_parallel_size: int,
    ) -> None:
        self.data_parallel_size = data_parallel_size
        self.regions: list[Region] = []
        end = 0
        for name, target in named_targets:
            parameter = target.parameter if isinstance(target, GradTarget) else target
            numel = parameter.numel()
            share = -(-numel // data_parallel_size)
            slice_numel = -(-share // _ALIGNMENT) * _ALIGNMENT
            self.regions.append(Region(name, target, end, numel, slice_numel))
            end += slice_numel * data_parallel_size
        device = self.regions[0].parameter.device if self.regions else None
        self.data = torch.zeros(end, dtype=torch.float32, device=device)
        for region in self.regions:
            view = self.data[region.start : region.start + region.numel]
            region.target.main_grad = view.view(region.parameter.shape)  # type: ignore[union-attr]

    def zero(self) -> None:
        self.data.zero_()

    def region_data(self, region: Region) -> torch.Tensor:
        """A region with its padding: (data_parallel_size * slice_numel,)."""
        return self.data[region.start : region.start + region.slice_numel * self.data_parallel_size]

    def slices(self, region: Region) -> torch.Tensor:
        """A region as (data_parallel_size, slice_numel); padding is zero."""
        return self.region_data(region).view(self.data_parallel_size, region.slice_numel)
