"""Name -> planner: the one table that the command line's choices and error messages come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .instruction import ScheduleError
from .plan import Plan
from .planners.one_f_one_b import plan_1f1b
from .request import PlanRequest


@dataclass(frozen=True)
class Schedule:
    """A named schedule: its planner and what a launcher must know before planning."""

    planner: Callable[[PlanRequest], Plan]
    placement: Literal["plain", "looped", "v"]
    splits_backward: bool
    summary: str  # one line for --help and docs


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(plan_1f1b, "plain", False, "one forward, one backward (Megatron's default)"),
}


def schedule_named(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is named {name!r}; choose from {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def plan_schedule(name: str, request: PlanRequest) -> Plan:
    """Plan `request` under the schedule of that name."""
    return schedule_named(name).planner(request)
