"""The simulator against times found by relaxation, and against figures worked out by hand."""

from __future__ import annotations

import random

import pytest
from brute_force import RandomPlans, times

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.dataflow import Value
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op, ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.planners.no_pipeline import (
    plan_forward_only,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import (
    Idle,
    MemoryPoint,
    Place,
    evaluate,
    simulate,
)

# Two ranks, two micro-batches; rank 0 splits its second backward. Transfers take 0.5.
#
#   time     0    1    2    3    4    5    6    7    8    9    10
#   rank 0   [0F0][0F1]                [0BW0   ]     [0B1][0W1]
#   rank 1         [1F0 ][1BW0   ][1F1 ][1BW1   ]
SMALL = Plan.from_text(
    "schedule: small\nmicrobatches: 2\nplacement: 0.0 1.0\n"
    "rank 0: 0F0 0F1 0BW0 0B1 0W1\n"
    "rank 1: 1F0 1BW0 1F1 1BW1\n"
)
SMALL_COSTS = Costs.uniform(SMALL.placement, transfer=0.5, held_b_to_w=0.25)


@pytest.mark.parametrize("seed", range(60))
def test_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    plans = RandomPlans(rng)
    placement = plans.placement()
    plan = plans.plan(placement, rng.randint(1, 5), rng.choice([0.0, 0.5, 1.0]))
    costs = plans.costs(placement)
    timeline = simulate(plan, costs)
    expected = times(plan, costs)
    for program, starts, ends in zip(plan.programs, timeline.starts, timeline.ends, strict=True):
        for instruction, start, end in zip(program, starts, ends, strict=True):
            assert (start, end) == pytest.approx(expected[instruction])
    _check_figures(plan, costs)


def _check_figures(plan: Plan, costs: Costs) -> None:
    """Everything derived from the times, each derived once more another way."""
    timeline = simulate(plan, costs)
    expected = times(plan, costs)
    assert timeline.makespan == pytest.approx(max(end for _, end in expected.values()))
    for rank, program in enumerate(plan.programs):
        mine = [expected[i] for i in program]
        span = max(end for _, end in mine) - min(start for start, _ in mine)
        work = sum(end - start for start, end in mine)
        assert timeline.spans[rank] == pytest.approx(span)
        assert timeline.work[rank] == pytest.approx(work)
        assert timeline.work[rank] == pytest.approx(
            costs.work_of(plan.placement.stages_by_rank[rank], plan.num_microbatches)
        )
        idle = sum(gap.end - gap.start for gap in timeline.idle(rank))
        assert idle + work == pytest.approx(timeline.makespan)
        curve = timeline.memory_curve(rank)
        assert max(point.level for point in curve) == pytest.approx(timeline.peaks[rank])
        assert curve[-1].level == pytest.approx(0, abs=1e-9)
        assert [point.time for point in curve] == sorted(point.time for point in curve)
    longest = max(timeline.spans)
    assert timeline.longest_span == timeline.cost("span") == longest
    assert timeline.bubble_rate("span") == pytest.approx((longest - max(timeline.work)) / longest)
    assert evaluate(plan, costs) == (timeline.makespan, longest, timeline.peaks)
    _check_critical_path(plan, costs)


def _check_critical_path(plan: Plan, costs: Costs) -> None:
    """The chain leads from time 0 to the last end, with nothing but transfers between its links."""
    timeline = simulate(plan, costs)
    chain = timeline.critical_path()
    start = [timeline.starts[place.rank][place.step] for place in chain]
    end = [timeline.ends[place.rank][place.step] for place in chain]
    assert start[0] == 0 and end[-1] == timeline.makespan
    for k in range(1, len(chain)):
        same_rank = chain[k].rank == chain[k - 1].rank
        gap = 0.0 if same_rank else costs.transfer
        assert start[k] == pytest.approx(end[k - 1] + gap)


def test_small_plan_by_hand() -> None:
    timeline = simulate(SMALL, SMALL_COSTS)
    assert timeline.starts == ((0, 1, 5, 8, 9), (1.5, 2.5, 4.5, 5.5))
    assert timeline.ends == ((1, 2, 7, 9, 10), (2.5, 4.5, 5.5, 7.5))
    assert timeline.makespan == 10
    assert timeline.spans == (10, 6)
    assert timeline.longest_span == 10
    assert timeline.work == (6, 6)
    assert timeline.bubble("makespan") == 4
    assert timeline.bubble_rate("makespan") == pytest.approx(0.4)
    assert timeline.peaks == (2, 1)
    assert timeline.messages_sent == (2, 2)


def test_a_fused_backward_hands_its_gradient_on_at_its_end() -> None:
    fused = Plan.from_text(SMALL.to_text().replace("0B1 0W1", "0BW1"))
    split = Plan.from_text(SMALL.to_text().replace("1BW1", "1B1 1W1"))
    arrival = {
        name: simulate(plan, SMALL_COSTS).starts[0][3]
        for name, plan in {"fused": fused, "split": split}.items()
    }
    assert arrival == {"fused": 8, "split": 7}


def test_idle_time_has_a_cause() -> None:
    timeline = simulate(SMALL, SMALL_COSTS)
    assert timeline.idle(0) == (
        Idle(2, 5, Value("grad", 1, 0), 1),
        Idle(7, 8, Value("grad", 1, 1), 1),
    )
    assert timeline.idle(1) == (
        Idle(0, 1.5, Value("act", 0, 0), 0),
        Idle(7.5, 10, None, None),
    )


def test_memory_curve_by_hand() -> None:
    timeline = simulate(SMALL, SMALL_COSTS)
    assert timeline.memory_curve(0) == (
        MemoryPoint(0.0, 0.0),
        MemoryPoint(0, 1),
        MemoryPoint(1, 2),
        MemoryPoint(7, 1),
        MemoryPoint(9, 0.25),
        MemoryPoint(10, 0),
    )


def test_critical_path_by_hand() -> None:
    chain = simulate(SMALL, SMALL_COSTS).critical_path()
    names = [str(SMALL.programs[place.rank][place.step]) for place in chain]
    assert names == ["0F0", "1F0", "1BW0", "1F1", "1BW1", "0B1", "0W1"]
    assert chain[0] == Place(0, 0)


def test_unequal_ranks_count_the_busiest_as_work() -> None:
    costs = Costs(
        forward=(1.0, 3.0),
        input_grad=(1.0, 1.0),
        weight_grad=(1.0, 1.0),
        transfer=0.0,
        held_f_to_b=(1.0, 1.0),
        held_b_to_w=(1.0, 1.0),
    )
    timeline = simulate(SMALL, costs)
    assert timeline.work == (6, 10)
    assert timeline.bubble("makespan") == timeline.makespan - 10


@pytest.mark.parametrize(
    ("placement", "messages"),
    [
        (Placement.plain(3), (5, 10, 5)),
        (Placement.looped(2, 2), (15, 15)),  # 0-1, 1-2, 2-3 all cross: 3 borders, two directions
        (Placement.v_shape(2), (10, 10)),  # 0-1 and 2-3 cross; 1-2 is a hand-over on rank 1
        (Placement.plain(1), (0,)),
    ],
)
def test_messages(placement: Placement, messages: tuple[int, ...]) -> None:
    plan = RandomPlans(random.Random(1)).plan(placement, 5, 0.5)
    assert simulate(plan, Costs.uniform(placement)).messages_sent == messages


def test_forward_only_plans_send_activations_only() -> None:
    plan = plan_forward_only(Placement.plain(3), 4)
    assert simulate(plan, Costs.uniform(plan.placement)).messages_sent == (4, 4, 0)


def test_reductions_take_no_time_and_no_memory() -> None:
    stated = Plan.from_text(SMALL.to_text().replace("1BW1", "1BW1 1AR1"))
    assert evaluate(stated, SMALL_COSTS) == evaluate(SMALL, SMALL_COSTS)
    assert stated.programs[1][-1].op is Op.AR


def test_a_deadlock_is_an_error_not_a_timeline() -> None:
    swapped = SMALL.to_text().replace("0F1 0BW0", "0BW0 0F1").replace("1BW0 1F1", "1F1 1BW0")
    with pytest.raises(ScheduleError, match="no rank can proceed"):
        simulate(Plan.from_text(swapped), SMALL_COSTS)


def test_makespan_and_span_differ_where_ranks_start_late() -> None:
    """The span of rank 1 starts with its own first forward, so bubbles by the two costs differ."""
    plan = Plan.from_text(
        "schedule: h2\nmicrobatches: 3\nplacement: 0.0 1.0\n"
        "rank 0: 0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2\n"
        "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2\n"
    )
    timeline = simulate(plan, Costs.uniform(plan.placement))
    assert timeline.bubble("span") == 0
    assert timeline.bubble("makespan") == 1
    assert timeline.bubble_rate("makespan") == pytest.approx(1 / 10)
