"""From the command line to the pipeline: placement, plans, layers per stage, stage contexts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.keyed_random import RandomContext
from megatron.core.pipeline_parallel.layer_split import stage_offsets
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.stage_context import StageContext
from megatron.training.config import RunConfig


@dataclass(frozen=True)
class Pipeline:
    """The pipeline a run asked for: where stages live, how many layers each has, how to plan."""

    schedule: str
    placement: Placement
    layers_per_stage: tuple[int, ...]
    plan_for: Callable[[int], Plan]  # number of micro-batches -> training plan

    @classmethod
    def of(cls, run: RunConfig) -> Pipeline:
        """Raises ScheduleError or ValueError, naming the flag, for a pipeline that cannot be."""
        return cls(run.pipeline_schedule, run.placement, run.stage_layers, _planner(run))

    def stage_contexts(self, groups: ProcessGroupCollection, seed: int) -> list[StageContext]:
        """One per stage of this rank, in chunk order; they share one random context."""
        random = RandomContext(
            seed=seed,
            data_parallel_rank=groups.position.dp,
            tensor_parallel_rank=groups.position.tp,
        )
        placement, offsets = self.placement, stage_offsets(self.layers_per_stage)
        together = placement.rank_of(0) == placement.rank_of(placement.last_stage)
        return [
            StageContext(
                stage=stage,
                num_stages=placement.num_stages,
                layer_offset=offsets[stage],
                num_layers=self.layers_per_stage[stage],
                tied_head="shared" if together else "copy",
                random=random,
                tensor_parallel_group=groups.tp,
                tensor_parallel_size=groups.sizes.tp,
                tensor_parallel_rank=groups.position.tp,
            )
            for stage in placement.stages_by_rank[groups.position.pp]
        ]

    @property
    def first_rank(self) -> int:
        return self.placement.rank_of(0)

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that computes the loss: under a V placement the first."""
        return self.placement.rank_of(self.placement.last_stage)


def _planner(run: RunConfig) -> Callable[[int], Plan]:
    name, num_ranks = run.pipeline_schedule, run.sizes.pp
    if run.plan_file is not None:
        return _plan_from_file(run.plan_file)

    looped = run.placement_kind == "looped"
    chunks = run.placement.max_chunks if looped else None
    group_size = run.interleave_group_size if looped else None
    limits = None
    if run.pending_backward_limit is not None:
        limits = (run.pending_backward_limit,) * num_ranks

    @functools.cache  # a search takes seconds for many ranks, and several parts of a run ask
    def plan_for(num_microbatches: int) -> Plan:
        request = PlanRequest(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=chunks,
            group_size=group_size,
            memory_limits=limits,
        )
        return plan_schedule(name, request)

    return plan_for


def _plan_from_file(path: str) -> Callable[[int], Plan]:
    """A user's plan fits one number of micro-batches (its ranks are checked with the flags)."""
    plan = Plan.load(path)

    def plan_for(num_microbatches: int) -> Plan:
        if plan.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule {path} is a plan for {plan.num_microbatches} micro-batches, "
                f"but an iteration has {num_microbatches}; change --global-batch-size or the plan"
            )
        return plan

    return plan_for
