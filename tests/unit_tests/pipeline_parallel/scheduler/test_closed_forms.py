"""Costs and peaks of the hand-made schedules against the formulas of the papers.

T_F, T_B, T_W are per rank. Transfers are free unless a test says otherwise.
"""

from __future__ import annotations

import itertools

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline, simulate

Times = tuple[float, float, float]  # T_F, T_B, T_W

UNIT: Times = (1.0, 1.0, 1.0)
# Equal, dyadic (so that sums are exact), and two profiles of arXiv:2401.10241, table 9.
ALL_TIMES: list[Times] = [UNIT, (2.5, 2.0, 1.5), (18.522, 18.086, 9.337), (10.419, 10.207, 7.715)]
RANKS = range(2, 17)

all_times = pytest.mark.parametrize("times", ALL_TIMES, ids=str)


def run(
    name: str, ranks: int, microbatches: int, times: Times = UNIT, chunks: int | None = None
) -> Timeline:
    request = PlanRequest(num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
    plan = plan_schedule(name, request)
    forward, input_grad, weight_grad = times
    return simulate(
        plan,
        Costs.uniform(
            plan.placement, forward=forward, input_grad=input_grad, weight_grad=weight_grad
        ),
    )


def bubbles(timeline: Timeline) -> tuple[float, float]:
    return timeline.bubble("makespan"), timeline.bubble("span")


def microbatch_counts(ranks: int) -> list[int]:
    return [ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks]


@all_times
def test_1f1b(times: Times) -> None:
    """(p-1)(T_F + T_B + T_W) for any m, also m < p; rank r holds min(p-r, m)."""
    for p in RANKS:
        for m in [1, p - 1, *microbatch_counts(p)]:
            timeline = run("1f1b", p, m, times)
            assert bubbles(timeline) == pytest.approx([(p - 1) * sum(times)] * 2)
            assert timeline.peaks == tuple(min(p - r, m) for r in range(p))


@all_times
def test_zb_h1(times: Times) -> None:
    """(p-1)(T_F + T_B - T_W) from m = p on, in the memory of 1F1B's first rank."""
    forward, input_grad, weight_grad = times
    for p in RANKS:
        for m in microbatch_counts(p):
            timeline = run("zb-h1", p, m, times)
            expected = (p - 1) * (forward + input_grad - weight_grad)
            assert bubbles(timeline) == pytest.approx([expected] * 2)
            assert timeline.peaks == (min(m, p),) * p


@all_times
def test_zb_h2(times: Times) -> None:
    """(p-1)(T_F + T_B - 2 T_W) in the longest span from m = 2p-1 on; 2p-1 micro-batches."""
    forward, input_grad, weight_grad = times
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 3 * p):
            timeline = run("zb-h2", p, m, times)
            expected = (p - 1) * (forward + input_grad - 2 * weight_grad)
            assert timeline.bubble("span") == pytest.approx(expected)
            assert timeline.peaks == (min(m, 2 * p - 1),) * p


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.5), (2.0, 1.0, 1.75)], ids=str)
def test_zb_h2_has_no_negative_bubble(times: Times) -> None:
    """Where 2 T_W exceeds T_F + T_B the formula is below 0, and the span still cannot beat work."""
    for p in (2, 4, 8):
        assert run("zb-h2", p, 3 * p, times).bubble("span") >= 0


@all_times
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_few_microbatches(name: str, times: Times) -> None:
    """For m <= p both take (m+p-1)(T_F + T_B) + T_W (arXiv:2401.10241, appendix), where 1F1B takes
    (m+p-1)(T_F + T_B + T_W)."""
    forward, input_grad, weight_grad = times
    for p in range(1, 9):
        for m in range(1, p + 1):
            expected = (m + p - 1) * (forward + input_grad) + weight_grad
            assert run(name, p, m, times).longest_span == pytest.approx(expected)


def test_zb_h1_where_w_is_longer_than_f() -> None:
    """The formula wants T_W <= T_F: a delayed W hides no more than the forward beside it."""
    forward, input_grad, weight_grad = 2.0, 3.0, 5.0
    for p, m in ((2, 4), (4, 8), (8, 16)):
        timeline = run("zb-h1", p, m, (forward, input_grad, weight_grad))
        assert timeline.bubble("span") == (p - 1) * (forward + input_grad - forward)


