"""What happens to main gradients between the last backward and the optimizer step.

Order: uses of a tied embedding are summed, then data-parallel ranks, then (per-token mode) all
gradients are divided once by the global token count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.weight_grad_store import GradTarget


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    *,
    embedding_group: dist.ProcessGroup | None = None,
) -> None:
    """Complete the gradients of this rank's stages.

    `embedding_group` joins the two ranks that hold a tied embedding and its head when they
    differ. `num_tokens` (per-token mode) is the global batch's count.
    """
    _sum_tied_uses(model, embedding_group)
    for chunk in model:
        chunk.finish_grad_sync()
    if num_tokens is not None:
        scale = 1.0 / max(1, int(num_tokens))
        for chunk in model:
            for buffer in chunk.buffers_with_grads:
                buffer.data.mul_(scale)


def _sum_tied_uses(
    model: Sequence[DistributedDataParallel], embedding_group: dist.ProcessGroup | None
) -> None:
    """One gradient for a tied weight: the sum of its uses as embedding and head, wherever held."""
    regions = [region for chunk in model for region in chunk.tied_buffer.regions]
    further_uses = [r.target for r in regions if isinstance(r.target, GradTarget)]
    for use in further_uses:
        use.parameter.main_grad.add_(use.main_grad)  # type: ignore[attr-defined]
    if embedding_group is not None and not further_uses:
        for region in regions:
            main_grad: torch.Tensor = region.parameter.main_grad  # type: ignore[attr-defined]
            dist.all_reduce(main_grad, group=embedding_group)
