"""The comparison of schedules at equal sizes: figures, refusals, remarks."""

from __future__ import annotations

import pytest
from render_plans import V_SPLIT

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, Schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.compare import (
    baseline_of,
    compare,
    comparison_json,
    comparison_table,
    gain_over_baseline,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import (
    EqualRanks,
    StageCosts,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest

TWO_BY_TWO = Question(num_ranks=2, num_microbatches=2)


def picky(request: PlanRequest) -> Plan:
    raise ScheduleError("m = 2 is not a multiple of 7; use 7 or 14\n  a second line")


def wasteful(request: PlanRequest) -> Plan:
    """GPipe: all forwards, then all backwards. 1F1B's time, more memory."""
    text = (
        "schedule: wasteful\nmicrobatches: 3\nplacement: 0.0 1.0\n"
        "rank 0: 0F0 0F1 0F2 0BW0 0BW1 0BW2\nrank 1: 1F0 1F1 1F2 1BW0 1BW1 1BW2\n"
    )
    return Plan.from_text(text)


@pytest.fixture(autouse=True)
def toy_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three more schedules, so that this file does not depend on which are registered."""
    toys = {
        "toy-v": Schedule(lambda request: V_SPLIT, "v", True, "a V written by hand"),
        "picky": Schedule(picky, "plain", False, "refuses"),
        "wasteful": Schedule(wasteful, "plain", False, "GPipe"),
    }
    for name, schedule in toys.items():
        monkeypatch.setitem(SCHEDULES, name, schedule)


def cells(table: str, name: str) -> list[str]:
    """The figures of a schedule's line, after its name and placement."""
    (line,) = [line for line in table.splitlines() if line.startswith(name)]
    return line.replace("v x2", "v").replace(" %", "%").split()[2:]


def test_every_figure_of_the_table() -> None:
    table = comparison_table(compare(["1f1b", "toy-v"], TWO_BY_TWO))
    assert cells(table, "1f1b ") == [*("9", "9", "33.3%", "33.3%", "1.000", "1.000", "4"), *"221"]
    assert cells(table, "toy-v ") == [
        *("7", "7", "14.3%", "14.3%", "1.286", "1.286", "8", "2", "1.5", "2")
    ]
    assert "(makespan): toy-v, 1.286 times 1F1B's speed" in table


def test_what_cannot_run_says_why_in_one_line() -> None:
    table = comparison_table(compare(["picky", "1f1b"], TWO_BY_TWO))
    assert "  picky  m = 2 is not a multiple of 7; use 7 or 14" in table.splitlines()
    assert "a second line" not in table


def test_a_memory_limit_refuses_schedules_but_not_the_baseline() -> None:
    limited = Question(num_ranks=2, num_microbatches=2, memory_limits=(1.5, 2.0))
    comparison = compare(["1f1b", "toy-v"], limited)
    assert list(comparison.runnable) == ["toy-v"]
    assert comparison.speed_up(comparison.runnable["toy-v"], "makespan") == pytest.approx(9 / 7)
    (refused,) = [entry for entry in comparison.entries if entry.timeline is None]
    assert refused.name == "1f1b"
    assert "limit 1.5" in refused.refusal


def test_nothing_runnable_is_said() -> None:
    assert "no schedule can run" in comparison_table(compare(["picky"], TWO_BY_TWO))


def test_a_dominated_schedule_is_pointed_out() -> None:
    comparison = compare(["1f1b", "wasteful"], Question(num_ranks=2, num_microbatches=3))
    assert comparison.dominators("wasteful") == ["1f1b"]
    assert comparison.dominators("1f1b") == []
    assert "wasteful is no better than 1f1b in any column" in comparison_table(comparison)


def test_per_stage_costs_give_every_placement_the_same_work() -> None:
    stages = StageCosts(
        lists={"forward": (3.0, 5.0), "input_grad": (3.0, 4.0), "weight_grad": (1.0, 2.0)},
        head={"forward": 2.0},
    )
    question = Question(num_ranks=2, num_microbatches=2, costs=stages)
    comparison = compare(["1f1b", "toy-v"], question)
    for timeline in comparison.runnable.values():
        assert sum(timeline.work) == pytest.approx(2 * 18.0)
    # Rank 0 of the V holds the first and the last quarter, so the head too.
    assert comparison.runnable["toy-v"].work == pytest.approx((2 * 10.0, 2 * 8.0))


def test_the_gain_is_a_warning_when_small() -> None:
    timeline = TWO_BY_TWO.timeline(V_SPLIT)
    clear = gain_over_baseline(baseline_of(TWO_BY_TWO), timeline)
    assert clear == "speed-up      over 1F1B: 1.286 by makespan, 1.286 by longest span"
    slow = Question(num_ranks=2, num_microbatches=2, costs=EqualRanks(transfer=3.0))
    small = gain_over_baseline(baseline_of(slow), slow.timeline(V_SPLIT))
    assert "warning       the gain is under 5%" in small


def test_the_json_has_one_entry_per_schedule() -> None:
    data = comparison_json(compare(["1f1b", "picky", "toy-v"], TWO_BY_TWO))
    first, second, third = data["schedules"]
    assert (first["schedule"], first["makespan"], first["speed_up_span"]) == ("1f1b", 9.0, 1.0)
    assert second == {"schedule": "picky", "refusal": "m = 2 is not a multiple of 7; use 7 or 14"}
    assert third["speed_up_makespan"] == pytest.approx(9 / 7)
    assert data["fastest_makespan"] == "toy-v"


def test_an_unknown_name_is_refused_in_its_line() -> None:
    comparison = compare(["1f1b"], TWO_BY_TWO)
    assert comparison.entries[0].timeline is not None
    with pytest.raises(ScheduleError, match="no schedule is named 'nope'; choose from 1f1b"):
        TWO_BY_TWO.answer("nope")


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="p is 0; a pipeline has at least 1 rank"):
        Question(num_ranks=0, num_microbatches=2).answer("1f1b")
