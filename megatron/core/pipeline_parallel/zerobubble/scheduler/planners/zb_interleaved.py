"""Interleaved zero bubble: chunks as in interleaved 1F1B, the backward split as in ZB-H1.

Two ideas meet. From the grouped interleaved schedule GIS (arXiv:2503.01328): rank r runs only
(v-1)g + p-r-1 warm-up forwards for v chunks and groups of g micro-batches (groups.py), which brings
the peak down to (v-1)g + p chunks: p micro-batches for g = p, less for smaller groups. From ZB-H1
(arXiv:2401.10241): rank r holds W back by r of its backwards. GIS does not, and has the bubble
(p-1)(T_F + T_B)/v; here it is (p-1)(T_F + T_B - T_W)/v for g = p dividing m, in the same memory.

A group of g < p micro-batches needs less memory and leaves a larger bubble, at most GIS's
((p-1)(T_F + T_B) + (p-g)(v-1)(T_F + T_B - T_W))/v for equal times. Below half of p no order exists.
"""

from __future__ import annotations

from ..instruction import Instruction, Op, ScheduleError
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from .groups import backward_visits, even_groups, forward_visits


def plan_zb_interleaved(request: PlanRequest) -> Plan:
    """Two chunks per rank unless the request says otherwise; groups of p, or, under memory limits
    and without a group size in the request, the largest that fit."""
    num_ranks = request.num_ranks
    smallest = (num_ranks + 1) // 2
    if request.group_size is not None and request.group_size < smallest:
        raise ScheduleError(
            f"group_size is {request.group_size}, but zb-interleaved needs at least half the "
            f"number of ranks, {smallest}: with fewer, ranks would wait for each other for ever"
        )
    group_size = request.group_size or num_ranks
    while True:
        plan = _plan(request, group_size)
        try:
            return within_limits(plan, request)
        except ScheduleError:
            if request.group_size is not None or group_size == smallest:
                raise
            group_size -= 1


def _plan(request: PlanRequest, group_size: int) -> Plan:
    """Even groups of at most `group_size`, except where they would fall below half of p."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    num_chunks = request.num_chunks or 2
    most_groups = max(1, num_microbatches // ((num_ranks + 1) // 2))
    num_groups = min(-(-num_microbatches // group_size), most_groups)
    sizes = even_groups(num_microbatches, num_groups)
    forward_order = forward_visits(sizes, num_chunks)
    backward_order = backward_visits(sizes, num_chunks)
    placement = Placement.looped(num_ranks, num_chunks)
    programs = []
    for rank in range(num_ranks):
        stages = placement.stages_by_rank[rank]
        lag = (num_chunks - 1) * max(sizes) + num_ranks - rank - 1
        rows = (
            (Op.F, forward_order, 0),
            (Op.B, backward_order, lag),
            (Op.W, backward_order, lag + rank),
        )
        programs.append(
            [
                Instruction(op, stages[order[x - shift].chunk], order[x - shift].microbatch)
                for x in range(len(forward_order) + lag + rank)
                for op, order, shift in rows
                if 0 <= x - shift < len(order)
            ]
        )
    return Plan.of("zb-interleaved", placement, num_microbatches, programs)
