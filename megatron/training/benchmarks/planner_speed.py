"""How long planning takes: planner, validation and communication pass, for every schedule."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import lower
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    SCHEDULES,
    plan_schedule,
    schedule_named,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate
from megatron.training.benchmarks.planner_paper import PROFILES

LIMITS_S = {(8, 64): 0.5, (32, 256): 5.0, (64, 512): 30.0}  # (p, m) -> seconds on one core
PROFILE = PROFILES["14.6B", 16, 48]  # unequal times and transfers: nothing for free


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Seconds that one schedule took at one size."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    plan_s: float
    validate_s: float
    lower_s: float  # the communication pass
    simulate_s: float  # one pass of the simulator: a measure of the machine
    limit_s: float

    @property
    def total_s(self) -> float:
        return self.plan_s + self.validate_s + self.lower_s

    @property
    def over_simulate(self) -> float:
        return self.total_s / self.simulate_s

    @property
    def reached(self) -> bool:
        return self.total_s <= self.limit_s


def measure_speed(schedule: str, num_ranks: int, num_microbatches: int) -> SpeedRow:
    """Once, with the default budget and memory limits."""
    placement = schedule_named(schedule).placement_for(num_ranks)
    costs = EqualRanks(**PROFILE._asdict()).cut(placement)
    request = PlanRequest(num_ranks=num_ranks, num_microbatches=num_microbatches, costs=costs)
    times = [time.perf_counter()]
    plan = plan_schedule(schedule, request)
    times.append(time.perf_counter())
    validate(plan, costs=costs, training=True)
    times.append(time.perf_counter())
    lower(plan)
    times.append(time.perf_counter())
    simulate(plan, costs)
    times.append(time.perf_counter())
    plan_s, validate_s, lower_s, simulate_s = (
        after - before for before, after in itertools.pairwise(times)
    )
    return SpeedRow(
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        plan_s=plan_s,
        validate_s=validate_s,
        lower_s=lower_s,
        simulate_s=simulate_s,
        limit_s=LIMITS_S[num_ranks, num_microbatches],
    )


def speed_cases() -> list[tuple[str, int, int]]:
    """Schedule, p and m, small sizes first."""
    return [(name, p, m) for p, m in LIMITS_S for name in SCHEDULES]
