"""The text grid, held against the timeline it shows."""

from __future__ import annotations

import re

import pytest
from render_plans import ONE_F_ONE_B, V_SPLIT

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.numbers import (
    TimeUnit,
    compact,
    percent,
    round_step,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.text import figures, text_grid
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline, simulate


def unit_times(plan: Plan) -> Timeline:
    return simulate(plan, Costs.uniform(plan.placement))


def rows_of(grid: str) -> list[str]:
    """The rows of each rank, panels joined, without the names."""
    rows: dict[str, str] = {}
    panels = [p for p in grid.split("\n\n") if "|" in p]
    for panel in panels:
        lines = panel.splitlines()
        width = max(len(line) for line in lines[1:])
        for line in lines[1:]:
            name, _, cells = line.ljust(width).partition("|")
            rows[name] = rows.get(name, "") + cells
    return [cells.rstrip() for cells in rows.values()]


def test_one_f_one_b_looks_as_drawn_by_hand() -> None:
    assert rows_of(text_grid(unit_times(ONE_F_ONE_B))) == [
        "F0 F1       BW0--    BW1--",
        "   F0 BW0-- F1 BW1--",
    ]
    assert rows_of(text_grid(unit_times(V_SPLIT))) == [
        "F0 F1    f0 b0 w0 f1 b1 w1 B0 W0    B1 W1",
        "   F0 f0 F1 f1 b0 w0 B0 W0 b1 w1 B1 W1",
    ]


def test_every_instruction_stands_at_its_time() -> None:
    timeline = unit_times(V_SPLIT)
    for rank, row in enumerate(rows_of(text_grid(timeline))):
        labels = [(match[0], match.start()) for match in re.finditer(r"[A-Za-z]+\d+", row)]
        program = V_SPLIT.programs[rank]
        slots = V_SPLIT.placement.slots
        expected = [
            (op.value.lower() if slots[stage].chunk else op.value) + str(microbatch)
            for op, stage, microbatch in program
        ]
        assert [label for label, _ in labels] == expected
        columns_per_time = 3 / 0.5  # two letters and a space for half a unit
        starts = [column / columns_per_time for _, column in labels]
        assert starts == list(timeline.starts[rank])


def test_more_than_two_chunks_are_named_by_stage() -> None:
    placement = Placement.looped(1, 3)
    text = "schedule: x\nmicrobatches: 1\nplacement: 0.0 0.1 0.2\n"
    plan = Plan.from_text(text + "rank 0: 0F0 1F0 2F0 2BW0 1BW0 0BW0")
    assert plan.placement == placement
    assert rows_of(text_grid(unit_times(plan)))[0].split()[:3] == ["0F0", "1F0", "2F0"]


@pytest.mark.parametrize("width", [30, 50, 120])
def test_wide_grids_continue_in_panels(width: int) -> None:
    timeline = Question(num_ranks=4, num_microbatches=12).answer("1f1b")
    wide, narrow = text_grid(timeline, width=1000), text_grid(timeline, width=width)
    assert max(map(len, narrow.split("\n\n")[0].splitlines())) <= width
    if "too long to number" not in narrow:
        assert [r.replace(" ", "") for r in rows_of(narrow)] == [
            r.replace(" ", "") for r in rows_of(wide)
        ]


def test_long_plans_drop_the_numbers_and_say_so() -> None:
    grid = text_grid(Question(num_ranks=4, num_microbatches=200).answer("1f1b"), width=100)
    assert "too long to number micro-batches" in grid
    assert all(not re.search(r"\d", row) for row in rows_of(grid))
    assert rows_of(grid)[0].count("F") == 200


def test_colours_only_where_asked_for() -> None:
    timeline = unit_times(V_SPLIT)
    plain, coloured = text_grid(timeline), text_grid(timeline, colour=True)
    assert "\x1b" not in plain
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()
    assert len(set(re.findall(r"48;5;(\d+)", coloured))) == 6  # F, B, W of two chunks


def test_the_figures_are_those_of_the_simulation() -> None:
    lines = figures(unit_times(ONE_F_ONE_B)).splitlines()
    assert lines[0] == "by-hand: p = 2, m = 2, plain placement"
    assert lines[1].startswith("makespan      9, bubble rate 33.3 %")
    assert lines[2].startswith("longest span  9, bubble rate 33.3 %")
    assert lines[4] == "peak memory   2; by rank: 2 1"
    assert lines[5] == "messages sent 4; by rank: 2 2"


def test_microseconds_become_milliseconds_when_long() -> None:
    assert TimeUnit.fit("us", 9_999.0).text(1234.0) == "1234 us"
    assert TimeUnit.fit("us", 20_000.0).text(1234.0) == "1.234 ms"
    assert TimeUnit.fit("", 20_000.0).text(12.0) == "12"


def test_numbers() -> None:
    assert [compact(v) for v in (27.0, 0.5, 1234.56, 1234567.0, 1 / 3)] == [
        *("27", "0.5", "1234.6", "1234567", "0.33333")
    ]
    assert [percent(v) for v in (0.0, -1e-12, 3 / 67)] == ["0.0 %", "0.0 %", "4.5 %"]
    assert [round_step(v) for v in (0.9, 1.0, 1.1, 23.0, 51.0)] == [1.0, 1.0, 2.0, 50.0, 100.0]
