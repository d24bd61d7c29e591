"""The question every schedule is asked alike: sizes, costs, limits. Its answer is a Timeline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..instruction import ScheduleError
from ..plan import Plan
from ..registry import plan_schedule, schedule_named
from ..request import PlanRequest
from ..simulate import Timeline, simulate
from ..validate import validate
from .model_costs import EqualRanks, ModelCosts


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan, apart from the schedule; see PlanRequest for the fields they share."""

    num_ranks: int
    num_microbatches: int
    costs: ModelCosts = field(default_factory=EqualRanks)
    memory_limits: tuple[float, ...] | None = None
    objective: Literal["span", "makespan"] = "span"
    num_chunks: int | None = None
    group_size: int | None = None

    def suited_to(self, name: str) -> Question:
        """The same question without what the named schedule leaves no choice about."""
        if schedule_named(name).takes_chunks:
            return self
        return replace(self, num_chunks=None, group_size=None)

    def answer(self, name: str) -> Timeline:
        """The named schedule's plan, proven valid and simulated.

        Raises ScheduleError if there is no such schedule, if it cannot run at these sizes, or
        if its plan does not keep the memory limits.
        """
        if self.num_ranks < 1:
            raise ScheduleError(f"p is {self.num_ranks}; a pipeline has at least 1 rank")
        placement = schedule_named(name).placement_for(self.num_ranks, self.num_chunks)
        request = PlanRequest(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
            costs=self.costs.cut(placement),
            memory_limits=self.memory_limits,
            objective=self.objective,
            group_size=self.group_size,
        )
        return self.timeline(plan_schedule(name, request))

    def timeline(self, plan: Plan) -> Timeline:
        """Any plan under this question's costs and memory limits; ScheduleError if not valid."""
        validate(plan)  # first without costs: these can be cut only for a sound placement
        costs = self.costs.cut(plan.placement)
        if self.memory_limits is not None:
            validate(plan, costs=costs, memory_limits=self.memory_limits)
        return simulate(plan, costs)
