"""Hand-made orders on a V placement, as the papers describe them, to hold searched plans against.

They are written out here from the papers alone; the library's planners for the same names search.
Ranks r of p; f, F the forwards of chunk 0 (down) and chunk 1 (up); B, b their backwards for the
input; the W of each as late or as early as the paper says.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

PERIOD = 6  # slots: six passes of a micro-batch on each rank, one slot each


def zb_v_by_hand(p: int, m: int) -> Plan:
    """The hand-made ZB-V (arXiv:2401.10241, section 6), made for T_F = T_B = T_W. Below 2p-1
    micro-batches it is that for 2p-1 less the surplus."""
    placement = Placement.v_shape(p)
    programs = []
    for rank in range(p):
        stages = placement.stages_by_rank[rank]
        counts: dict[tuple[Op, int], int] = {}
        program = []
        for op, chunk in _zb_v_passes(p, rank, max(m, 2 * p - 1)):
            j = counts.get((op, chunk), 0)
            counts[op, chunk] = j + 1
            if j < m:
                program.append(Instruction(op, stages[chunk], j))
        programs.append(program)
    return Plan.of("zb-v by hand", placement, m, programs)


def _zb_v_passes(p: int, rank: int, m: int) -> Iterator[tuple[Op, int]]:
    f, b, w = Op.F, Op.B, Op.W
    left = [m, m]  # forwards of each chunk
    late = [0, 0]  # W left for the end
    for _ in range(2 * (p - rank) - 1):
        yield f, 0
    for _ in range(rank):
        yield f, 1
        yield f, 0
    for _ in range(p - rank):
        yield from ((f, 1), (b, 1), (w, 1))
    left[0] -= 2 * (p - rank) - 1 + rank
    left[1] -= p
    while left[1]:
        if left[0]:
            left[0] -= 1
            yield f, 0
        yield from ((b, 0), (w, 0), (f, 1), (b, 1), (w, 1))
        left[1] -= 1
    for _ in range(rank):
        yield from ((b, 0), (b, 1))
        late[0] += 1
        late[1] += 1
    for _ in range(p - rank):
        yield from ((b, 0), (w, 0))
    for chunk in (1, 0):
        for _ in range(late[chunk]):
            yield w, chunk


def v_min_block(p: int, m: int) -> Plan:
    """V-Min's repeated building block (arXiv:2405.15362, section 3, table 8)."""
    wait = 2 if p % 3 == 0 else 0
    slots = [
        (i, 2 * p - i - 1, 2 * p + wait + i, 4 * p + wait - i - 1)  # f, F, B, b
        for i in range(p)
    ]
    return _repeated("v-min block", slots, m)


def v_half_block(p: int, m: int) -> Plan:
    """V-Half's repeated building block (arXiv:2405.15362, section 3, table 9)."""
    wait = 3 if p % 2 == 0 else 0
    slots = [
        (2 * i, 3 * p - i - 2, 3 * p + wait + 2 * i - 1, 6 * p + wait - i - 2) for i in range(p)
    ]
    return _repeated("v-half block", slots, m)


def _repeated(name: str, slots: list[tuple[int, int, int, int]], m: int) -> Plan:
    """Each micro-batch a period behind the one before; each W in the first free slot behind its B.
    Only the order counts: idle slots are squeezed out when the plan runs."""
    placement = Placement.v_shape(len(slots))
    programs = []
    for (down, up), starts in zip(placement.stages_by_rank, slots, strict=True):
        kinds = ((Op.F, down), (Op.F, up), (Op.B, up), (Op.B, down))
        taken = {start % PERIOD for start in starts}
        block = [(start, op, stage) for start, (op, stage) in zip(starts, kinds, strict=True)]
        for start, op, stage in sorted(block[2:], key=lambda placed: placed[0]):
            free = next(t for t in range(start + 1, start + 7) if t % PERIOD not in taken)
            taken.add(free % PERIOD)
            block.append((free, Op.W, stage))
            assert op is Op.B and len(taken) <= PERIOD
        timed = sorted(
            (t + PERIOD * j, op.value, stage, j) for t, op, stage in block for j in range(m)
        )
        programs.append([Instruction(Op(op), stage, j) for _, op, stage, j in timed])
    return Plan.of(name, placement, m, programs)
