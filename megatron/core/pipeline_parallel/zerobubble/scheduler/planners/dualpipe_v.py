"""DualPipeV (DeepSeek-V3 report, section 3.2.1, cut in half to a V placement by Sea AI Lab).

The original runs a forward of one leg and a backward of the other at the same time, to hide the
communication of expert parallelism. Here the two run one after the other, the forward first, and
its output leaves when it ends.

For equal times and m >= 2p the bubble is (p-1)(T_F + T_B - T_W)/2 in both costs, and the peak
memory p + 1/2 micro-batches. The phases assume m >= 2p; for fewer micro-batches the order for 2p is
taken and the surplus left out, which is still a valid order.
"""

from __future__ import annotations

from collections import deque

from ..instruction import Instruction, Op, ScheduleError
from ..memory import within_limits
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest


def plan_dualpipe_v(request: PlanRequest) -> Plan:
    """Eight phases per rank; chunk 0 goes down the ranks, chunk 1 comes back up.

    Under memory limits that this exceeds, each pair runs its backward first. That saves half a
    micro-batch, and costs time where transfers do.
    """
    try:
        return within_limits(_plan(request, backward_first=False), request)
    except ScheduleError:
        return within_limits(_plan(request, backward_first=True), request)


def _plan(request: PlanRequest, *, backward_first: bool) -> Plan:
    num_ranks, num_microbatches = request.num_ranks, request.num_microbatches
    programs = [
        _rank_program(num_ranks, rank, max(num_microbatches, 2 * num_ranks), backward_first)
        for rank in range(num_ranks)
    ]
    wanted = [[i for i in program if i.microbatch < num_microbatches] for program in programs]
    return Plan.of("dualpipe-v", Placement.v_shape(num_ranks), num_microbatches, wanted)


def _rank_program(
    num_ranks: int, rank: int, num_microbatches: int, backward_first: bool
) -> list[Instruction]:
    below = num_ranks - rank - 1  # ranks between this one and the turn of the V
    out = _Program((rank, 2 * num_ranks - 1 - rank), backward_first)
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
        out.pair(0, 1)
        out.pair(1, 0)
    for _ in range(below):  # 5: no forwards of chunk 0 are left
        out.backward(1)
        out.pair(1, 0)
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

    def __init__(self, stages: tuple[int, int], backward_first: bool) -> None:
        self.instructions: list[Instruction] = []
        self._stages = stages
        self._backward_first = backward_first
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

    def pair(self, forward_chunk: int, backward_chunk: int) -> None:
        """The two that the original overlaps."""
        if self._backward_first:
            self.backward(backward_chunk)
            self.forward(forward_chunk)
        else:
            self.forward(forward_chunk)
            self.backward(backward_chunk)

    def weight_grad(self) -> None:
        self.instructions.append(self._pending.popleft())

    def _append(self, op: Op, chunk: int, counts: list[int]) -> None:
        self.instructions.append(Instruction(op, self._stages[chunk], counts[chunk]))
        counts[chunk] += 1
