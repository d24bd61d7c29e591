"""Puts the check of the last optimizer step into the warm-up of every rank's program.

Optimizer post-validation (arXiv:2401.10241, section 4): the ranks step the optimizer without
meeting, and what the step should have been comes back from the last rank to the first during the
forwards of the next iteration. Each rank reads it at its PV, as late as the message needs and no
later than the first step that could not be taken back.
"""

from __future__ import annotations

from ..costs import Costs
from ..execution import start_times
from ..instruction import Instruction, Op
from ..plan import Plan
from ..validate import first_irrevocable


def add_validation(plan: Plan, costs: Costs | None = None) -> Plan:
    """The training plan with one PV per rank; equal times and free transfers unless given.

    The moments are those of iterations that follow each other without a meeting: a rank begins
    again one longest span after it began. Linear in the number of instructions.
    """
    costs = costs or Costs.uniform(plan.placement)
    # The host reads a message between passes, and ranks are seldom exactly on time.
    allowance = costs.transfer + min(costs.forward) / 2
    starts = start_times(plan, costs)
    moment = _full_value_known(plan, costs, starts, allowance)
    latest = _deadlines(plan, starts)
    programs: list[tuple[Instruction, ...]] = []
    for rank in reversed(range(plan.num_ranks)):
        # Moments rise from the last rank to the first, so no rank checks before what the others
        # need from it to come to theirs: the checks add no cycle.
        moment = min(moment, latest[rank])
        step = sum(start < moment for start in starts[rank])
        check = Instruction(Op.PV, plan.placement.stages_by_rank[rank][0], 0)
        program = plan.programs[rank]
        programs.append((*program[:step], check, *program[step:]))
        if step > 0:
            moment = max(moment, starts[rank][step - 1] + costs.of(program[step - 1]))
        moment += allowance
    return Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs[::-1])


def without_validation(plan: Plan) -> Plan:
    """The plan as it is run when there is no step to validate."""
    programs = [[i for i in program if i.op is not Op.PV] for program in plan.programs]
    return Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs)


def _full_value_known(
    plan: Plan, costs: Costs, starts: list[list[float]], allowance: float
) -> float:
    """When the last rank knows all ranks' part in the step, on the next iteration's clock."""
    known = spans = 0.0
    for program, begun in zip(plan.programs, starts, strict=True):
        end = begun[-1] + costs.of(program[-1])
        known = max(end, known + allowance)
        spans = max(spans, end - begun[0])
    return max(known - spans, 0.0)


def _deadlines(plan: Plan, starts: list[list[float]]) -> list[float]:
    """Per rank, when it must have checked: before its own irrevocable steps, and early enough for
    the ranks before it, which learn of the step from it."""
    latest: list[float] = []
    for rank, begun in enumerate(starts):
        step = first_irrevocable(plan, rank)
        own = begun[step] if step < len(begun) else begun[-1]
        latest.append(min(own, latest[-1]) if latest else own)
    return latest
