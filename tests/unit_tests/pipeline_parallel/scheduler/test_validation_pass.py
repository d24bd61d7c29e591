"""The check of the last optimizer step in the next warm-up: where it goes, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from brute_force import is_complete, runs_to_the_end

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import lower
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.reduction import state_reductions
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.validation import (
    add_validation,
    without_validation,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

SIZES = [*((p, m) for p in (1, 2, 3, 4) for m in (1, 3, 8)), (6, 12)]
TIMES = [(1.0, 1.0, 1.0, 0.0), (2.0, 3.0, 1.0, 0.0), (1.0, 1.0, 1.0, 0.25), (1.0, 2.0, 2.0, 3.0)]

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    return plan_schedule(name, PlanRequest(num_ranks=ranks, num_microbatches=microbatches))


def costs_of(plan: Plan, times: tuple[float, float, float, float]) -> Costs:
    forward, input_grad, weight_grad, transfer = times
    return Costs.uniform(
        plan.placement,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        transfer=transfer,
    )


def check_steps(plan: Plan) -> list[int]:
    """Per rank, at which step its only PV is."""
    places = []
    for program in plan.programs:
        (step,) = (step for step, i in enumerate(program) if i.op is Op.PV)
        places.append(step)
    return places


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_is_valid_whatever_the_times(name: str, ranks: int, microbatches: int) -> None:
    """One PV on every rank, in front only of what may wait for it; the rest stays in order."""
    plan = plan_of(name, ranks, microbatches)
    for times in (None, *TIMES):
        costs = costs_of(plan, times) if times else None
        checked = add_validation(plan, costs)
        validate(checked)
        validate(state_reductions(checked))
        assert is_complete(checked) and runs_to_the_end(checked)
        assert without_validation(checked) == plan
        assert Plan.from_text(checked.to_text()) == checked
        last = plan.placement.last_stage
        for program, step in zip(checked.programs, check_steps(checked), strict=True):
            assert all(i.op is Op.F and i.stage != last for i in program[:step])
        assert lower(checked)


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_costs_nothing_with_equal_times(name: str, ranks: int, microbatches: int) -> None:
    plan = plan_of(name, ranks, microbatches)
    costs = Costs.uniform(plan.placement)
    checked, bare = simulate(add_validation(plan), costs), simulate(plan, costs)
    assert checked.longest_span <= bare.longest_span
    assert checked.work == bare.work and checked.peaks == bare.peaks


def test_leaves_out_nothing_but_the_checks() -> None:
    plan = plan_of("zb-v", 4, 8)
    assert without_validation(plan) == plan
    assert without_validation(add_validation(plan)) == plan


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
def test_ranks_check_behind_forwards_where_they_can(name: str) -> None:
    """Rank 0 is told last, so it must have work to do meanwhile: at p = 4 several forwards.

    The rank of the last stage cannot put off its first forward there.
    """
    plan = plan_of(name, 4, 12)
    steps = check_steps(add_validation(plan))
    assert steps[0] >= 2
    last_rank = plan.placement.rank_of(plan.placement.last_stage)
    limit = plan.programs[last_rank].index(Instruction(Op.F, plan.placement.last_stage, 0))
    assert steps[last_rank] <= limit


def moved(plan: Plan, rank: int, step: int | None) -> Plan:
    """The plan with a rank's PV moved to a step, or removed."""
    programs = [list(program) for program in plan.programs]
    check = programs[rank].pop(check_steps(plan)[rank])
    if step is not None:
        programs[rank].insert(step, check)
    return Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs)


@every_schedule
def test_a_late_or_missing_check_is_refused(name: str) -> None:
    plan = add_validation(plan_of(name, 3, 4))
    for rank, program in enumerate(plan.programs):
        bare = [i for i in program if i.op is not Op.PV]
        last = plan.placement.last_stage
        limit = next(s for s, i in enumerate(bare) if i.op is not Op.F or i.stage == last)
        with pytest.raises(ScheduleError, match=f"rank {rank} step {limit + 1}: .* too late: "):
            validate(moved(plan, rank, limit + 1))
        with pytest.raises(ScheduleError, match=f"rank {rank} has no PV, but other ranks have"):
            validate(moved(plan, rank, None))


@pytest.mark.parametrize(
    ("rank", "wrong", "words"),
    [
        (1, "1PV1", "1PV1 is no check of this rank's last optimizer step; write 1PV0"),
        (1, "1PV0", "1PV0 checks the last optimizer step twice"),
    ],
)
def test_a_wrong_check_is_refused(rank: int, wrong: str, words: str) -> None:
    plan = add_validation(plan_of("zb-h1", 3, 4))
    programs = [list(program) for program in plan.programs]
    programs[rank].insert(0, Instruction.parse(wrong))
    with pytest.raises(ScheduleError) as caught:
        validate(Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs))
    assert words in str(caught.value)


@every_schedule
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 5), (3, 4), (4, 8)])
def test_void_messages_are_those_sent_before_the_senders_check(
    name: str, ranks: int, microbatches: int
) -> None:
    """Counted here by hand from the plan: outputs of forwards that come before a sender's PV."""
    plan = add_validation(plan_of(name, ranks, microbatches))
    steps = check_steps(plan)
    expected: dict[tuple[int, int], int] = {}
    for rank, step in enumerate(steps):
        for instruction in itertools.islice(plan.programs[rank], step):
            target = plan.placement.rank_of(instruction.stage + 1)
            if target != rank:
                expected[rank, target] = expected.get((rank, target), 0) + 1
    found = {
        (channel.source, channel.target): count
        for program in lower(plan)
        for channel, count in program.void
        if count and channel.kind == "act"
    }
    assert found == expected
