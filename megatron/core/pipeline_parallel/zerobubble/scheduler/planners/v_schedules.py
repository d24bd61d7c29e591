"""ZB-V, V-Half and V-Min: searched schedules on a V placement, told apart by their memory.

ZB-V (arXiv:2401.10241, section 6) may hold p micro-batches on every rank, the most 1F1B holds;
V-Half and V-Min (arXiv:2405.15362, section 3) about a half and a third of that. With equal times
ZB-V has no bubble once m >= 2p - 1. Unlike the paper's V-Half and V-Min, whose pattern assumes
T_F = T_B = T_W, the orders here are made for the request's costs.
"""

from __future__ import annotations

from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.engine import search_plan
from .dualpipe_v import plan_dualpipe_v
from .zb_v_handmade import plan_zb_v_handmade


def plan_zb_v(request: PlanRequest) -> Plan:
    """Without limits in the request: p micro-batches on every rank."""
    return _plan("zb-v", request, request.num_ranks)


def plan_v_half(request: PlanRequest) -> Plan:
    """Without limits in the request: the peak of the paper's pattern, (p + 2) // 2."""
    return _plan("v-half", request, (request.num_ranks + 2) // 2)


def plan_v_min(request: PlanRequest) -> Plan:
    """Without limits in the request: the peak of the paper's pattern, (p + 4) // 3."""
    return _plan("v-min", request, (request.num_ranks + 4) // 3)


def _plan(name: str, request: PlanRequest, num_held: int) -> Plan:
    """`num_held` micro-batches of the rank that holds most for each are allowed on every rank."""
    placement = Placement.v_shape(request.num_ranks)
    limits = request.memory_limits
    if limits is None:
        held = request.costs_for(placement).held_f_to_b
        each = max(sum(held[stage] for stage in stages) for stages in placement.stages_by_rank)
        limits = (num_held * each,) * request.num_ranks
    return search_plan(
        name,
        placement,
        request,
        split=True,
        memory_limits=limits,
        seeds=(plan_zb_v_handmade, plan_dualpipe_v),
    )
