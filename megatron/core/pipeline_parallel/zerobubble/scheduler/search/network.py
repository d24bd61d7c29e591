"""A planning problem in the form the search works on: lanes instead of instructions.

A *lane* is one kind of instruction of one stage; its micro-batches run in order. A rank's program
is then a list of lane numbers: the j-th occurrence of a lane is micro-batch j. Repeating a steady
pattern is list repetition, and time runs backwards when the lists are reversed.

    lane 3 s + 0: F of stage s      lane 3 s + 1: B (or BW)      lane 3 s + 2: W
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..costs import Costs
from ..instruction import Instruction, Op
from ..placement import Placement
from ..plan import Plan

F, B, W = 0, 1, 2

Orders = list[list[int]]  # per rank, lanes in program order

NO_LANE = -1


@dataclass(frozen=True)
class View:
    """Lanes seen in one direction of time: what each needs, feeds, takes and gives back."""

    duration: list[float]
    rank: list[int]
    source: list[int]  # lane whose same micro-batch must arrive first; NO_LANE: ready at once
    local: list[int]  # lane of the same rank whose same micro-batch must be done; or NO_LANE
    feeds: list[list[tuple[int, float]]]  # (lane, transfer time) for each lane with this source
    take: list[float]  # memory taken when an instruction of the lane starts
    give: list[float]  # change of memory when it ends
    release: list[float]  # per rank, the earliest start


@dataclass(frozen=True)
class Network:
    """`costs` of every lane on `placement`, for `num_microbatches` within `limits`.

    `limits` are per rank; `objective` "span" measures each rank from its own first start.
    """

    placement: Placement
    costs: Costs
    num_microbatches: int
    split: bool  # B and W apart, or fused into BW
    limits: tuple[float, ...]
    objective: str = "span"

    @cached_property
    def hop(self) -> list[float]:
        """Transfer time from stage s to s + 1 (and back)."""
        ranks = [slot.rank for slot in self.placement.slots]
        return [self.costs.transfer if a != b else 0.0 for a, b in itertools.pairwise(ranks)]

    @cached_property
    def first_start(self) -> list[float]:
        """Per rank, when its first instruction starts: that of micro-batch 0 in its first stage."""
        starts: dict[int, float] = {}
        time = 0.0
        for stage, slot in enumerate(self.placement.slots):
            starts.setdefault(slot.rank, time)
            time += self.costs.forward[stage] + (self.hop[stage] if stage < len(self.hop) else 0.0)
        return [starts[rank] for rank in range(self.placement.num_ranks)]

    @cached_property
    def origin(self) -> list[float]:
        """Per rank, the time its cost is measured from."""
        if self.objective == "span":
            return self.first_start
        return [0.0] * self.placement.num_ranks

    @cached_property
    def lanes_by_rank(self) -> list[list[int]]:
        kinds = (F, B, W) if self.split else (F, B)
        return [[3 * s + k for s in held for k in kinds] for held in self.placement.stages_by_rank]

    @property
    def num_instructions(self) -> int:
        return self.num_microbatches * sum(map(len, self.lanes_by_rank))

    @cached_property
    def without_transfers(self) -> Network:
        """The same problem where values arrive at once."""
        return replace(self, costs=replace(self.costs, transfer=0.0))

    @cached_property
    def forward(self) -> View:
        costs, last = self.costs, self.placement.last_stage
        duration, take, give, source, local = [], [], [], [], []
        for s in range(last + 1):
            f, b = 3 * s, 3 * s + 1
            held, kept = costs.held_f_to_b[s], costs.held_b_to_w[s] if self.split else 0.0
            weight = costs.weight_grad[s]
            duration += [
                costs.forward[s],
                costs.input_grad[s] + (0.0 if self.split else weight),
                weight,
            ]
            take += [held, 0.0, 0.0]
            give += [0.0, kept - held, -kept]
            source += [f - 3 if s else NO_LANE, b + 3 if s < last else f, b]
            local += [NO_LANE, f, NO_LANE]
        return self._view(duration, source, local, take, give, [0.0] * len(self.limits))

    @cached_property
    def backward(self) -> View:
        """The same lanes with time reversed: consumers before producers, releases before takes."""
        ahead, last = self.forward, self.placement.last_stage
        source, local = [], []
        for s in range(last + 1):
            f, b, w = 3 * s, 3 * s + 1, 3 * s + 2
            own = w if self.split else NO_LANE
            source += [f + 3 if s < last else b, b - 3 if s else own, NO_LANE]
            local += [b, own, NO_LANE]
        latest = max(self.origin)
        return self._view(
            ahead.duration,
            source,
            local,
            [-x for x in ahead.give],
            [-x for x in ahead.take],
            [latest - x for x in self.origin],
        )

    def _view(
        self,
        duration: list[float],
        source: list[int],
        local: list[int],
        take: list[float],
        give: list[float],
        release: list[float],
    ) -> View:
        rank = [slot.rank for slot in self.placement.slots for _ in range(3)]
        feeds: list[list[tuple[int, float]]] = [[] for _ in source]
        for lane, origin in enumerate(source):
            if origin != NO_LANE:
                lag = self.costs.transfer if rank[origin] != rank[lane] else 0.0
                feeds[origin].append((lane, lag))
        return View(duration, rank, source, local, feeds, take, give, release)

    def to_plan(self, schedule: str, orders: Orders) -> Plan:
        ops = (Op.F, Op.B if self.split else Op.BW, Op.W)
        programs = []
        for order in orders:
            counts: dict[int, int] = {}
            program = []
            for lane in order:
                j = counts.get(lane, 0)
                counts[lane] = j + 1
                program.append(Instruction(ops[lane % 3], lane // 3, j))
            programs.append(program)
        return Plan.of(schedule, self.placement, self.num_microbatches, programs)

    def orders_of(self, plan: Plan) -> Orders:
        """The lanes of a plan on the same placement; where B and W are apart, a BW becomes both."""
        lanes = {Op.F: [F], Op.B: [B], Op.W: [W], Op.BW: [B, W] if self.split else [B]}
        return [
            [3 * stage + kind for op, stage, _ in program for kind in lanes[op]]
            for program in plan.programs
        ]


def peaks(network: Network, orders: Sequence[Sequence[int]]) -> list[float]:
    """Per rank, the highest memory of a program (it depends on the order alone)."""
    take, give = network.forward.take, network.forward.give
    found = []
    for order in orders:
        level = peak = 0.0
        for lane in order:
            level += take[lane]
            if level > peak:
                peak = level
            level += give[lane]
            if level > peak:
                peak = level
        found.append(peak)
    return found
