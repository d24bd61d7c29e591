"""The global gradient norm, formed so that its rounding does not depend on who owns which layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.core.optimizer.entries import OptimizerEntry, global_order

SlicesOf = Callable[[OptimizerEntry], Sequence[torch.Tensor]]


def grad_slices(entry: OptimizerEntry) -> Sequence[torch.Tensor]:
    """The data-parallel slices of this entry's gradient that this rank accounts for."""
    slices = entry.buffer.slices(entry.region)
    return list(slices) if entry.slice_index is None else [slices[entry.slice_index]]


def main_parameter_slices(entry: OptimizerEntry) -> Sequence[torch.Tensor]:
    """The same slices of the main parameter."""
    return entry.main.reshape(-1).split(entry.region.slice_numel)


class GradNorm:
    """Norms per parameter and data-parallel slice, in one vector in global parameter order.

    `group` joins all ranks that hold different parameters or slices (pipeline ranks; with a
    distributed optimizer data-parallel ranks too). Every rank fills its own places, the vector is
    summed (all other addends are zero, so exactly), and every rank adds up the same numbers in
    the same order.
    """

    def __init__(
        self,
        entries: Sequence[OptimizerEntry],
        group: dist.ProcessGroup | None,
        data_parallel_size: int,
    ) -> None:
        self._entries = [entry for entry in entries if not entry.is_tied_copy]
        self._group = group
        self._data_parallel_size = data_parallel_size
        names = self._all_names()
        self._row = {name: row for row, name in enumerate(names)}

    def squared_norms(self, slices_of: SlicesOf = grad_slices) -> torch.Tensor:
        """fp64 (parameters * data-parallel slices,): this rank's squared norms, zeros elsewhere."""
        total = torch.zeros(len(self._row) * self._data_parallel_size, dtype=torch.float64)
        places, norms = [], []
        for entry in self._entries:
            first = self._row[entry.name] * self._data_parallel_size + (entry.slice_index or 0)
            for offset, row in enumerate(slices_of(entry)):
                places.append(first + offset)
                norms.append(torch.linalg.vector_norm(row))
        if norms:
            total[places] = torch.stack(norms).to(device="cpu", dtype=torch.float64).square()
        return total

    def all_reduce(self, squared: torch.Tensor) -> torch.Tensor:
        """The squared norms of all ranks."""
        if self._group is None or dist.get_world_size(self._group) == 1:
            return squared
        on_device = squared.to(self.communication_device)
        dist.all_reduce(on_device, group=self._group)
        return on_device.cpu()

    def __call__(self, slices_of: SlicesOf = grad_slices) -> float:
        """The global norm; not finite when any gradient is not."""
        return self.total(self.all_reduce(self.squared_norms(slices_of)))

    @staticmethod
    def total(squared: torch.Tensor) -> float:
        """The norm of the squared norms in `squared`: added up in one order on every rank."""
        return float(squared.sum().sqrt())

    def _all_names(self) -> list[str]:
        mine = [entry.name for entry in self._entries]
        gathered: list[list[str]] = [mine]
        if self._group is not None:
            gathered = [[]] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, mine, group=self._group)
        return sorted({name for names in gathered for name in names}, key=global_order)

    @property
    def communication_device(self) -> torch.device:
        """Where this rank's part is, for collectives of the device's backend."""
        return self._entries[0].main.device if self._entries else torch.device("cpu")
