"""One stage's module with its main gradients, and their sum over data-parallel ranks.

The executor calls `collect_autograd_gradients` after each backward and `start_grad_sync` after a
stage's last weight gradient; no framework hook is involved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.grad_buffer import GradBuffer, Region
from megatron.core.weight_grad_store import GradTarget

TIED_NAME = "embedding.word_embeddings.weight"


class DistributedDataParallel(torch.nn.Module):
    """Wraps the module of one stage.

    Tied embedding weights have a buffer of their own: their uses are summed before the
    data-parallel sum (user-needs: tied embeddings with a distributed optimizer), so it cannot
    start with the rest of the stage.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ddp_config, self.module = config, ddp_config, module
        self._group = data_parallel_group
        size = dist.get_world_size(data_parallel_group) if data_parallel_group else 1
        self.data_parallel_size = size
        self.data_parallel_rank = dist.get_rank(data_parallel_group) if data_parallel_group else 0
        plain, tied = self._targets()
        self.buffer = GradBuffer(plain, size)
        self.tied_buffer = GradBuffer(tied, size)
        self._by_autograd = [
            r.parameter for r in self.regions() if not isinstance(r.target, GradTarget)
        ]
        self._pending: list[dist.Work] = []
        self._started = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        self.module.set_input_tensor(tensor)  # type: ignore[operator]

    @property
    def buffers_with_grads(self) -> tuple[GradBuffer, GradBuffer]:
        return (self.buffer, self.tied_buffer)

    def regions(self) -> Iterator[Region]:
        for buffer in self.buffers_with_grads:
            yield from buffer.regions

    def zero_grad_buffer(self) -> None:
        for buffer in self.buffers_with_grads:
            buffer.zero()
        self._started = False

    def collect_autograd_gradients(self) -> None:
        """Add what autograd left in `.grad` (norm weights, biases) to the main gradients."""
        for parameter in self._by_autograd:
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
                parameter.grad = None

    def start_grad_sync(self) -> None:
        """Start the data-parallel sum of all but the tied weights. Called once an iteration."""
        assert not self._started, "a stage's gradients are summed once an iteration"
        self._started = True
        self._reduce(self.buffer)

    def finish_grad_sync(self) -> None:
        """Start what has not been started, the tied weights among it, and wait for all of it."""
        if not self._started:
            self.start_grad_sync()
        self._reduce(self.tied_buffer)
        for work in self._pending:
            work.wait()
        self._pending.clear()

    def broadcast_params(self) -> None:
        """Copy data-parallel rank 0's parameters to all."""
        if self._group is None:
            return
        source = dist.get_global_rank(self._group, 0)
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, source, group=self._group)

    def _targets(
        self,
    ) -> tuple[list[tuple[str, Any]], list[tuple[str, torch.nn.Parameter | GradTarget]]]:
        """(targets summed with the stage, targets of tied weights), by global name."""
        module: Any = self.module
        name_of = getattr(module, "global_parameter_name", lambda name: name)
        plain: list[tuple[str, Any]] = []
        tied: list[tuple[str, torch.nn.Parameter | GradTarget]] = []
        is_tied = getattr(module, "share_embeddings_and_output_weights", False)
        for local_name, parameter in module.named_parameters():
            name = name_of(local_name)
            if parameter.requires_grad:
                (tied if is_tied and name == TIED_NAME else plain).append((name, parameter))
        use = getattr(getattr(module, "output_layer", None), "tied_use", None)
        if use is not None and use.parameter.requires_grad:
            tied.append((TIED_NAME, use))
        return plain, tied

    def _reduce(self, buffer: GradBuffer) -> None:
        """Start the sum of each parameter's region by itself, never of the buffer as a whole.

        With three replicas or more the order in which a collective adds an element up depends on
        where in the tensor it lies; within a region that does not depend on what else a stage
        holds. A further use has been added to its parameter and is not summed.
        """
        if self.data_parallel_size == 1:
            return
        for region in buffer.regions:
            if not isinstance(region.target, GradTarget):
                self._pending.append(self._sum(buffer, region))

    def _sum(self, buffer: GradBuffer, region: Region) -> dist.Work:
        """Sum a region over replicas; with a distributed optimizer only this rank's slice of it,
        and the other slices are then undefined."""
        if not self.ddp_config.use_distributed_optimizer:
            return dist.all_reduce(buffer.region_data(region), group=self._group, async_op=True)
        slices = buffer.slices(region)
        return dist.reduce_scatter_single(
            slices[self.data_parallel_rank], slices.view(-1), group=self._group, async_op=True
        )
