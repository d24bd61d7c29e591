"""What a plan costs: times, bubbles, memory and messages, from its orders and `Costs` alone.

    >>> simulate(plan, costs).bubble_rate("span")

The cost model: a rank runs its program strictly in order, one instruction at a time, each as soon
as the one before has ended and its inputs are there. An input from another rank arrives
`costs.transfer` after its maker ends, one from the same rank at once; transfers never contend and
cost the ranks no time. A BW takes the time of B plus W and hands its gradient on at its end. Memory
is taken when F starts and given back when B, W or BW ends. Time 0 is the start of the first rank.

Not modelled: optimizer step, gradient reduction, data loading, launch cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from .costs import Costs
from .dataflow import Value, makes, needs, receivers
from .execution import start_times
from .instruction import Instruction, Op
from .memory import memory_levels, peak_memory
from .plan import Plan, Program

Objective = Literal["span", "makespan"]


class Evaluation(NamedTuple):
    """The figures a planner compares plans by."""

    makespan: float  # from the first start to the last end over all ranks
    longest_span: float  # the longest, over ranks, from the rank's first start to its last end
    peaks: tuple[float, ...]  # most memory held, per rank


class Idle(NamedTuple):
    """Time in which a rank computes nothing.

    Before an instruction: it waits for `value`, made on rank `source`. After a rank's last
    instruction both are None: it has none left. The gap before its first one is not in its span.
    """

    start: float
    end: float
    value: Value | None
    source: int | None


class MemoryPoint(NamedTuple):
    """From `time` on, a rank holds `level`, until the next point."""

    time: float
    level: float


class Place(NamedTuple):
    """Where an instruction stands in a plan."""

    rank: int
    step: int


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """The timeline of a valid plan; a plan that deadlocks raises a ScheduleError."""
    starts = start_times(plan, costs)
    times = {op: [costs.of(Instruction(op, s, 0)) for s in range(costs.num_stages)] for op in Op}
    ends = [
        tuple(start + times[op][stage] for start, (op, stage, _) in zip(row, program, strict=True))
        for row, program in zip(starts, plan.programs, strict=True)
    ]
    return Timeline(plan, costs, tuple(map(tuple, starts)), tuple(ends))


def evaluate(plan: Plan, costs: Costs) -> Evaluation:
    """Cost and peaks of a valid plan, and nothing else: what a search calls many times."""
    spans, first, last = [0.0], [], []
    for row, program in zip(start_times(plan, costs), plan.programs, strict=True):
        if row:
            first.append(row[_first_pass(program)])
            last.append(row[-1] + costs.of(program[-1]))
            spans.append(last[-1] - first[-1])
    makespan = max(last, default=0.0) - min(first, default=0.0)
    return Evaluation(makespan, max(spans), peak_memory(plan, costs))


def _first_pass(program: Program) -> int:
    """A rank begins with its first pass; it is not held up by a check (PV) that comes before."""
    return next((step for step, i in enumerate(program) if not i.op.is_mark), 0)


@dataclass(frozen=True)
class Timeline:
    """When every instruction of a plan runs, and what follows from it. Times in the costs' unit."""

    plan: Plan
    costs: Costs
    starts: tuple[tuple[float, ...], ...]  # per rank, per step
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks: the cost when ranks meet at the
        optimizer step."""
        first = min((row[0] for row in self.starts if row), default=0.0)
        return max((row[-1] for row in self.ends if row), default=0.0) - first

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per rank, from the start of its first pass to its last end."""
        rows = zip(self.plan.programs, self.starts, self.ends, strict=True)
        return tuple(
            end[-1] - start[_first_pass(program)] if start else 0.0 for program, start, end in rows
        )

    @property
    def longest_span(self) -> float:
        """The cost when ranks do not meet at the optimizer step (post-validation)."""
        return max(self.spans)

    def cost(self, objective: Objective) -> float:
        return self.longest_span if objective == "span" else self.makespan

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank, the time it computes."""
        return tuple(
            sum(e - s for s, e in zip(start, end, strict=True))
            for start, end in zip(self.starts, self.ends, strict=True)
        )

    def bubble(self, objective: Objective) -> float:
        """Cost less the work of the busiest rank. On unequal ranks the others idle more."""
        return self.cost(objective) - max(self.work)

    def bubble_rate(self, objective: Objective) -> float:
        """(cost - work) / cost, as in arXiv:2401.10241 section 5.3; the Megatron paper divides by
        work instead."""
        cost = self.cost(objective)
        return self.bubble(objective) / cost if cost else 0.0

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Per rank, the most memory held."""
        return peak_memory(self.plan, self.costs)

    def memory_curve(self, rank: int) -> tuple[MemoryPoint, ...]:
        """The memory a rank holds over time: one point for each change."""
        points = [MemoryPoint(0.0, 0.0)]
        row = zip(self.starts[rank], self.ends[rank], strict=True)
        times = [time for start_and_end in row for time in start_and_end]
        levels = memory_levels(self.plan.programs[rank], self.costs)
        for time, level in zip(times, levels, strict=True):
            if level != points[-1].level:
                points.append(MemoryPoint(time, level))
        return tuple(points)

    def idle(self, rank: int) -> tuple[Idle, ...]:
        """Every gap of a rank between time 0 and the makespan, with its cause."""
        gaps = []
        free_at = 0.0
        for step, (start, end) in enumerate(zip(self.starts[rank], self.ends[rank], strict=True)):
            if start > free_at:
                value = self._latest_input(Place(rank, step))
                gaps.append(Idle(free_at, start, value, self.plan.placement.rank_of(value.stage)))
            free_at = end
        if self.makespan > free_at:
            gaps.append(Idle(free_at, self.makespan, None, None))
        return tuple(gaps)

    @cached_property
    def messages_sent(self) -> tuple[int, ...]:
        """Per rank, how many values it sends to other ranks in an iteration."""
        travelling = receivers(self.plan.placement)
        per_op = {
            op: [
                sum(len(travelling.get(v[:2], ())) for v in makes(Instruction(op, stage, 0)))
                for stage in range(self.plan.placement.num_stages)
            ]
            for op in Op
        }
        return tuple(
            sum(per_op[op][stage] for op, stage, _ in program) for program in self.plan.programs
        )

    def critical_path(self) -> tuple[Place, ...]:
        """A chain of instructions that sets the makespan, first to last: each starts when the one
        before it on the chain has ended and, between ranks, its value has arrived."""
        ranks = [rank for rank, row in enumerate(self.ends) if row]
        place = max((Place(r, len(self.ends[r]) - 1) for r in ranks), key=self._end)
        chain = [place]
        while self._start(place) > 0:
            before = Place(place.rank, place.step - 1)
            if place.step == 0 or self._end(before) < self._start(place):
                before = self._makers[self._latest_input(place)]
            chain.append(before)
            place = before
        return tuple(reversed(chain))

    def _start(self, place: Place) -> float:
        return self.starts[place.rank][place.step]

    def _end(self, place: Place) -> float:
        return self.ends[place.rank][place.step]

    @cached_property
    def _makers(self) -> dict[Value, Place]:
        return {
            value: Place(rank, step)
            for rank, program in enumerate(self.plan.programs)
            for step, instruction in enumerate(program)
            for value in makes(instruction)
        }

    def _latest_input(self, place: Place) -> Value:
        """The need that arrives last at an instruction that has to wait."""
        placement = self.plan.placement
        instruction = self.plan.programs[place.rank][place.step]

        def arrival(value: Value) -> float:
            delay = 0.0 if placement.rank_of(value.stage) == place.rank else self.costs.transfer
            return self._end(self._makers[value]) + delay

        return max(needs(instruction, placement), key=arrival)
