"""DualPipeV (the V-shaped half of DualPipe, DeepSeek-V3 report; "cut in half" by Sea AI Lab).

The original overlaps one direction's forward with the other's backward to hide expert-parallel
communication. Here they run one after the other, the backward first: that needs half a micro-batch
less memory than the forward first, and no more time on equal costs. A forward's output leaves when
that forward ends.

With equal times and m >= 2p the bubble is (p-1)/2 of T_F + T_B - T_W per rank, and the peak memory p
micro-batches, that of 1F1B. The phases assume m >= 2p; for fewer the order for 2p is taken and the
surplus micro-batches are left out, which leaves a valid order.
"""

from __future__ import annotations

from collections import deque

from ..instruction import Instruction, Op
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest


def plan_dualpipe_v(request: PlanRequest) -> Plan:
    """Eight phases per rank; chunk 0 goes down the ranks, chunk 1 comes back up."""
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    programs = [
        _rank_program(num_ranks, rank, max(num_microbatches, 2 * num_ranks))
        for rank in range(num_ranks)
    ]
    wanted = [[i for i in program if i.microbatch < num_microbatches] for program in programs]
    plan = Plan.of("dualpipe-v", Placement.v_shape(num_ranks), num_microbatches, wanted)
    return within_limits(plan, request)


def _rank_program(num_ranks: int, rank: int, num_microbatches: int) -> list[Instruction]:
    below = num_ranks - rank - 1  # ranks between this one and the turn of the V
    out = _Program((rank, 2 * num_ranks - 1 - rank))
    for _ in range(2 * below):  # 1: fill the down leg
        out.forward(0)
    for _ in range(rank + 1):  # 2: both legs' forwards
        out.forward(0)
        out.forward(1)
    for _ in range(below):  # 3: the first backwards come up; W fills the wait for forwards
        out.split_backward(1)
        out.weight_grad()
        out.forward(1)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):  # 4: steady
        out.backward(1)
        out.forward(0)
        out.backward(0)
        out.forward(1)
    for _ in range(below):  # 5: no forwards of chunk 0 are left
        out.backward(1)
        out.backward(0)
        out.forward(1)
    for k in range(2 * (rank + 1)):  # 6: backwards only; the later half leaves its W behind
        if k < rank + 1:
            out.backward(1 - k % 2)
        else:
            out.split_backward(1 - k % 2)
    for _ in range(below):  # 7: a W while the next gradient is on its way
        out.weight_grad()
        out.split_backward(0)
    for _ in range(rank + 1):  # 8
        out.weight_grad()
    return out.instructions


class _Program:
    """A program that grows: counts micro-batches per chunk and keeps the W left behind."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.instructions: list[Instruction] = []
        self._stages = stages
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._pending: deque[Instruction] = deque()

    def forward(self, chunk: int) -> None:
        self._append(Op.F, chunk, self._forwards)

    def backward(self, chunk: int) -> None:
        self._append(Op.BW, chunk, self._backwards)

    def split_backward(self, chunk: int) -> None:
        self._pending.append(Instruction(Op.W, self._stages[chunk], self._backwards[chunk]))
        self._append(Op.B, chunk, self._backwards)

    def weight_grad(self) -> None:
        self.instructions.append(self._pending.popleft())

    def _append(self, op: Op, chunk: int, counts: list[int]) -> None:
        self.instructions.append(Instruction(op, self._stages[chunk], counts[chunk]))
        counts[chunk] += 1
