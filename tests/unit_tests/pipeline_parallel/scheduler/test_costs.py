"""Costs per stage, requests, and what is refused in them."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement, Slot
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest

COSTS = Costs(
    forward=(1.0, 2.0),
    input_grad=(3.0, 4.0),
    weight_grad=(5.0, 6.0),
    transfer=0.5,
    held_f_to_b=(10.0, 20.0),
    held_b_to_w=(7.0, 8.0),
)


@pytest.mark.parametrize(
    ("op", "time", "at_start", "at_end"),
    [
        (Op.F, 2.0, 20.0, 0.0),
        (Op.B, 4.0, 0.0, -12.0),
        (Op.W, 6.0, 0.0, -8.0),
        (Op.BW, 10.0, 0.0, -20.0),
        (Op.AR, 0.0, 0.0, 0.0),
    ],
)
def test_each_operation(op: Op, time: float, at_start: float, at_end: float) -> None:
    instruction = Instruction(op, 1, 3)
    assert COSTS.of(instruction) == time
    assert COSTS.memory_at_start(instruction) == at_start
    assert COSTS.memory_at_end(instruction) == at_end


def test_work() -> None:
    assert COSTS.work_of((0, 1), 3) == 3 * (9 + 12)


def test_uniform_shares_a_rank_among_its_chunks() -> None:
    uneven = Placement((Slot(0, 0), Slot(1, 0), Slot(1, 1)))
    costs = Costs.uniform(uneven, forward=2.0, transfer=0.25, held_b_to_w=3.0)
    assert costs.forward == (2.0, 1.0, 1.0)
    assert costs.transfer == 0.25
    assert costs.held_b_to_w == (3.0, 1.5, 1.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"forward": (1.0,)}, "different numbers of stages"),
        ({"input_grad": (1.0, -1.0)}, "cost input_grad has -1.0; costs are finite and not below 0"),
        ({"transfer": float("inf")}, "cost transfer has inf"),
        ({"held_f_to_b": (float("nan"), 1.0)}, "cost held_f_to_b has nan"),
        ({"forward": (0.0, 1.0)}, "cost forward has 0.0; a forward takes time"),
    ],
)
def test_bad_costs(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected):
        dataclasses.replace(COSTS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_ranks", "num_microbatches", "num_chunks", "group_size"])
def test_requests_count_from_one(name: str) -> None:
    sizes = {"num_ranks": 2, "num_microbatches": 2, name: 0}
    with pytest.raises(ScheduleError, match=f"{name} is 0; it must be at least 1"):
        PlanRequest(**sizes)  # type: ignore[arg-type]


def test_requests_have_one_limit_per_rank() -> None:
    with pytest.raises(ScheduleError, match="1 memory limits are given for 2 ranks"):
        PlanRequest(num_ranks=2, num_microbatches=2, memory_limits=(1.0,))


def test_costs_for_a_placement() -> None:
    request = PlanRequest(num_ranks=2, num_microbatches=2, costs=COSTS)
    assert request.costs_for(Placement.plain(2)) is COSTS
    with pytest.raises(ScheduleError, match="given for 2 stages, but the v placement on 2 ranks"):
        request.costs_for(Placement.v_shape(2))
    unit = PlanRequest(num_ranks=2, num_microbatches=2).costs_for(Placement.v_shape(2))
    assert unit.forward == (0.5,) * 4
