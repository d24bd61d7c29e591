"""1F1B-V: fused backwards on a V placement, in about two thirds of 1F1B's activation memory.

The idea is from arXiv:2405.15362: fix when one micro-batch passes each stage (a building block) and
let the next follow a period later; how long activations live then sets the memory. Here a chunk's
F takes one slot and its BW two, so the period of a busy rank with two chunks is six slots, and each
rank repeats a cycle of its four instructions. With f, F the forwards down and up the V, and B, b
their backwards, these three cycles, in turn from rank to rank, let a micro-batch pass with the
fewest waits; which of them rank 0 has is the phase:

    f F B B b b        f b b B B F        f b b F B B

A micro-batch then lives for 8 slots per rank of the pipeline, its two chunks added up, where
1F1B's lives for 12. For equal times the repeated block has the bubble of 1F1B. Double
justification (search/justify.py) then pulls instructions into idle time, for the request's own
times, within its limits.
"""

from __future__ import annotations

from functools import partial

from ..instruction import Instruction, Op
from ..memory import peak_memory
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.engine import search_plan

_CYCLES = ("fFBb", "fbBF", "fbFB")
_SLOTS = {"f": 1, "F": 1, "B": 2, "b": 2}
_PERIOD = sum(_SLOTS.values())


def plan_1f1b_v(request: PlanRequest) -> Plan:
    """The fastest order found within the memory limits.

    Without limits: within the need of the leanest phase and one chunk more, which is at most
    2p/3 + 3/2 micro-batches for equal stages.
    """
    placement = Placement.v_shape(request.num_ranks)
    costs = request.costs_for(placement)
    limits = request.memory_limits
    if limits is None:
        blocks = [_repeated_block(placement, request.num_microbatches, k) for k in range(3)]
        leanest = min(max(peak_memory(block, costs)) for block in blocks)
        limits = (leanest + max(costs.held_f_to_b),) * request.num_ranks
    return search_plan(
        "1f1b-v",
        placement,
        request,
        split=False,
        memory_limits=limits,
        seeds=[partial(_phase, phase=phase) for phase in range(3)],
    )


def _phase(request: PlanRequest, phase: int) -> Plan:
    placement = Placement.v_shape(request.num_ranks)
    return _repeated_block(placement, request.num_microbatches, phase)


def _repeated_block(placement: Placement, num_microbatches: int, phase: int) -> Plan:
    """Each rank's instructions in the order of their slots."""
    num_ranks = placement.num_ranks
    programs = []
    for rank, starts in enumerate(_block(num_ranks, phase)):
        down, up = placement.stages_by_rank[rank]
        kinds = {"f": (Op.F, down), "F": (Op.F, up), "B": (Op.BW, up), "b": (Op.BW, down)}
        slots = sorted(
            (start + _PERIOD * j, letter, j)
            for letter, start in starts.items()
            for j in range(num_microbatches)
        )
        programs.append([Instruction(*kinds[letter], j) for _, letter, j in slots])
    return Plan.of("1f1b-v", placement, num_microbatches, programs)


def _block(num_ranks: int, phase: int) -> list[dict[str, int]]:
    """Per rank, the slots in which micro-batch 0 passes: each the first in the rank's cycle."""
    starts: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    time = 0
    for letter in "fFBb":
        ranks = range(num_ranks) if letter in "fB" else reversed(range(num_ranks))
        for rank in ranks:
            cycle = _CYCLES[(phase + rank) % 3]
            place = rank + sum(_SLOTS[before] for before in cycle[: cycle.index(letter)])
            starts[rank][letter] = time + (place - time) % _PERIOD
            time = starts[rank][letter] + _SLOTS[letter]
    return starts
