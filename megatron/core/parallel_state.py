"""Megatron's getters over this process's one `ProcessGroupCollection`, for entry scripts.

New code in `megatron.core` does not call these: it is given the collection, or a stage's context.
The module-level holder below is the price of Megatron's interface.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.process_groups_config import ProcessGroupCollection

_held: list[ProcessGroupCollection] = []  # empty, or the one collection of this process


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
) -> ProcessGroupCollection:
    """Build this process's groups and hold them. Raises ValueError if the sizes do not fit."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = ParallelSizes.for_world(
        world_size,
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
    )
    timeout = datetime.timedelta(minutes=distributed_timeout_minutes)
    return hold(ProcessGroupCollection.build(sizes, timeout))


def hold(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Let the getters below answer from `groups`."""
    destroy_model_parallel()
    _held.append(groups)
    return groups


def destroy_model_parallel() -> None:
    """Forget the groups (torch.distributed destroys them with the process group)."""
    _held.clear()


def model_parallel_is_initialized() -> bool:
    return bool(_held)


is_initialized = model_parallel_is_initialized


def get_process_groups() -> ProcessGroupCollection:
    """The collection the getters answer from."""
    if not _held:
        raise RuntimeError("model parallel groups are not built; call initialize_model_parallel")
    return _held[0]


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    return get_process_groups().tp


def get_tensor_model_parallel_world_size() -> int:
    return get_process_groups().sizes.tp


def get_tensor_model_parallel_rank() -> int:
    return get_process_groups().position.tp


def get_context_parallel_group() -> dist.ProcessGroup | None:
    return get_process_groups().cp


def get_context_parallel_world_size() -> int:
    return get_process_groups().sizes.cp


def get_context_parallel_rank() -> int:
    return get_process_groups().position.cp


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup | None:
    return get_process_groups().dp


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return get_process_groups().sizes.dp


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return get_process_groups().position.dp


def get_pipeline_model_parallel_group() -> dist.ProcessGroup | None:
    return get_process_groups().pp


def get_pipeline_model_parallel_world_size() -> int:
    return get_process_groups().sizes.pp


def get_pipeline_model_parallel_rank() -> int:
    return get_process_groups().position.pp


def get_model_parallel_group() -> dist.ProcessGroup | None:
    return get_process_groups().model


def get_embedding_group() -> dist.ProcessGroup | None:
    return get_process_groups().embedding


def get_pipeline_model_parallel_first_rank() -> int:
    return _pipeline_ranks()[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return _pipeline_ranks()[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    ranks = _pipeline_ranks()
    return ranks[(get_pipeline_model_parallel_rank() + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    return _pipeline_ranks()[get_pipeline_model_parallel_rank() - 1]


def _pipeline_ranks() -> list[int]:
    groups = get_process_groups()
    return groups.sizes.group_of(groups.rank, "pp")
