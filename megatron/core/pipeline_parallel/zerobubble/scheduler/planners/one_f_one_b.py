"""1F1B: one forward, one backward (arXiv:2104.04473, section 2.2), for a plain placement."""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest


def plan_1f1b(request: PlanRequest) -> Plan:
    """Rank r runs min(p - r - 1, m) warm-up forwards, then alternates, then drains."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    programs = []
    for rank in range(num_ranks):
        forwards = [Instruction(Op.F, rank, j) for j in range(num_microbatches)]
        backwards = [Instruction(Op.BW, rank, j) for j in range(num_microbatches)]
        warmup = min(num_ranks - rank - 1, num_microbatches)
        steady = [i for pair in zip(forwards[warmup:], backwards, strict=False) for i in pair]
        cooldown = backwards[num_microbatches - warmup :]
        programs.append(forwards[:warmup] + steady + cooldown)
    plan = Plan.of("1f1b", Placement.plain(num_ranks), num_microbatches, programs)
    return within_limits(plan, request)
