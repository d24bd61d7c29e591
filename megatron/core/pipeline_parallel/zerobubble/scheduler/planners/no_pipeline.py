"""Plans that need no schedule: evaluation (forwards only)."""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..placement import Placement
from ..plan import Plan


def plan_forward_only(placement: Placement, num_microbatches: int) -> Plan:
    """Every stage's forwards: the evaluation plan of any placement.

    Each rank runs its forwards in the order of unit time slots in which a micro-batch enters the
    next stage one slot later, so a need is always in an earlier slot. Micro-batches enter in groups
    of g, one per slot, and a group takes v slots per micro-batch on a rank of v stages. With g = p
    a looped rank runs a group through one chunk after the other; on a V, g = 1 never puts two
    forwards of a rank into one slot.
    """
    looped = placement.name in ("plain", "looped")
    group_size = placement.num_ranks if looped else 1
    period = group_size * placement.max_chunks

    def slot(stage: int, microbatch: int) -> int:
        return stage + microbatch // group_size * period + microbatch % group_size

    programs = []
    for held in placement.stages_by_rank:
        visits = sorted((slot(s, j), s, j) for s in held for j in range(num_microbatches))
        programs.append([Instruction(Op.F, stage, j) for _, stage, j in visits])
    return Plan.of("forward-only", placement, num_microbatches, programs)
