"""Plans that need no schedule: evaluation (forwards only)."""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..placement import Placement
from ..plan import Plan


def plan_forward_only(placement: Placement, num_microbatches: int) -> Plan:
    """Every stage's forwards, micro-batch by micro-batch: the evaluation plan of any placement.

    A rank runs its stages in model order for each micro-batch, so a later stage waits for an
    earlier one at most as long as the data flow demands in the first micro-batch.
    """
    programs = [
        [Instruction(Op.F, stage, j) for j in range(num_microbatches) for stage in sorted(held)]
        for held in placement.stages_by_rank
    ]
    return Plan.of("forward-only", placement, num_microbatches, programs)
