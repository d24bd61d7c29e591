"""Two iterations in a row: how far apart they are, and what runs in them."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.back_to_back import (
    with_meeting,
    with_post_validation,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.svg import to_svg
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline

P, M = 4, 8


def passes_of(timeline: Timeline, rank: int) -> list[tuple[str, float]]:
    """(instruction, start) without the marks."""
    steps = zip(timeline.plan.programs[rank], timeline.starts[rank], strict=True)
    return [(str(i), start) for i, start in steps if not i.op.is_mark]


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_the_second_iteration_repeats_the_first_one_period_later(schedule: str) -> None:
    """Unit times, m(T_F + T_B + T_W) = 24: zero bubble if ranks do not meet (arXiv:2401.10241)."""
    one = Question(num_ranks=P, num_microbatches=M).answer(schedule)
    met = with_meeting(one.plan, one.costs)
    early = with_post_validation(one.plan, one.costs)
    for timeline, period in ((met, one.makespan), (early, 3.0 * M)):
        for rank in range(P):
            steps = passes_of(timeline, rank)
            first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
            assert [start + period for _, start in first] == [start for _, start in second]
            assert [name for name, _ in first] == [str(i) for i in one.plan.programs[rank]]
    assert met.makespan == 2 * one.makespan > early.makespan


def test_only_post_validation_has_checks_and_only_in_the_second_warm_up() -> None:
    one = Question(num_ranks=P, num_microbatches=M).answer("zb-h2")
    assert not any(i.op.is_mark for i in with_meeting(one.plan, one.costs).plan.instructions())
    for program in with_post_validation(one.plan, one.costs).plan.programs:
        (step,) = (step for step, i in enumerate(program) if i.op is Op.PV)
        half = 3 * M
        assert step >= half
        assert all(i.op is Op.F and i.microbatch >= M for i in program[half:step])


def test_a_picture_takes_its_title_and_subtitle() -> None:
    one = Question(num_ranks=P, num_microbatches=M).answer("zb-h2")
    svg = to_svg(with_meeting(one.plan, one.costs), title="a < b", subtitle="27 units")
    assert "<title>a &lt; b</title>" in svg and "<desc>27 units</desc>" in svg
    assert "makespan" not in svg
