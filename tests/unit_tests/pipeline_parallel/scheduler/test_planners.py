"""What holds for every registered schedule, whatever its order: also m < p, m = 1, p = 1."""

from __future__ import annotations

import dataclasses

import pytest
from brute_force import is_complete, runs_to_the_end

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op, ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.reduction import state_reductions
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.planners.no_pipeline import (
    plan_forward_only,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import peak_memory, simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 5, 8, 13)]
LOOPED = [name for name, schedule in SCHEDULES.items() if schedule.takes_chunks]

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def request_for(ranks: int, microbatches: int, **options: object) -> PlanRequest:
    return PlanRequest(num_ranks=ranks, num_microbatches=microbatches, **options)  # type: ignore[arg-type]


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_plan_is_valid(name: str, ranks: int, microbatches: int) -> None:
    plan = plan_schedule(name, request_for(ranks, microbatches))
    validate(plan)
    assert is_complete(plan) and runs_to_the_end(plan)
    assert (plan.schedule, plan.num_microbatches) == (name, microbatches)
    assert plan.placement == SCHEDULES[name].placement_for(ranks)
    assert Plan.from_text(plan.to_text()) == plan
    validate(state_reductions(plan))


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_any_number_of_chunks(name: str, chunks: int, ranks: int, microbatches: int) -> None:
    plan = plan_schedule(name, request_for(ranks, microbatches, num_chunks=chunks))
    validate(plan)
    assert plan.placement == Placement.looped(ranks, chunks)


@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_group_size(name: str, ranks: int) -> None:
    for group_size in range(ranks, 2 * ranks + 2):
        for microbatches in range(1, 3 * ranks + 2):
            validate(plan_schedule(name, request_for(ranks, microbatches, group_size=group_size)))


@every_schedule
def test_backward_is_split_as_registered(name: str) -> None:
    plan = plan_schedule(name, request_for(4, 8))
    assert any(i.op is Op.B for i in plan.instructions()) == SCHEDULES[name].splits_backward


@every_schedule
def test_planning_is_deterministic(name: str) -> None:
    """Rank 0's plan is broadcast, but a resumed run must find the same one."""
    first, second = (plan_schedule(name, request_for(4, 7)) for _ in range(2))
    assert first == second


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (3, 2), (4, 9)])
def test_memory_limits_are_kept(name: str, ranks: int, microbatches: int) -> None:
    """A limit vector as large as the plan's own peaks is kept; a hopeless one is refused."""
    free = plan_schedule(name, request_for(ranks, microbatches))
    costs = Costs.uniform(free.placement)
    limits = peak_memory(free, costs)
    kept = plan_schedule(name, request_for(ranks, microbatches, memory_limits=limits))
    validate(kept, memory_limits=limits)
    hopeless = (*limits[:-1], 0.4)
    with pytest.raises(ScheduleError, match=r"\blimit"):
        plan_schedule(name, request_for(ranks, microbatches, memory_limits=hopeless))


@every_schedule
def test_unequal_costs_are_taken(name: str) -> None:
    """Embedding and head make stages unequal; the plan must still be valid."""
    placement = SCHEDULES[name].placement_for(3)
    costs = dataclasses.replace(
        Costs.uniform(placement, forward=3.0, input_grad=2.5, weight_grad=1.5, transfer=0.2),
        forward=tuple(1.0 + s % 2 for s in range(placement.num_stages)),
    )
    plan = plan_schedule(name, request_for(3, 6, costs=costs))
    validate(plan, costs=costs)
    assert simulate(plan, costs).bubble_rate("makespan") < 0.6


@every_schedule
def test_costs_of_another_placement_are_refused(name: str) -> None:
    costs = Costs.uniform(Placement.plain(7))
    with pytest.raises(ScheduleError, match="costs are given for 7 stages"):
        plan_schedule(name, request_for(4, 6, costs=costs))


def test_a_fixed_order_names_the_memory_it_needs() -> None:
    with pytest.raises(ScheduleError) as caught:
        plan_schedule("1f1b", request_for(4, 8, memory_limits=(4.0, 2.5, 2.0, 1.0)))
    assert str(caught.value) == (
        "1f1b needs 3 of activation memory on rank 1, above its limit 2.5; "
        "raise the limit or choose a schedule that needs less"
    )


def test_zb_interleaved_keeps_any_limit_that_passes_a_microbatch() -> None:
    """Searched within limits; a group size asks for the order by hand, which needs its own."""
    for limit in (3.0, 2.5, 1.0):
        plan = plan_schedule("zb-interleaved", request_for(4, 8, memory_limits=(limit,) * 4))
        validate(plan, memory_limits=(limit,) * 4)
    with pytest.raises(ScheduleError, match="zb-interleaved needs 4 "):
        plan_schedule("zb-interleaved", request_for(4, 8, memory_limits=(3.0,) * 4, group_size=4))


def test_interleaved_takes_a_partial_group_to_keep_a_limit() -> None:
    free = plan_schedule("interleaved", request_for(4, 7))
    costs = Costs.uniform(free.placement)
    assert peak_memory(free, costs)[0] == 7
    limits = (5.5,) * 4
    plan = plan_schedule("interleaved", request_for(4, 7, memory_limits=limits))
    validate(plan, memory_limits=limits)
    assert simulate(plan, costs).makespan > simulate(free, costs).makespan
    with pytest.raises(ScheduleError, match=r"interleaved needs 5.5 "):
        plan_schedule("interleaved", request_for(4, 8, memory_limits=(5.0,) * 4))


def test_dualpipe_v_runs_backwards_first_to_keep_a_limit() -> None:
    limits = (4.0,) * 4
    plan = plan_schedule("dualpipe-v", request_for(4, 12, memory_limits=limits))
    validate(plan, memory_limits=limits)
    with pytest.raises(ScheduleError, match=r"dualpipe-v needs 4 .* limit 3.5"):
        plan_schedule("dualpipe-v", request_for(4, 12, memory_limits=(3.5,) * 4))


def test_group_sizes_that_would_deadlock_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"group_size is 3, but interleaved needs .* 4"):
        plan_schedule("interleaved", request_for(4, 8, group_size=3))
    with pytest.raises(ScheduleError, match=r"group_size is 2, but zb-interleaved needs .* 3"):
        plan_schedule("zb-interleaved", request_for(5, 8, group_size=2))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 9])
def test_evaluation_plans(ranks: int, microbatches: int) -> None:
    """Forwards only: valid on any placement, and without repeated bubbles."""
    for placement in (
        Placement.plain(ranks),
        Placement.looped(ranks, 3),
        Placement.v_shape(ranks),
        Placement.v_shape(ranks + 1),
    ):
        plan = plan_forward_only(placement, microbatches)
        validate(plan)
        assert is_complete(plan) and runs_to_the_end(plan)
        chunks = placement.max_chunks
        timeline = simulate(plan, Costs.uniform(placement, forward=float(chunks)))
        assert timeline.bubble("makespan") <= chunks * (placement.num_ranks - 1)
        if microbatches % ranks == 0 and placement.name in ("plain", "looped"):
            assert timeline.bubble("makespan") == placement.num_ranks - 1
