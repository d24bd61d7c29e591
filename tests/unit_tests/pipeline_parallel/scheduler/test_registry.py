"""The table of schedules, and what a name does not take."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    SCHEDULES,
    plan_schedule,
    schedule_named,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_named("1f1c")
    assert str(caught.value).startswith("no schedule is named '1f1c'; choose from 1f1b, ")
    assert all(name in str(caught.value) for name in SCHEDULES)


def test_every_schedule_describes_itself_in_a_line() -> None:
    for name, schedule in SCHEDULES.items():
        assert 10 < len(schedule.summary) < 80, name
        assert "\n" not in schedule.summary and not schedule.summary.endswith(".")


def test_placement_for_costs() -> None:
    assert SCHEDULES["1f1b"].placement_for(3) == Placement.plain(3)
    assert SCHEDULES["interleaved"].placement_for(3) == Placement.looped(3, 2)
    assert SCHEDULES["interleaved"].placement_for(3, 4) == Placement.looped(3, 4)
    assert SCHEDULES["dualpipe-v"].placement_for(3) == Placement.v_shape(3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_and_groups_are_refused_where_they_mean_nothing(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = PlanRequest(num_ranks=4, num_microbatches=8, num_chunks=3)
    groups = PlanRequest(num_ranks=4, num_microbatches=8, group_size=4)
    if schedule.takes_chunks:
        assert plan_schedule(name, chunks).placement.max_chunks == 3
        plan_schedule(name, groups)
        return
    with pytest.raises(ScheduleError, match=f"num_chunks is 3, but {name} places .* interleaved"):
        plan_schedule(name, chunks)
    with pytest.raises(ScheduleError, match=f"group_size is 4, but {name} has no groups"):
        plan_schedule(name, groups)


def test_a_schedules_own_number_of_chunks_may_be_given() -> None:
    request = PlanRequest(num_ranks=4, num_microbatches=8, num_chunks=1)
    assert plan_schedule("1f1b", request).placement == Placement.plain(4)
