"""What the optimizer steps on: each parameter's fp32 main copy, or this rank's slice of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.grad_buffer import GradBuffer, Region
from megatron.core.weight_grad_store import GradTarget


def global_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that puts layer 2 before layer 10: the same order on every rank."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


@dataclass
class OptimizerEntry:
    """One parameter of this rank.

    `main` is what is stepped on: the parameter itself (fp32), an fp32 copy (16-bit parameters),
    or with a distributed optimizer this rank's slice (flat, padded) of either.
    """

    name: str  # global parameter name
    parameter: torch.nn.Parameter
    main: torch.Tensor
    region: Region
    buffer: GradBuffer
    slice_index: int | None  # data-parallel rank whose slice this is; None: the whole parameter
    param_slices: torch.Tensor | None  # (dp, slice) storage of the parameter, when sliced
    is_tied_copy: bool  # counted with the embedding it copies, not by itself

    @property
    def grad(self) -> torch.Tensor:
        """The main gradient in the shape of `main`."""
        if self.slice_index is None:
            return self.parameter.main_grad  # type: ignore[attr-defined]
        return self.buffer.slices(self.region)[self.slice_index]

    def copy_main_to_parameter(self) -> None:
        """Write what was stepped into the model's parameter (or this rank's slice of it)."""
        if self.param_slices is not None:
            assert self.slice_index is not None
            target = self.param_slices[self.slice_index]
        else:
            target = self.parameter.data
        if target.data_ptr() != self.main.data_ptr():
            target.copy_(self.main)

    def copy_parameter_to_main(self) -> None:
        """The other way, after parameters were loaded or changed by hand."""
        with torch.no_grad():
            if self.param_slices is None:
                source = self.parameter.data
            else:
                assert self.slice_index is not None
                source = self.param_slices[self.slice_index]
            if source.data_ptr() != self.main.data_ptr():
                self.main.copy_(source)


def build_entries(
    model: Sequence[DistributedDataParallel], *, sliced: bool
) -> list[OptimizerEntry]:
    """One entry per trainable parameter of this rank's stages, in global parameter order."""
    entries = []
    for chunk in model:
        for buffer in chunk.buffers_with_grads:
            for region in buffer.regions:
                if not isinstance(region.target, GradTarget):
                    entries.append(_entry(chunk, buffer, region, sliced=sliced))
    return sorted(entries, key=lambda entry: global_order(entry.name))


def _entry(
    chunk: DistributedDataParallel, buffer: GradBuffer, region: Region, *, sliced: bool
) -> OptimizerEntry:
    parameter = region.parameter
    slices = index = None
    stored = parameter.data
    if sliced:
        slices, index = (
            _slice_storage(parameter, region, buffer.data_parallel_size),
            (chunk.data_parallel_rank),
        )
        stored = slices[index]
    main = stored if stored.dtype is torch.float32 else stored.float()
    return OptimizerEntry(
        name=region.name,
        parameter=parameter,
        main=main.detach(),
        region=region,
        buffer=buffer,
        slice_index=index,
        param_slices=slices,
        is_tied_copy=getattr(parameter, "shared", False),
    )


def _slice_storage(
    parameter: torch.nn.Parameter, region: Region, data_parallel_size: int
) -> torch.Tensor:
    """Move a parameter into padded storage that cuts evenly: (dp, slice_numel)."""
    storage = parameter.data.new_zeros(data_parallel_size * region.slice_numel)
    storage[: region.numel].copy_(parameter.data.view(-1))
    parameter.data = storage[: region.numel].view(parameter.shape)
    return storage.view(data_parallel_size, region.slice_numel)
