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

from collections.abc import Sequence

from ..instruction import Instruction, Op
from ..memory import ROUNDING, peak_memory, within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..search.justify import cost_of_ends, justify, retime
from ..search.network import Network

_CYCLES = ("fFBb", "fbBF", "fbFB")
_SLOTS = {"f": 1, "F": 1, "B": 2, "b": 2}
_PERIOD = sum(_SLOTS.values())

_ROUNDS = 8  # of justification; a round that gains nothing ends it
_WINDOW = 40  # instructions ahead that may be pulled into a wait


def plan_1f1b_v(request: PlanRequest) -> Plan:
    """The fastest of the three phases within the memory limits.

    Without limits: within the need of the leanest phase and one chunk more, which is at most
    2p/3 + 3/2 micro-batches for equal stages.
    """
    placement = Placement.v_shape(request.num_ranks)
    costs = request.costs_for(placement)
    blocks = sorted(
        (_repeated_block(placement, request.num_microbatches, phase) for phase in range(3)),
        key=lambda plan: max(peak_memory(plan, costs)),
    )
    limits = request.memory_limits
    if limits is None:
        most = max(peak_memory(blocks[0], costs)) + max(costs.held_f_to_b)
        limits = (most,) * request.num_ranks
    limits = tuple(limit * (1 + ROUNDING) for limit in limits)
    network = Network(placement, costs, request.num_microbatches, False, limits, request.objective)
    plans = [_justified(block, network) for block in blocks if _fits(block, network)]
    if not plans:
        return within_limits(blocks[0], request)  # raises
    return min(plans, key=lambda found: found[0])[1]


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


def _fits(plan: Plan, network: Network) -> bool:
    peaks = peak_memory(plan, network.costs)
    return all(peak <= limit for peak, limit in zip(peaks, network.limits, strict=True))


def _justified(plan: Plan, network: Network) -> tuple[float, Plan]:
    """The plan, or the best from pulling its instructions late and early in turn; and its cost."""
    first = network.orders_of(plan)
    best, best_orders = cost_of_ends(network, retime(network, first)), first
    for late_first in (True, False):
        orders = first
        for _ in range(_ROUNDS):
            for late in (late_first, not late_first):
                orders = _pull(network, orders, late=late)
            cost = cost_of_ends(network, retime(network, orders))
            if cost >= best * (1 - ROUNDING):
                break
            best, best_orders = cost, orders
    return best, network.to_plan(plan.schedule, best_orders)


def _pull(network: Network, orders: Sequence[list[int]], *, late: bool) -> list[list[int]]:
    turn = -1 if late else 1  # late is early with time reversed
    found, _ = justify(
        network.backward if late else network.forward,
        [order[::turn] for order in orders],
        network.limits,
        network.num_microbatches,
        _WINDOW,
    )
    return [order[::turn] for order in found]
