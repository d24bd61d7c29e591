"""ZB: a searched zero-bubble schedule on a plain placement (arXiv:2401.10241, sections 3.1, 5.3).

The paper calls it ZB-1p with a memory limit of p micro-batches and ZB-2p with one of 2p. The order
is made for the request's costs, within each rank's limit.
"""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.engine import search_plan
from .one_f_one_b import plan_1f1b
from .zb_handmade import plan_zb_h1, plan_zb_h2
from .zb_rounds import plan_zb_rounds


def plan_zb(request: PlanRequest) -> Plan:
    """The fastest order found within the memory limits.

    Without limits: on every rank what p micro-batches take, the most that 1F1B holds anywhere.
    """
    placement = Placement.plain(request.num_ranks)
    limits = request.memory_limits
    if limits is None:
        most = request.num_ranks * max(request.costs_for(placement).held_f_to_b)
        limits = (most,) * request.num_ranks
    return search_plan(
        "zb",
        placement,
        request,
        split=True,
        memory_limits=limits,
        seeds=(_split_1f1b, plan_zb_h1, plan_zb_h2, plan_zb_rounds),
    )


def _split_1f1b(request: PlanRequest) -> Plan:
    """1F1B with each W right behind its B: never slower than 1F1B, and in its memory."""
    fused = plan_1f1b(request)
    programs = [
        [
            Instruction(op, stage, microbatch)
            for whole, stage, microbatch in program
            for op in ((Op.B, Op.W) if whole is Op.BW else (whole,))
        ]
        for program in fused.programs
    ]
    return Plan.of("zb", fused.placement, request.num_microbatches, programs)
