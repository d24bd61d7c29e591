"""Name -> planner: the one table that the command line's choices and error messages come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .instruction import ScheduleError
from .placement import Placement
from .plan import Plan
from .planners.dualpipe_v import plan_dualpipe_v
from .planners.interleaved import plan_interleaved
from .planners.one_f_one_b import plan_1f1b
from .planners.one_f_one_b_v import plan_1f1b_v
from .planners.v_schedules import V_PEAKS, plan_v_half, plan_v_min, plan_zb_v
from .planners.zb import plan_zb
from .planners.zb_handmade import plan_zb_h1, plan_zb_h2
from .planners.zb_interleaved import plan_zb_interleaved
from .request import PlanRequest


@dataclass(frozen=True)
class Schedule:
    """A named schedule: its planner and what a launcher must know before planning."""

    planner: Callable[[PlanRequest], Plan]
    placement: Literal["plain", "looped", "v"]
    splits_backward: bool
    summary: str  # one line for --help and docs
    # True: the order is made for the request's costs and memory limits. False: the order is fixed
    # by p and m alone; costs change only its predicted time, limits can only make it refuse.
    searches: bool = False
    # Of schedules named for their memory: micro-batches that each of p ranks may hold.
    peak_of: Callable[[int], int] | None = None

    @property
    def default_chunks(self) -> int:
        """Stages per rank where the request does not say."""
        return 1 if self.placement == "plain" else 2

    @property
    def takes_chunks(self) -> bool:
        """Whether num_chunks and group_size are the caller's to choose."""
        return self.placement == "looped"

    def placement_for(self, num_ranks: int, num_chunks: int | None = None) -> Placement:
        """The placement that the planner will use; what costs per stage refer to."""
        if self.placement == "v":
            return Placement.v_shape(num_ranks)
        return Placement.looped(num_ranks, num_chunks or self.default_chunks)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(plan_1f1b, "plain", False, "one forward, one backward (Megatron's default)"),
    "interleaved": Schedule(
        plan_interleaved, "looped", False, "1F1B over several chunks per rank: a smaller bubble"
    ),
    "zb-h1": Schedule(plan_zb_h1, "plain", True, "hand-made zero bubble in the memory of 1F1B"),
    "zb-h2": Schedule(plan_zb_h2, "plain", True, "hand-made zero bubble in twice that memory"),
    "zb": Schedule(
        plan_zb, "plain", True, "zero bubble searched for costs and a memory limit", searches=True
    ),
    "zb-v": Schedule(
        plan_zb_v,
        "v",
        True,
        "zero bubble on a V placement in the memory of 1F1B",
        searches=True,
        peak_of=V_PEAKS["zb-v"],
    ),
    "v-half": Schedule(
        plan_v_half, "v", True, "half of 1F1B's memory", searches=True, peak_of=V_PEAKS["v-half"]
    ),
    "v-min": Schedule(
        plan_v_min, "v", True, "a third of 1F1B's memory", searches=True, peak_of=V_PEAKS["v-min"]
    ),
    "1f1b-v": Schedule(
        plan_1f1b_v, "v", False, "1F1B in about two thirds of its memory", searches=True
    ),
    "zb-interleaved": Schedule(
        plan_zb_interleaved,
        "looped",
        True,
        "several chunks per rank, W filling the bubbles",
        searches=True,
    ),
    "dualpipe-v": Schedule(
        plan_dualpipe_v, "v", True, "DualPipeV: forwards and backwards of two legs in pairs"
    ),
}


def schedule_named(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is named {name!r}; choose from {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def plan_schedule(name: str, request: PlanRequest) -> Plan:
    """Plan `request` under the schedule of that name; a ScheduleError says what it cannot meet."""
    schedule = schedule_named(name)
    if request.num_chunks not in (None, schedule.default_chunks) and not schedule.takes_chunks:
        raise ScheduleError(
            f"num_chunks is {request.num_chunks}, but {name} places {schedule.default_chunks} "
            f"on each rank; leave it out, or choose from {', '.join(_taking_chunks())}"
        )
    if request.group_size is not None and not schedule.takes_chunks:
        raise ScheduleError(
            f"group_size is {request.group_size}, but {name} has no groups; "
            f"leave it out, or choose from {', '.join(_taking_chunks())}"
        )
    return schedule.planner(request)


def _taking_chunks() -> list[str]:
    return [name for name, schedule in SCHEDULES.items() if schedule.takes_chunks]
