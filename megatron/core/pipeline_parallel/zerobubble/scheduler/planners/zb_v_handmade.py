"""The hand-made ZB-V for T_F = T_B = T_W, two chunks on a V (arXiv:2401.10241, section 6).

With f, F the forwards down and up the V, B, b their backwards and W, w their weight gradients, rank
r of p runs

    2(p-r)-1 times f;  r times F f;  p-r times F B W;  f b w F B W while f are left;
    p-r-1 times b w F B W;  r times b B;  p-r times b w;  the W that are left;  the w that are left

as far as the micro-batches exist. From m = 2p-1 on the longest span has no bubble; the peak is p
micro-batches on every rank. For other times the search starts from it (v_schedules.py).
"""

from __future__ import annotations

from ..instruction import Instruction, Op
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest

_CHUNK_AND_OP = {
    "f": (0, Op.F),
    "F": (1, Op.F),
    "B": (1, Op.B),
    "b": (0, Op.B),
    "W": (1, Op.W),
    "w": (0, Op.W),
}


def plan_zb_v_handmade(request: PlanRequest) -> Plan:
    """Below 2p - 1 micro-batches the order for 2p - 1, less those that do not exist."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    placement = Placement.v_shape(num_ranks)
    programs = []
    for rank, stages in enumerate(placement.stages_by_rank):
        counts = dict.fromkeys(_CHUNK_AND_OP, 0)
        program = []
        for letter in _letters(num_ranks, rank, max(num_microbatches, 2 * num_ranks - 1)):
            chunk, op = _CHUNK_AND_OP[letter]
            if counts[letter] < num_microbatches:
                program.append(Instruction(op, stages[chunk], counts[letter]))
            counts[letter] += 1
        programs.append(program)
    plan = Plan.of("zb-v", placement, num_microbatches, programs)
    return within_limits(plan, request)


def _letters(num_ranks: int, rank: int, num_microbatches: int) -> str:
    below = num_ranks - rank
    warmup = "f" * (2 * below - 1) + "Ff" * rank + "FBW" * below
    steady = "fbwFBW" * (num_microbatches - 2 * num_ranks + rank + 1)
    cooldown = "bwFBW" * (below - 1) + "bB" * rank + "bw" * below
    return warmup + steady + cooldown + "W" * rank + "w" * rank
