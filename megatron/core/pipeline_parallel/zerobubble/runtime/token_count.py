"""How many tokens a global batch has, told by the rank with the loss to the other pipeline ranks.

In per-token mode every gradient is divided by this number, so every rank needs it before its
optimizer step. The rank that counts tells the others as soon as it has run its last forward, long
before they end: nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.runtime.channels import PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import LossRecord

_TAG = 32


class TokenCount:
    """The count of one iteration."""

    def __init__(
        self,
        groups: PipelineGroups,
        data_parallel_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._data_parallel_group, self._device = data_parallel_group, device
        self._total: torch.Tensor | None = None  # fp64, on the host
        self._leaving: list[dist.Work] = []

    def tell(self, losses: Sequence[LossRecord]) -> None:
        """On the rank with the loss: sum over micro-batches and replicas, start to send."""
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for record in losses:
            if record.num_tokens is not None:
                total += record.num_tokens
        if self._data_parallel_group is not None:
            dist.all_reduce(total, group=self._data_parallel_group)
        self._total = total.cpu()
        for peer in range(self._groups.size):
            if peer != self._groups.rank:
                assert self._groups.control is not None
                self._leaving.append(self._groups.control.send([self._total], peer, _TAG))

    def get(self, loss_rank: int) -> torch.Tensor:
        """The count, on every rank; waits for it where it was not made."""
        if self._total is None:
            assert self._groups.control is not None
            self._total = torch.empty(1, dtype=torch.float64)
            self._groups.control.recv([self._total], loss_rank, _TAG).wait()
        for work in self._leaving:
            work.wait()
        self._leaving.clear()
        return self._total[0]
