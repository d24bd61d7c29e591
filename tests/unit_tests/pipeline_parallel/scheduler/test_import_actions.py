"""Lists of torch.distributed.pipelining as plans, and ours held against them.

torch's lists are an outside opinion on interleaved, interleaved zero bubble, DualPipeV and ZB-V.
"""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.import_actions import plan_from_actions
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import evaluate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

TIMES = [(1.0, 1.0, 1.0, 0.0), (29.718, 29.444, 19.927, 0.527), (10.419, 10.207, 7.715, 0.408)]


def torch_plan(torch_name: str, placement: Placement, microbatches: int) -> Plan:
    actions = visualizer.get_schedule_ops(
        torch_name,
        placement.num_ranks,
        microbatches,
        num_stages_per_rank=placement.max_chunks,
    )
    return plan_from_actions(torch_name, placement, actions)


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize(
    ("name", "torch_name", "chunks", "sizes"),
    [
        ("interleaved", "Interleaved1F1B", 2, [(2, 4), (4, 4), (4, 8), (8, 16)]),
        ("interleaved", "Interleaved1F1B", 3, [(3, 6), (4, 16)]),
        ("zb-interleaved", "InterleavedZeroBubble", 2, [(2, 4), (4, 4), (4, 8), (8, 16)]),
        ("zb-interleaved", "InterleavedZeroBubble", 3, [(3, 6), (4, 16)]),
        ("dualpipe-v", "DualPipeV", 2, [(2, 4), (4, 8), (4, 11), (8, 16)]),
        ("zb-v", "ZBVZeroBubble", 2, [(2, 4), (3, 5), (4, 4), (4, 8), (4, 16), (8, 16)]),
    ],
)
def test_ours_is_not_worse(
    name: str,
    torch_name: str,
    chunks: int,
    sizes: list[tuple[int, int]],
    times: tuple[float, float, float, float],
) -> None:
    """Neither cost, nor the peak memory, at the same p and m."""
    if name not in SCHEDULES:
        pytest.skip(f"{name} is not registered")
    schedule = SCHEDULES[name]
    for p, m in sizes:
        theirs = torch_plan(torch_name, schedule.placement_for(p, chunks), m)
        validate(theirs)
        forward, input_grad, weight_grad, transfer = times
        costs = Costs.uniform(
            theirs.placement,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            transfer=transfer,
        )
        request = PlanRequest(num_ranks=p, num_microbatches=m, num_chunks=chunks, costs=costs)
        ours = plan_schedule(name, request)
        their_cost, our_cost = evaluate(theirs, costs), evaluate(ours, costs)
        assert our_cost.longest_span <= their_cost.longest_span * (1 + 1e-9)
        assert max(our_cost.peaks) <= max(their_cost.peaks) * (1 + 1e-9)


def test_names_and_pairs() -> None:
    placement = Placement.v_shape(1)
    rows = [["0F0", None, "1F0", "1I0", "", "(0F1;1W0)OVERLAP_F_B", "0B0", "1F1", "1B1", "0B1"]]
    plan = plan_from_actions("mine", placement, rows)
    assert " ".join(map(str, plan.programs[0])) == "0F0 1F0 1B0 0F1 1W0 0BW0 1F1 1BW1 0BW1"
    assert plan.num_microbatches == 2
    validate(plan)


@pytest.mark.parametrize("action", ["0SEND_F0", "1UNSHARD", "0F", "F0", "0X1"])
def test_other_actions_are_refused(action: str) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0 step 1: '{action}' is not a computation"):
        plan_from_actions("mine", Placement.plain(1), [["0F0", action]])
