"""What a planner is asked for: sizes, costs, memory limits, objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .costs import Costs
from .instruction import ScheduleError
from .placement import Placement


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The input of every planner. `costs` are per stage of the planner's own placement;
    None means equal stages with unit times and free transfers."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None  # stages per rank; None takes the schedule's own number
    costs: Costs | None = None
    memory_limits: tuple[float, ...] | None = None  # per rank, in the unit of costs' memory
    objective: Literal["span", "makespan"] = "span"
    group_size: int | None = None  # interleaved schedules: micro-batches per chunk before a switch

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks", "group_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"{name} is {value}; it must be at least 1")
        if self.memory_limits is not None and len(self.memory_limits) != self.num_ranks:
            raise ScheduleError(
                f"{len(self.memory_limits)} memory limits are given for {self.num_ranks} ranks; "
                "give one per rank"
            )

    def costs_for(self, placement: Placement) -> Costs:
        """The costs to plan with, checked against the placement's number of stages."""
        costs = self.costs or Costs.uniform(placement)
        if costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"costs are given for {costs.num_stages} stages, but the {placement.name} "
                f"placement on {placement.num_ranks} ranks has {placement.num_stages}"
            )
        return costs
