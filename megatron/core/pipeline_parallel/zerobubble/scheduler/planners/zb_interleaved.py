"""Interleaved zero bubble: chunks as in interleaved 1F1B, the backward split as in ZB-H1.

By hand, two ideas meet. From the grouped interleaved schedule GIS (arXiv:2503.01328): rank r runs
only (v-1)g + p-r-1 warm-up forwards for v chunks and groups of g micro-batches (groups.py), which
brings the peak down to (v-1)g + p chunks: p micro-batches for g = p, less for smaller groups. From
ZB-H1 (arXiv:2401.10241): rank r holds W back by r of its backwards. GIS does not, and has the
bubble (p-1)(T_F + T_B)/v; here it is (p-1)(T_F + T_B - T_W)/v for g = p dividing m, in the same
memory. Groups of g < p leave a larger bubble, at most GIS's
((p-1)(T_F + T_B) + (p-g)(v-1)(T_F + T_B - T_W))/v for equal times. Below half of p no such order
exists.

The search starts from that order, for the request's costs and limits.
"""

from __future__ import annotations

from ..instruction import Instruction, Op, ScheduleError
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.engine import search_plan
from .groups import backward_visits, even_groups, forward_visits


def plan_zb_interleaved(request: PlanRequest) -> Plan:
    """The fastest order found for two chunks per rank unless the request says otherwise; with a
    group size in the request, the order by hand for groups of that size.

    Without limits: p micro-batches of the rank that holds most for each, on every rank.
    """
    if request.group_size is not None:
        return within_limits(_in_groups(request, _checked_group_size(request)), request)
    placement = _placement(request)
    limits = request.memory_limits
    if limits is None:
        held = request.costs_for(placement).held_f_to_b
        each = max(sum(held[stage] for stage in stages) for stages in placement.stages_by_rank)
        limits = (request.num_ranks * each,) * request.num_ranks
    return search_plan(
        "zb-interleaved",
        placement,
        request,
        split=True,
        memory_limits=limits,
        seeds=(_largest_groups,),
    )


def _placement(request: PlanRequest) -> Placement:
    return Placement.looped(request.num_ranks, request.num_chunks or 2)


def _smallest_group(num_ranks: int) -> int:
    return (num_ranks + 1) // 2


def _checked_group_size(request: PlanRequest) -> int:
    group_size, smallest = request.group_size, _smallest_group(request.num_ranks)
    if group_size is None or group_size < smallest:
        raise ScheduleError(
            f"group_size is {group_size}, but zb-interleaved needs at least half the "
            f"number of ranks, {smallest}: with fewer, ranks would wait for each other for ever"
        )
    return group_size


def _largest_groups(request: PlanRequest) -> Plan:
    """The order by hand in groups of p, or the largest that fit into the limits."""
    for group_size in range(request.num_ranks, _smallest_group(request.num_ranks), -1):
        try:
            return within_limits(_in_groups(request, group_size), request)
        except ScheduleError:
            continue
    return within_limits(_in_groups(request, _smallest_group(request.num_ranks)), request)


def _in_groups(request: PlanRequest, group_size: int) -> Plan:
    """Even groups of at most `group_size`, except where they would fall below half of p."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    most_groups = max(1, num_microbatches // _smallest_group(num_ranks))
    num_groups = min(-(-num_microbatches // group_size), most_groups)
    sizes = even_groups(num_microbatches, num_groups)
    placement = _placement(request)
    num_chunks = placement.max_chunks
    forward_order = forward_visits(sizes, num_chunks)
    backward_order = backward_visits(sizes, num_chunks)
    programs = []
    for rank, stages in enumerate(placement.stages_by_rank):
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
