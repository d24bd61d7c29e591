"""From the loss dicts of micro-batches to the losses that are logged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class LossMeter:
    """Sums of (sum, count) per loss name; the mean is their quotient over all replicas.

    A loss dict's value is a 2-vector or pair [sum, count], or a single number, which counts once.
    They are added up in fp64: in fp32 a count of tokens stops to be exact at 16.7 million.
    """

    def __init__(self, data_parallel_group: dist.ProcessGroup | None) -> None:
        self._group = data_parallel_group
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, reported: Sequence[dict[str, Any]]) -> None:
        """The dicts of one iteration's micro-batches, in micro-batch order."""
        for losses in reported:
            for name, value in losses.items():
                pair = _pair_of(value)
                total = self._totals.get(name)
                self._totals[name] = pair if total is None else total + pair

    def means(self) -> dict[str, float]:
        """Mean per name. Collective over the replicas of a rank that has the loss."""
        if not self._totals:
            return {}
        names = list(self._totals)
        totals = torch.stack([self._totals[name] for name in names])
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        sums, counts = totals.cpu().unbind(dim=1)
        return dict(zip(names, (sums / counts.clamp(min=1)).tolist(), strict=True))


def _pair_of(value: Any) -> torch.Tensor:
    """[sum, count] in fp64, without history."""
    if isinstance(value, (tuple, list)):
        return torch.stack([_fp64(part) for part in value])
    tensor = _fp64(value)
    if tensor.numel() == 2:
        return tensor.view(2)
    return torch.stack([tensor.view(()), torch.ones_like(tensor).view(())])


def _fp64(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().to(torch.float64)
