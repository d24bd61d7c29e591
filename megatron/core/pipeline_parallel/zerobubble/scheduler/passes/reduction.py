"""Makes the start of each stage's gradient reduction an instruction of its own."""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..plan import Plan
from ..validate import last_weight_grad_steps


def state_reductions(plan: Plan) -> Plan:
    """The plan with an AR for every stage: where it states one, else right after the last W or BW.

    A forward-only plan has nothing to reduce and is returned as it is.
    """
    stated = {ins.stage for ins in plan.instructions() if ins.op is Op.AR}
    due = {
        (plan.placement.rank_of(stage), step): stage
        for stage, step in last_weight_grad_steps(plan).items()
        if stage not in stated
    }
    programs = []
    for rank, program in enumerate(plan.programs):
        steps: list[Instruction] = []
        for step, instruction in enumerate(program):
            steps.append(instruction)
            if (rank, step) in due:
                steps.append(Instruction(Op.AR, due[rank, step], plan.num_microbatches - 1))
        programs.append(steps)
    return Plan.of(plan.schedule, plan.placement, plan.num_microbatches, programs)
