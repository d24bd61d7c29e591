"""The memory a rank holds while it runs its program, and limits on it.

What is held follows from the orders alone: a rank runs one instruction at a time, so the times do
not matter.
"""

from __future__ import annotations

from .costs import Costs
from .instruction import Instruction, Op, ScheduleError
from .plan import Plan, Program
from .request import PlanRequest

# Sums of floats may exceed by rounding alone a limit that they should equal.
ROUNDING = 1e-9


def memory_levels(program: Program, costs: Costs) -> list[float]:
    """The memory held once step k has started, at index 2k, and once it has ended, at 2k + 1."""
    stages = range(costs.num_stages)
    taken = {op: [costs.memory_at_start(Instruction(op, s, 0)) for s in stages] for op in Op}
    returned = {op: [costs.memory_at_end(Instruction(op, s, 0)) for s in stages] for op in Op}
    levels = []
    level = 0.0
    for op, stage, _ in program:
        level += taken[op][stage]
        levels.append(level)
        level += returned[op][stage]
        levels.append(level)
    return levels


def peak_memory(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """The most memory that each rank holds."""
    return tuple(max(memory_levels(program, costs), default=0.0) for program in plan.programs)


def within_limits(plan: Plan, request: PlanRequest) -> Plan:
    """The plan itself, or a ScheduleError if it needs more memory than the request allows.

    For planners of a fixed order, which cannot trade memory for time.
    """
    costs = request.costs_for(plan.placement)
    if request.memory_limits is not None:
        peaks = peak_memory(plan, costs)
        for rank, (peak, limit) in enumerate(zip(peaks, request.memory_limits, strict=True)):
            if peak > limit * (1 + ROUNDING):
                raise ScheduleError(
                    f"{plan.schedule} needs {peak:g} of activation memory on rank {rank}, above "
                    f"its limit {limit:g}; raise the limit or choose a schedule that needs less"
                )
    return plan
