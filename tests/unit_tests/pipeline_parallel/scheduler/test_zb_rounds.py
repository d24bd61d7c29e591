"""The paper's heuristic: its published figures, its memory limits, its own clock."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.planners.zb_rounds import (
    _Choices,
    _Rounds,
    plan_zb_rounds,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Objective, simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate


def _request(p: int, m: int, times: tuple[float, ...], limit: float, w: float) -> PlanRequest:
    forward, input_grad, weight_grad, transfer = times
    costs = Costs.uniform(
        Placement.plain(p),
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        transfer=transfer,
        held_b_to_w=w,
    )
    return PlanRequest(num_ranks=p, num_microbatches=m, costs=costs, memory_limits=(limit,) * p)


@pytest.mark.parametrize(
    ("p", "m", "times", "limit", "bubble"),
    [  # arXiv:2401.10241, table 5: ZB-1p and ZB-2p of the 1.5B and 14.6B models
        (8, 24, (18.522, 18.086, 9.337, 0.601), 8, 0.1585),
        (8, 64, (18.522, 18.086, 9.337, 0.601), 8, 0.0674),
        (8, 64, (18.522, 18.086, 9.337, 0.601), 16, 0.0026),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 16, 0.1397),
        (16, 48, (11.347, 11.248, 8.132, 0.377), 32, 0.0066),
    ],
)
def test_published_bubbles(
    p: int, m: int, times: tuple[float, ...], limit: float, bubble: float
) -> None:
    """W holds 32h / (34h + 5as) of what F does, at s = 1024: about 0.37 to 0.5."""
    request = _request(p, m, times, limit, 0.3664 if p == 8 else 0.4706)
    plan = plan_zb_rounds(request)
    costs = request.costs_for(plan.placement)
    validate(plan, costs=costs, memory_limits=request.memory_limits)
    assert simulate(plan, costs).bubble_rate("span") < bubble + 0.0015


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_its_clock_is_the_simulators(objective: Objective) -> None:
    for wait in (False, True):
        request = _request(5, 9, (3.0, 2.0, 1.5, 0.25), 6, 0.5)
        variant = _Rounds(request, _Choices(wait, True, not wait))
        variant.run()
        timeline = simulate(variant.plan(), request.costs_for(variant.placement))
        assert variant.cost(objective) == pytest.approx(timeline.cost(objective), rel=1e-12)


def test_memory_that_lets_no_round_through_is_refused() -> None:
    with pytest.raises(ScheduleError, match="memory limit of rank 0 is too low"):
        plan_zb_rounds(_request(4, 8, (1.0, 1.0, 1.0, 0.0), 0.5, 1.0))