@all_times
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved(times: Times, chunks: int) -> None:
    """(p-1)(T_F + T_B + T_W)/v from m = p on, also where p does not divide m."""
    for p in range(2, 11):
        for m in microbatch_counts(p):
            timeline = run("interleaved", p, m, times, chunks)
            assert bubbles(timeline) == pytest.approx([(p - 1) * sum(times) / chunks] * 2)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_few_microbatches_and_memory(chunks: int) -> None:
    """For m <= p a micro-batch passes vp stages and the others follow it; memory on rank 0 is
    (vp + p - 1)/v where p divides m."""
    for p in range(1, 7):
        for m in range(1, p + 1):
            timeline = run("interleaved", p, m, UNIT, chunks)
            assert timeline.makespan == pytest.approx((chunks * p + m - 1) * 3 / chunks)
        peak = max(run("interleaved", p, 3 * p, UNIT, chunks).peaks)
        assert peak == pytest.approx((chunks * p + p - 1) / chunks)


@all_times
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_zb_interleaved(times: Times, chunks: int) -> None:
    """(p-1)(T_F + T_B - T_W)/v in both costs and p micro-batches on every rank, where p divides m;
    with one chunk it is ZB-H1."""
    forward, input_grad, weight_grad = times
    for p, groups in itertools.product(range(2, 11), (1, 2, 3)):
        timeline = run("zb-interleaved", p, groups * p, times, chunks)
        expected = (p - 1) * (forward + input_grad - weight_grad) / chunks
        assert bubbles(timeline) == pytest.approx([expected] * 2)
        assert timeline.peaks == pytest.approx([p] * p)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_zb_interleaved_groups(chunks: int) -> None:
    """Groups of g hold ((v-1)g + p)/v micro-batches, and leave at most the bubble of GIS
    (arXiv:2503.01328, table 1), which does not hold W back."""
    for p in range(2, 9):
        for g in range((p + 1) // 2, p + 1):
            request = PlanRequest(
                num_ranks=p, num_microbatches=4 * g, num_chunks=chunks, group_size=g
            )
            plan = plan_schedule("zb-interleaved", request)
            timeline = simulate(plan, Costs.uniform(plan.placement))
            assert max(timeline.peaks) == pytest.approx(((chunks - 1) * g + p) / chunks)
            gis = (2 * (p - 1) + (p - g) * (chunks - 1)) / chunks
            assert timeline.bubble("span") <= gis + 1e-9


def test_zb_interleaved_memory_never_exceeds_that_of_1f1b() -> None:
    """Also where p does not divide m; nor is its span ever longer than that of ZB-H1."""
    for p in range(1, 9):
        for m in range(1, 3 * p + 2):
            timeline = run("zb-interleaved", p, m)
            assert max(timeline.peaks) <= min(m, p) + 1e-9
            assert timeline.longest_span <= run("zb-h1", p, m).longest_span + 1e-9


def test_dualpipe_v() -> None:
    """(p-1)(T_F + T_B - T_W)/2 for equal times and m >= 2p; p + 1/2 micro-batches."""
    for p in range(1, 13):
        for m in (2 * p, 2 * p + 1, 3 * p + 2):
            timeline = run("dualpipe-v", p, m)
            assert bubbles(timeline) == ((p - 1) / 2, (p - 1) / 2)
            assert max(timeline.peaks) == p + 0.5


def test_dualpipe_v_few_microbatches() -> None:
    """Below 2p no formula is known; it never loses to the 1F1B that fuses its backwards."""
    for p in range(2, 9):
        for m in range(1, 2 * p):
            timeline = run("dualpipe-v", p, m)
            assert timeline.makespan <= run("1f1b", p, m).makespan
            assert max(timeline.peaks) <= min(m, p + 0.5)


@pytest.mark.parametrize(
    ("times", "transfer", "ranks", "microbatches", "rate"),
    [
        ((29.718, 29.444, 19.927), 0.527, 8, 24, 0.0742),
        ((11.347, 11.248, 8.132), 0.377, 16, 48, 0.0844),
        ((10.419, 10.207, 7.715), 0.408, 32, 96, 0.0895),
    ],
)
def test_dualpipe_v_on_measured_times(
    times: Times, transfer: float, ranks: int, microbatches: int, rate: float
) -> None:
    """Bubble rates of an independent evaluator for the original order."""
    request = PlanRequest(num_ranks=ranks, num_microbatches=microbatches)
    plan = plan_schedule("dualpipe-v", request)
    forward, input_grad, weight_grad = times
    costs = Costs.uniform(
        plan.placement,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        transfer=transfer,
    )
    assert simulate(plan, costs).bubble_rate("makespan") == pytest.approx(rate, abs=5e-5)


def test_1f1b_v() -> None:
    """About two thirds of 1F1B's memory, and no longer for equal times; a little memory more buys
    time. For two ranks a third is less than a chunk, and nothing is saved."""
    for p in (2, 3, 4, 5, 7, 8, 12):
        for m in (1, p, 2 * p + 1) if p > 5 else (1, p, 2 * p + 1, 4 * p):
            timeline = run("1f1b-v", p, m)
            assert timeline.bubble("span") <= run("1f1b", p, m).bubble("span")
            assert max(timeline.peaks) <= min(m, 2 * p / 3 + 1.5)


def test_1f1b_v_on_measured_times() -> None:
    """The profile of a 6.2B model on 8 ranks: less time than 1F1B in 6.5 of its 8 micro-batches,
    and less still within a limit of 8."""
    spans = {}
    for name, limit in (("1f1b", None), ("1f1b-v", None), ("1f1b-v", 8.0)):
        placement = SCHEDULES[name].placement_for(8)
        costs = Costs.uniform(
            placement, forward=29.718, input_grad=29.444, weight_grad=19.927, transfer=0.527
        )
        limits = None if limit is None else (limit,) * 8
        request = PlanRequest(num_ranks=8, num_microbatches=24, costs=costs, memory_limits=limits)
        timeline = simulate(plan_schedule(name, request), costs)
        spans[name, limit] = timeline.longest_span
        assert max(timeline.peaks) <= (limit or {"1f1b": 8.0, "1f1b-v": 6.5}[name])
    assert spans["1f1b-v", 8.0] < spans["1f1b-v", None] < spans["1f1b", None]


# Bubbles with one unit of time per chunk: T_F = T_B = T_W = number of chunks.
@pytest.mark.parametrize(
    ("name", "makespan", "span", "sizes"),
    [
        ("1f1b", 3, 3, [(1, 1), (2, 4), (4, 4), (4, 8), (8, 3)]),
        ("interleaved", 3, 3, [(3, 6), (4, 8)]),
        ("zb-interleaved", 1, 1, [(3, 6), (4, 8), (4, 16)]),
        ("zb-v", 1, 0, [(3, 5), (4, 8), (4, 16)]),
    ],
)
def test_table_of_bubbles(
    name: str, makespan: int, span: int, sizes: list[tuple[int, int]]
) -> None:
    """Bubble over (p-1)."""
    if name not in SCHEDULES:
        pytest.skip(f"{name} is not registered")
    chunks = float(SCHEDULES[name].default_chunks)
    for p, m in sizes:
        timeline = run(name, p, m, (chunks, chunks, chunks))
        assert bubbles(timeline) == (makespan * (p - 1), span * (p - 1))


@pytest.mark.parametrize(
    ("p", "m", "name", "step_time", "idle", "live"),
    [
        (4, 8, "1f1b", 33, (9, 6, 3, 0), (4, 3, 2, 1)),
        (4, 8, "zb-h1", 27, (3, 2, 1, 0), (4, 4, 4, 4)),
        (4, 8, "zb-h2", 27, (0, 0, 0, 0), (7, 7, 7, 7)),
        (4, 4, "1f1b", 21, (9, 6, 3, 0), (4, 3, 2, 1)),
        (4, 4, "zb-h1", 15, (3, 2, 1, 0), (4, 4, 4, 4)),
        (4, 4, "zb-h2", 16, (3, 3, 2, 0), (4, 4, 4, 4)),
        (4, 3, "1f1b", 18, (9, 6, 3, 0), (3, 3, 2, 1)),
        (4, 3, "zb-h1", 13, (4, 3, 2, 0), (3, 3, 3, 3)),
        (4, 3, "zb-h2", 14, (4, 4, 2, 0), (3, 3, 3, 3)),
        (3, 5, "1f1b", 21, (6, 3, 0), (3, 2, 1)),
        (3, 5, "zb-h1", 17, (2, 1, 0), (3, 3, 3)),
        (3, 5, "zb-h2", 17, (0, 0, 0), (5, 5, 5)),
        (8, 16, "1f1b", 69, (21, 18, 15, 12, 9, 6, 3, 0), (8, 7, 6, 5, 4, 3, 2, 1)),
        (8, 16, "zb-h1", 55, (7, 6, 5, 4, 3, 2, 1, 0), (8,) * 8),
        (8, 16, "zb-h2", 55, (0,) * 8, (15,) * 8),
    ],
)
def test_table_of_idle_time_and_live_microbatches(
    p: int, m: int, name: str, step_time: int, idle: tuple[int, ...], live: tuple[int, ...]
) -> None:
    """Unit times: makespan, idle time within each rank's span, micro-batches held at the peak."""
    timeline = run(name, p, m)
    assert timeline.makespan == step_time
    spans = zip(timeline.spans, timeline.work, strict=True)
    assert tuple(span - work for span, work in spans) == idle
    assert timeline.peaks == live


def test_1f1b_bubble_rate_of_the_report() -> None:
    """p = 4, m = 64: no schedule can gain more than 3/67 = 4.5 %."""
    assert run("1f1b", 4, 64).bubble_rate("makespan") == pytest.approx(3 / 67)
