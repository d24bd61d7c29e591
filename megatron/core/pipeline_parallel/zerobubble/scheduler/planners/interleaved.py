"""Interleaved 1F1B: several chunks per rank, looped (arXiv:2104.04473, section 2.2).

Rank r runs 2(p-r-1) + (v-1)g warm-up forwards, one per micro-batch and chunk, for v chunks and
groups of g >= p micro-batches (groups.py), then alternates, then drains. Bubble
(p-1)(T_F + T_B + T_W)/v where p divides m; v times the messages of 1F1B. Peak memory on rank 0 for
g = p: (vp + p - 1)/v micro-batches, as far as m has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..instruction import Instruction, Op, ScheduleError
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from .groups import backward_visits, even_groups, forward_visits


def plan_interleaved(request: PlanRequest) -> Plan:
    """Two chunks per rank and groups of p unless the request says otherwise.

    Where the group size does not divide m, the groups are made larger and even, which costs no
    time. If that needs more memory than the limits allow, the last group is a partial one instead:
    later stages wait for it, but it needs no more memory than a full group.
    """
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    group_size = request.group_size or num_ranks
    if group_size < num_ranks:
        raise ScheduleError(
            f"group_size is {group_size}, but interleaved needs at least the number of ranks, "
            f"{num_ranks}: with fewer, the ranks would wait for each other for ever"
        )
    num_full = num_microbatches // group_size
    even = _plan(request, even_groups(num_microbatches, max(1, num_full)))
    try:
        return within_limits(even, request)
    except ScheduleError:
        if num_microbatches <= group_size or num_microbatches % group_size == 0:
            raise
    return within_limits(_plan(request, [group_size] * (num_full + 1)), request)


def _plan(request: PlanRequest, sizes: Sequence[int]) -> Plan:
    """The schedule for groups of these sizes, less the micro-batches that do not exist.

    Leaving out whole micro-batches keeps an order valid: no other micro-batch needs them.
    """
    num_ranks = request.num_ranks
    num_chunks = request.num_chunks or 2
    placement = Placement.looped(num_ranks, num_chunks)
    forward_order = forward_visits(sizes, num_chunks)
    backward_order = backward_visits(sizes, num_chunks)
    programs = []
    for rank in range(num_ranks):
        stages = placement.stages_by_rank[rank]
        forwards = [Instruction(Op.F, stages[c], j) for c, j in forward_order]
        backwards = [Instruction(Op.BW, stages[c], j) for c, j in backward_order]
        warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * max(sizes), len(forwards))
        steady = [i for pair in zip(forwards[warmup:], backwards, strict=False) for i in pair]
        cooldown = backwards[len(forwards) - warmup :]
        program = forwards[:warmup] + steady + cooldown
        programs.append([i for i in program if i.microbatch < request.num_microbatches])
    return Plan.of("interleaved", placement, request.num_microbatches, programs)
