"""One planning problem with a figure to hold our plan against, and the answer to it.

Figures of others come from tables (planner_peer.py, planner_paper.py). All are the *longest span*:
the longest, over ranks, of (end of the last instruction - start of the first). Nothing here needs
torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.memory import ROUNDING
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    plan_schedule,
    schedule_named,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.search.bounds import lower_bound
from megatron.core.pipeline_parallel.zerobubble.scheduler.search.network import Network
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

BETTER, EQUAL, WORSE, REFUSED = "better", "equal", "WORSE", "REFUSED"
FAILURES = (WORSE, REFUSED)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to plan, and the cost that the plan must not exceed."""

    name: str  # of the contestant, as its source calls it
    schedule: str  # ours
    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None
    costs: EqualRanks = field(default_factory=EqualRanks)
    memory_limits: tuple[float, ...] | None = None  # per rank; None: the schedule's own
    stated_limit: str = ""  # as the source states it
    cost: float  # the contestant's longest span
    tolerance: float  # relative: by how much a cost may differ and still count as equal

    @property
    def placement(self) -> Placement:
        return schedule_named(self.schedule).placement_for(self.num_ranks, self.num_chunks)

    @property
    def request(self) -> PlanRequest:
        return PlanRequest(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
            costs=self.costs.cut(self.placement),
            memory_limits=self.memory_limits,
            objective="span",
        )

    @property
    def work(self) -> float:
        """Time that every rank computes."""
        each = self.costs.forward + self.costs.input_grad + self.costs.weight_grad
        return self.num_microbatches * each

    @property
    def bubble_rate(self) -> float:
        """Of the contestant."""
        return bubble_rate(self.cost, self.work)

    @property
    def num_instructions(self) -> int:
        kinds = 3 if schedule_named(self.schedule).splits_backward else 2
        return self.placement.num_stages * self.num_microbatches * kinds


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Our plan for a case: valid, and within its memory limits. Or why there is none."""

    case: Case
    cost: float | None  # longest span
    peak_memory: float | None  # of the rank that holds most
    bound: float  # a cost that no plan within the limits goes below
    plan_s: float
    refusal: str = ""

    @property
    def bubble_rate(self) -> float | None:
        return None if self.cost is None else bubble_rate(self.cost, self.case.work)

    @property
    def excess(self) -> float:
        """Our cost over the contestant's, less 1; below 0 where ours is better."""
        return float("inf") if self.cost is None else self.cost / self.case.cost - 1

    @property
    def gap(self) -> float | None:
        """Our cost over the lower bound, less 1."""
        return None if self.cost is None else self.cost / self.bound - 1

    @property
    def verdict(self) -> str:
        if self.cost is None:
            return REFUSED
        if abs(self.excess) <= self.case.tolerance:
            return EQUAL
        return WORSE if self.excess > 0 else BETTER


def bubble_rate(cost: float, work: float) -> float:
    return (cost - work) / cost


def answer(case: Case) -> Answer:
    """Plan the case, prove the plan valid within the limits, and simulate it."""
    request = case.request
    costs = request.costs_for(case.placement)
    start = time.perf_counter()
    try:
        plan = plan_schedule(case.schedule, request)
    except ScheduleError as error:
        return Answer(
            case=case,
            cost=None,
            peak_memory=None,
            bound=bound_of(case, costs, case.memory_limits),
            plan_s=time.perf_counter() - start,
            refusal=str(error),
        )
    plan_s = time.perf_counter() - start
    validate(plan, costs=costs, memory_limits=case.memory_limits, training=True)
    timeline = simulate(plan, costs)
    return Answer(
        case=case,
        cost=timeline.longest_span,
        peak_memory=max(timeline.peaks),
        bound=bound_of(case, costs, case.memory_limits or (max(timeline.peaks),) * case.num_ranks),
        plan_s=plan_s,
    )


def bound_of(case: Case, costs: Costs, limits: Sequence[float] | None) -> float:
    """The least cost of any plan on the case's placement within the limits: that of bounds.py or,
    where it holds and is larger, the published one."""
    most = case.num_microbatches * sum(costs.held_f_to_b)  # no rank can hold more
    roomy = tuple(limit * (1 + ROUNDING) for limit in limits or (most,) * case.num_ranks)
    splits = schedule_named(case.schedule).splits_backward
    network = Network(case.placement, costs, case.num_microbatches, splits, roomy, "span")
    return max(lower_bound(network), _published_bound(case, max(roomy)))


def _published_bound(case: Case, limit: float) -> float:
    """6n + 6p - 3k - 1 passes of a chunk, for n >= p micro-batches in the memory of k chunks on a
    V placement with T_F = T_B = T_W (arXiv:2405.15362, figure 13); else 0."""
    costs = case.costs
    equal = costs.forward == costs.input_grad == costs.weight_grad
    if case.placement.name != "v" or not equal or case.num_microbatches < case.num_ranks:
        return 0.0
    held = int(limit * 2 / costs.held_f_to_b)
    passes = 6 * case.num_microbatches + max(0, 6 * case.num_ranks - 3 * held - 1)
    return passes * costs.forward / 2
