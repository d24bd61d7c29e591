"""ZB-V, V-Half and V-Min: searched schedules on a V placement, told apart by their memory.

ZB-V (arXiv:2401.10241, section 6) may hold p micro-batches on every rank, the most 1F1B holds;
V-Half and V-Min (arXiv:2405.15362, section 3) about a half and a third of that. With equal times
ZB-V has no bubble once m >= 2p - 1. Unlike the paper's V-Half and V-Min, whose pattern assumes
T_F = T_B = T_W, the orders here are made for the request's costs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.engine import search_plan
from .dualpipe_v import plan_dualpipe_v
from .zb_v_handmade import plan_zb_v_handmade

# Micro-batches that each of p ranks may hold where the request gives no limits. Of v-half and v-min
# they are the peaks of the paper's patterns.
V_PEAKS: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
}


def plan_zb_v(request: PlanRequest) -> Plan:
    return _plan("zb-v", request)


def plan_v_half(request: PlanRequest) -> Plan:
    return _plan("v-half", request)


def plan_v_min(request: PlanRequest) -> Plan:
    return _plan("v-min", request)


def _plan(name: str, request: PlanRequest) -> Plan:
    """Without limits in the request: V_PEAKS of the rank that holds most for a micro-batch."""
    placement = Placement.v_shape(request.num_ranks)
    limits = request.memory_limits
    if limits is None:
        held = request.costs_for(placement).held_f_to_b
        each = max(sum(held[stage] for stage in stages) for stages in placement.stages_by_rank)
        limits = (V_PEAKS[name](request.num_ranks) * each,) * request.num_ranks
    return search_plan(
        name,
        placement,
        request,
        split=True,
        memory_limits=limits,
        seeds=(plan_zb_v_handmade, plan_dualpipe_v),
    )
