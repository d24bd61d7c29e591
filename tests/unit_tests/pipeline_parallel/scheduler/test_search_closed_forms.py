"""Searched schedules against the formulas of the papers, for equal ranks and free transfers.

`zb` is ZB-1p at a limit of p micro-batches and ZB-2p at 2p (arXiv:2401.10241). For schedules on a
V placement T_F = T_B = T_W = 2, so that a pass of one chunk takes 1; n micro-batches in the memory
of k chunks per rank take at least 6n + 6p - 3k - 1 (arXiv:2405.15362, figure 13).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import (
    Objective,
    Timeline,
    simulate,
)

Times = tuple[float, float, float]  # T_F, T_B, T_W

UNIT: Times = (1.0, 1.0, 1.0)
CHUNK_UNIT: Times = (2.0, 2.0, 2.0)
# Dyadic (so that sums are exact), and two profiles of arXiv:2401.10241, table 9.
UNEQUAL: list[Times] = [(2.5, 2.0, 1.5), (18.522, 18.086, 9.337), (10.419, 10.207, 7.715)]
OBJECTIVES: tuple[Objective, Objective] = ("span", "makespan")

# p and m: ranks from 2 to 16; just enough micro-batches, twice and three times as many, and odd.
ALL_SIZES = [(p, m) for p in range(2, 17) for m in (p, 2 * p - 1, 2 * p, 3 * p, 4 * p + 1)]
SOME_SIZES = [
    (2, 2),
    (3, 5),
    (4, 4),
    (5, 15),
    (6, 25),
    (7, 7),
    (8, 24),
    (9, 17),
    (12, 24),
    (16, 31),
]


def search(
    name: str,
    p: int,
    m: int,
    times: Times,
    *,
    limit: float | None = None,
    objective: Objective = "span",
) -> Timeline:
    """The plan's timeline; `limit` is for every rank, None the schedule's own."""
    forward, input_grad, weight_grad = times
    costs = Costs.uniform(
        SCHEDULES[name].placement_for(p),
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
    )
    request = PlanRequest(
        num_ranks=p,
        num_microbatches=m,
        costs=costs,
        memory_limits=None if limit is None else (limit,) * p,
        objective=objective,
    )
    return simulate(plan_schedule(name, request), costs)


def check_zb_1p(p: int, m: int) -> None:
    """(p-1)(T_F + T_B - T_W) in both costs and p micro-batches, as ZB-H1."""
    for times in (UNIT, *UNEQUAL):
        forward, input_grad, weight_grad = times
        timeline = search("zb", p, m, times)
        expected = (p - 1) * (forward + input_grad - weight_grad)
        assert timeline.bubble("span") == pytest.approx(expected), times
        assert max(timeline.peaks) <= p
    for times in (UNIT, UNEQUAL[0]):
        forward, input_grad, weight_grad = times
        expected = (p - 1) * (forward + input_grad - weight_grad)
        timeline = search("zb", p, m, times, objective="makespan")
        assert timeline.bubble("makespan") == pytest.approx(expected), times


def check_zb_2p(p: int, m: int) -> None:
    """At most (p-1)(T_F + T_B - 2 T_W) in the longest span within 2p micro-batches; 0 for equal
    times. (Within more than the 2p-1 that ZB-H2 needs, unequal times leave less.)"""
    for times in (UNIT, UNEQUAL[1]):
        forward, input_grad, weight_grad = times
        timeline = search("zb", p, m, times, limit=2 * p)
        assert timeline.bubble("span") <= (p - 1) * (forward + input_grad - 2 * weight_grad) + 1e-9
        assert max(timeline.peaks) <= 2 * p
        if times == UNIT:
            assert timeline.bubble("span") == 0
    # Every rank works 3m, and the last one starts p-1 later than the first.
    assert search("zb", p, m, UNIT, limit=2 * p, objective="makespan").bubble("makespan") == p - 1


def check_zb_between(p: int, m: int, held: Iterable[int]) -> None:
    """(p-1) T_B + (p-k) T_F with k micro-batches in memory (arXiv:2401.10241, appendix B)."""
    for k in held:
        assert search("zb", p, m, UNIT, limit=k).bubble("span") == 2 * p - 1 - k, k


def check_zb_v(p: int, m: int) -> None:
    """No bubble in the longest span from m = 2p-1 on, p micro-batches; p-1 in the makespan."""
    timeline = search("zb-v", p, m, CHUNK_UNIT)
    assert timeline.bubble("span") == 0
    assert max(timeline.peaks) <= p
    timeline = search("zb-v", p, m, CHUNK_UNIT, objective="makespan")
    assert timeline.bubble("makespan") == p - 1
    assert max(timeline.peaks) <= p


def check_controllable_memory(p: int, m: int) -> None:
    """6p - 1 - 3k in both costs, in the exact peaks that the paper states."""
    for name, held in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        expected = max(0, 6 * p - 1 - 3 * 2 * held)
        for objective in OBJECTIVES:
            timeline = search(name, p, m, CHUNK_UNIT, objective=objective)
            # In the makespan the last rank's start, p-1 after the first, cannot be made up for.
            least = max(expected, p - 1) if objective == "makespan" else expected
            assert timeline.bubble(objective) == least, (name, objective)
            assert max(timeline.peaks) <= held


@pytest.mark.parametrize(("p", "m"), SOME_SIZES)
def test_zb_1p(p: int, m: int) -> None:
    check_zb_1p(p, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SOME_SIZES if m >= 2 * p - 1])
def test_zb_2p(p: int, m: int) -> None:
    check_zb_2p(p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (5, 15), (8, 24), (16, 32)])
def test_zb_between(p: int, m: int) -> None:
    check_zb_between(p, m, {p, 3 * p // 2, max(p, 2 * p - 3), 2 * p - 1})


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SOME_SIZES if m >= 2 * p - 1])
def test_zb_v(p: int, m: int) -> None:
    check_zb_v(p, m)


@pytest.mark.parametrize(("p", "m"), SOME_SIZES[1:-2])
def test_v_half_and_v_min(p: int, m: int) -> None:
    check_controllable_memory(p, m)


@pytest.mark.parametrize(("held", "bubble"), [(4, 23), (5, 17), (6, 11), (7, 5), (8, 0)])
def test_memory_buys_time_on_a_v(held: int, bubble: int) -> None:
    """p = 8: the figures an independent adaptive search reached."""
    assert search("zb-v", 8, 24, CHUNK_UNIT, limit=held).bubble("span") == bubble


@pytest.mark.grid
@pytest.mark.parametrize(("p", "m"), ALL_SIZES)
def test_all_sizes(p: int, m: int) -> None:
    check_zb_1p(p, m)
    if p > 2 or m > 2:
        check_controllable_memory(p, m)
    if m >= 2 * p - 1:
        check_zb_2p(p, m)
        check_zb_between(p, m, range(p, 2 * p))
        check_zb_v(p, m)


@pytest.mark.parametrize("name", ["zb", "zb-v"])
def test_few_microbatches(name: str) -> None:
    """m <= p in the memory of p: (m+p-1)(T_F + T_B) + T_W on a plain placement (arXiv:2401.10241,
    appendix), and no more on a V."""
    for times in (UNIT, UNEQUAL[1]):
        forward, input_grad, weight_grad = times
        for p, counts in ((2, (1, 2)), (4, (1, 3, 4)), (7, (4,))):
            for m in counts:
                span = search(name, p, m, times, limit=p).longest_span
                expected = (m + p - 1) * (forward + input_grad) + weight_grad
                if name == "zb":
                    assert span == pytest.approx(expected)
                assert span <= expected + 1e-9


def test_zb_h2_with_transfers() -> None:
    """(p-1)(T_F + T_B + 2 T_c - 2 T_W) in the longest span (the authors' own check)."""
    for p in (2, 4, 8, 16):
        placement = SCHEDULES["zb-h2"].placement_for(p)
        for (forward, input_grad, weight_grad), transfer in zip(
            UNEQUAL, (0.25, 0.601, 0.408), strict=True
        ):
            costs = Costs.uniform(
                placement,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
                transfer=transfer,
            )
            request = PlanRequest(num_ranks=p, num_microbatches=3 * p, costs=costs)
            timeline = simulate(plan_schedule("zb-h2", request), costs)
            expected = (p - 1) * (forward + input_grad + 2 * transfer - 2 * weight_grad)
            assert timeline.bubble("span") == pytest.approx(expected)
