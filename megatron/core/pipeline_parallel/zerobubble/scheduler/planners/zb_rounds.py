"""The heuristic of the zero-bubble paper for plain placements (arXiv:2401.10241, section 3.1).

Warm-up: as many F as the memory allows before the first B. Then in rounds: one F down the ranks,
where it makes no rank idle longer, and one B up. W fills the waits; it is forced where memory is
full, and taken in a wait too short for it where that rank has idled least. Three choices that the
paper leaves open are tried both ways. It is a seed of the search (zb.py): its rounds use limits
between p and 2p micro-batches well, also where W holds less than B.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ..instruction import Instruction, Op, ScheduleError
from ..memory import ROUNDING
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from ..simulate import Objective


def plan_zb_rounds(request: PlanRequest) -> Plan:
    """The fastest of the eight variants; raises ScheduleError if none stays within the limits.

    Without limits: p micro-batches on every rank.
    """
    variants = []
    for choices in itertools.product((False, True), repeat=3):
        variant = _Rounds(request, _Choices(*choices))
        try:
            variant.run()
        except ScheduleError as error:
            refusal = error
            continue
        variants.append(variant)
    if not variants:
        raise refusal
    return min(variants, key=lambda variant: variant.cost(request.objective)).plan()


class _Choices(NamedTuple):
    """What the paper leaves open."""

    wait_for_first_b: bool  # stop the warm-up rather than delay the first B by one more F
    backward_first: bool  # a rank ahead of the next may leave out an F that would delay a B
    weights_in_any_wait: bool  # run W in waits that are too short for it, whatever that delays


class _Rounds:
    """Every rank's clock, memory and order while the schedule is put together."""

    def __init__(self, request: PlanRequest, choices: _Choices) -> None:
        p = self.num_ranks = request.num_ranks
        self.num_microbatches, self.choices = request.num_microbatches, choices
        self.placement = Placement.plain(p)
        self.costs = request.costs_for(self.placement)
        most = p * max(self.costs.held_f_to_b)
        limits = request.memory_limits or (most,) * p
        self.limits = [limit * (1 + ROUNDING) for limit in limits]
        self.clock, self.memory, self.idle = [0.0] * p, [0.0] * p, [0.0] * p
        self.most_idle = 0.0
        self.orders: list[list[Instruction]] = [[] for _ in range(p)]
        self.ends: dict[Op, list[list[float]]] = {
            op: [[] for _ in range(p)] for op in (Op.F, Op.B, Op.W)
        }
        self.ranks = range(p)
        firsts = {op: [Instruction(op, rank, 0) for rank in range(p)] for op in self.ends}
        costs = self.costs
        self.lengths = {op: [costs.of(i) for i in row] for op, row in firsts.items()}
        self.changes = {
            op: [costs.memory_at_start(i) + costs.memory_at_end(i) for i in row]
            for op, row in firsts.items()
        }

    def run(self) -> None:
        """Put every rank's order together; raises ScheduleError if memory does not suffice."""
        self._warm_up()
        for _ in range(1, self.num_microbatches):
            forwards = self._forwards_of_round()
            for rank in self.ranks:
                if forwards[rank]:
                    self._pass(rank, Op.F)
            for rank in reversed(self.ranks):
                while rank == 0 and not self._left(0, Op.F) and self._pending(0):
                    self._put(0, Op.W)
                self._pass(rank, Op.B)
        for rank in self.ranks:
            while self._pending(rank):
                self._put(rank, Op.W)

    def plan(self) -> Plan:
        return Plan.of("zb", self.placement, self.num_microbatches, self.orders)

    def cost(self, objective: Objective) -> float:
        """As the simulator has it: the clocks are its times."""
        if objective == "makespan":
            return max(self.clock)
        firsts = (ends[0] - f for ends, f in zip(self.ends[Op.F], self.costs.forward, strict=True))
        return max(end - first for end, first in zip(self.clock, firsts, strict=True))

    def _warm_up(self) -> None:
        for rank in self.ranks:
            self._pass(rank, Op.F)
        extra = self._extra_forwards()
        for rank in self.ranks:
            for _ in range(extra[rank]):
                self._put(rank, Op.F)
        for rank in reversed(self.ranks):
            self._pass(rank, Op.B)

    def _extra_forwards(self) -> list[int]:
        """Forwards between a rank's first and its first B: fewer on every rank than before it."""
        costs, extra = self.costs, [0] * self.num_ranks
        last = self.num_ranks - 1
        first_b = self.clock[last] + costs.input_grad[last]  # its end on the rank behind
        for rank in reversed(range(last)):
            time, memory, forward = self.clock[rank], self.memory[rank], costs.forward[rank]
            arrival = first_b + costs.transfer
            while extra[rank] < self.num_microbatches - 1:
                memory += costs.held_f_to_b[rank]
                late = time + forward if self.choices.wait_for_first_b else time
                over = late > arrival if self.choices.wait_for_first_b else late >= arrival
                if memory > self.limits[rank] or over:
                    break
                extra[rank] += 1
                time += forward
            first_b = max(time, arrival) + costs.input_grad[rank]
        for rank in range(1, self.num_ranks):
            extra[rank] = min(extra[rank], max(0, extra[rank - 1] - 1))
        return extra

    def _forwards_of_round(self) -> list[bool]:
        """Which ranks run an F in this round."""
        runs = [self._wants_forward(rank) for rank in self.ranks]
        for rank in reversed(range(self.num_ranks - 1)):
            behind_left = self._left(rank + 1, Op.F) > 0
            runs[rank] = runs[rank] and (runs[rank + 1] or not behind_left)
        return runs

    def _wants_forward(self, rank: int) -> bool:
        if not self._left(rank, Op.F):
            return False
        if rank + 1 == self.num_ranks or not self.choices.backward_first:
            return True
        if len(self.ends[Op.F][rank]) - len(self.ends[Op.F][rank + 1]) < 2:
            return True
        costs, now = self.costs, self.clock[rank]
        behind = rank + 1
        next_b = self.clock[behind] + costs.forward[behind] + costs.input_grad[behind]
        next_b += costs.transfer
        if now >= next_b:
            return False
        forced = max(0.0, self.memory[rank] + costs.held_f_to_b[rank] - self.limits[rank])
        held = costs.held_b_to_w[rank]
        num_forced = int(-(-forced // held)) if held > 0 else 0
        end = now + costs.forward[rank] + num_forced * costs.weight_grad[rank]
        return end <= next_b or next_b - now > self.most_idle - self.idle[rank]

    def _pass(self, rank: int, op: Op) -> None:
        """F or B of the rank's next micro-batch, with the W that memory forces or a wait allows."""
        change, limit = self.changes[op][rank], self.limits[rank]
        while change > 0 and self.memory[rank] + change > limit:
            if not self._pending(rank):
                raise ScheduleError(
                    f"the memory limit of rank {rank} is too low for zb's rounds; raise it"
                )
            self._put(rank, Op.W)
        weight, arrival = self.costs.weight_grad[rank], self._arrival(rank, op)
        while self._pending(rank) and self.clock[rank] + weight <= arrival:
            self._put(rank, Op.W)
        wait = arrival - self.clock[rank]
        if wait > 0 and self._pending(rank):
            slack = self.most_idle - self.idle[rank]
            if wait > slack or self.choices.weights_in_any_wait:
                self._put(rank, Op.W)
        self._put(rank, op)

    def _put(self, rank: int, op: Op) -> None:
        ends, order = self.ends[op][rank], self.orders[rank]
        start = max(self.clock[rank], self._arrival(rank, op))
        if order and start > self.clock[rank]:
            self.idle[rank] += start - self.clock[rank]
            self.most_idle = max(self.most_idle, self.idle[rank])
        order.append(Instruction(op, rank, len(ends)))
        self.clock[rank] = start + self.lengths[op][rank]
        self.memory[rank] += self.changes[op][rank]
        ends.append(self.clock[rank])

    def _arrival(self, rank: int, op: Op) -> float:
        """When what the rank's next F or B needs from its neighbour is there."""
        source = rank - 1 if op is Op.F else rank + 1
        if op is Op.W or not 0 <= source < self.num_ranks:
            return 0.0
        return self.ends[op][source][len(self.ends[op][rank])] + self.costs.transfer

    def _left(self, rank: int, op: Op) -> int:
        return self.num_microbatches - len(self.ends[op][rank])

    def _pending(self, rank: int) -> int:
        """Micro-batches of the rank that wait for their W."""
        return len(self.ends[Op.B][rank]) - len(self.ends[Op.W][rank])
