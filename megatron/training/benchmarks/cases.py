"""What the benchmarks measure: plans under measured or given costs, and the layers to split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    plan_schedule,
    schedule_named,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Objective
from megatron.training.benchmarks.llama import LlamaSizes
from megatron.training.benchmarks.split import SplitCase


def make_plans(
    schedules: Iterable[str],
    num_ranks: int,
    num_microbatches: int,
    costs_for: Callable[[str, Placement], Costs],
    *,
    objective: Objective,
    remarks: list[str],
) -> tuple[Plan, ...]:
    """One plan per schedule; what a planner refuses is left out, with a line in `remarks`.

    `costs_for(schedule, placement)` are in seconds. A ValueError if nothing is left.
    """
    plans = []
    refusals = []
    for name in schedules:
        request = PlanRequest(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            costs=costs_for(name, schedule_named(name).placement_for(num_ranks)),
            objective=objective,
        )
        try:
            plans.append(plan_schedule(name, request))
        except ScheduleError as error:
            refusals.append(f"p={num_ranks} m={num_microbatches} {name} is left out: {error}")
    if not plans:
        raise ValueError(f"no schedule can be planned: {'; '.join(refusals)}")
    remarks += refusals
    return tuple(plans)


def check_layers(sizes: LlamaSizes, ranks: Sequence[int], schedules: Sequence[str]) -> None:
    """Every stage of every schedule has the same number of layers, or a ValueError says where."""
    for p in ranks:
        for name in schedules:
            stages = schedule_named(name).placement_for(p).num_stages
            if sizes.num_layers % stages:
                raise ValueError(
                    f"--num-layers {sizes.num_layers} does not divide into the {stages} stages of "
                    f"{name} on {p} ranks; give a multiple of {stages}"
                )


def split_cases(
    large: LlamaSizes, tiny: LlamaSizes, *, repeats: int, with_peer: bool
) -> list[SplitCase]:
    """Compute dominates; the host dominates; compute again, with the layer's forward run twice."""
    cases = [("compute", large, False, 1), ("tiny", tiny, False, 20), ("recompute", large, True, 1)]
    return [
        SplitCase(
            name=name,
            sizes=sizes,
            recompute=recompute,
            passes_per_repeat=passes,
            repeats=repeats,
            with_peer=with_peer,
        )
        for name, sizes, recompute, passes in cases
    ]
