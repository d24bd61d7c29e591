"""Two iterations in a row on one timeline: what post-validation of the optimizer step gains.

The second iteration's micro-batches are numbered on from the first's.
"""

from __future__ import annotations

from ..costs import Costs
from ..passes.validation import add_validation
from ..plan import Plan, Program
from ..simulate import Timeline, simulate


def with_meeting(plan: Plan, costs: Costs) -> Timeline:
    """All ranks wait for the last one before they step and go on."""
    one = simulate(plan, costs)

    def twice(times: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple((*row, *(time + one.makespan for time in row)) for row in times)

    return Timeline(_twice(plan, plan), costs, twice(one.starts), twice(one.ends))


def with_post_validation(plan: Plan, costs: Costs) -> Timeline:
    """Each rank steps and goes on by itself; a PV in the second warm-up checks its step."""
    return simulate(_twice(plan, add_validation(plan, costs)), costs)


def _twice(first: Plan, second: Plan) -> Plan:
    programs = [
        (*early, *_numbered_on(late, first.num_microbatches))
        for early, late in zip(first.programs, second.programs, strict=True)
    ]
    return Plan.of(first.schedule, first.placement, 2 * first.num_microbatches, programs)


def _numbered_on(program: Program, by: int) -> Program:
    return tuple(i if i.op.is_mark else i._replace(microbatch=i.microbatch + by) for i in program)
