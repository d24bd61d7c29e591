"""Plans as text: round trips, and every way in which a plan file can be wrong."""

from __future__ import annotations

import pathlib
import random

import pytest
from brute_force import RandomPlans

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement, Slot
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

TEXT = """\
# pipeline plan
schedule: 1f1b
microbatches: 2
placement: 0.0 1.0
rank 0: 0F0 0F1 0BW0 0BW1
rank 1: 1F0 1BW0 1F1 1BW1
"""


def test_text_is_as_documented() -> None:
    plan = Plan.from_text(TEXT)
    assert plan.programs[0][2] == Instruction(Op.BW, 0, 0)
    assert plan.placement == Placement.plain(2)
    assert plan.num_ranks == 2 and not plan.forward_only
    assert plan.to_text() == TEXT


@pytest.mark.parametrize("seed", range(20))
def test_round_trip(seed: int, tmp_path: pathlib.Path) -> None:
    plans = RandomPlans(random.Random(seed))
    plan = plans.plan(plans.placement(), 3, 0.5)
    assert Plan.from_text(plan.to_text()) == plan
    plan.save(tmp_path / "plan.txt")
    assert Plan.load(tmp_path / "plan.txt") == plan


def test_blank_lines_comments_and_order_do_not_matter() -> None:
    lines = TEXT.splitlines()
    shuffled = [lines[0], "", *reversed(lines[1:]), "  # the end"]
    text = "\n".join(shuffled).replace("0F0 0F1", "0F0   0F1 ").replace("1BW1", "1BW1  # last")
    assert Plan.from_text(text) == Plan.from_text(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "0BW1",
            "0X1",
            "plan line 5: '0X1' is not an instruction; write it as <stage><F|B|W|BW|AR|PV>",
        ),
        ("0BW1", "BW1", "plan line 5: 'BW1' is not an instruction"),
        ("0F1 ", "0F1, ", "plan line 5: '0F1,' is not an instruction"),
        ("rank 1:", "rank 2:", "plan: the line 'rank 1: ...' is missing"),
        ("schedule: 1f1b\n", "", "plan: the line 'schedule: ...' is missing"),
        ("microbatches: 2\n", "", "plan: the line 'microbatches: ...' is missing"),
        ("placement: 0.0 1.0\n", "", "plan: the line 'placement: ...' is missing"),
        (": 2", ": two", "plan line 3: microbatches is 'two'; it must be a number from 1"),
        (": 2", ": 0", "plan line 3: microbatches is '0'"),
        ("0.0 1.0", "0 1", "plan line 4: '0' is not a slot; write it as <rank>.<chunk>"),
        ("0.0 1.0", "0.0 2.0", "plan line 4: placement [(0, 0), (2, 0)] is not a map of stages"),
        ("0.0 1.0", "0.0 0.0", "plan line 4: placement [(0, 0), (0, 0)] is not a map of stages"),
        ("0.0 1.0", "", "plan line 4: placement [] is not a map of stages"),
        ("rank 1:", "rank 0:", "plan line 6: 'rank 0' is given twice"),
        ("rank 1:", "rank 1", "plan line 6: 'rank 1 1F0 1BW0 1F1 1BW1' is not of the form"),
        ("schedule", "name: x\nschedule", "plan line 2: 'name' is not a field of a plan"),
        ("rank 1", "rank 2: 2F0\nrank 1", "plan line 6: 'rank 2' is not a field of a plan whose"),
    ],
)
def test_errors_name_the_line(old: str, new: str, expected: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError) as caught:
        Plan.from_text(TEXT.replace(old, new, 1))
    assert str(caught.value).startswith(expected)


def test_errors_name_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.plan"
    path.write_text(TEXT.replace("0F1", "0Z1"))
    with pytest.raises(ScheduleError, match=r"mine\.plan line 5: '0Z1' is not an instruction"):
        Plan.load(path)
    with pytest.raises(ScheduleError, match=r"none\.plan cannot be read: No such file"):
        Plan.load(tmp_path / "none.plan")
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ScheduleError, match=r"mine\.plan cannot be read: it is not text"):
        Plan.load(path)


def test_forward_only() -> None:
    assert Plan.of("eval", Placement.plain(1), 1, [[Instruction(Op.F, 0, 0)]]).forward_only


def test_placements() -> None:
    assert Placement.plain(3).slots == (Slot(0, 0), Slot(1, 0), Slot(2, 0))
    assert Placement.looped(2, 2).stages_by_rank == ((0, 2), (1, 3))
    assert Placement.v_shape(2).stages_by_rank == ((0, 3), (1, 2))
    assert Placement.v_shape(2).rank_of(2) == 1
    custom = Placement((Slot(0, 0), Slot(1, 0), Slot(1, 1)))
    assert custom.stages_by_rank == ((0,), (1, 2)) and custom.max_chunks == 2
    names = [Placement.plain(3), Placement.looped(2, 2), Placement.v_shape(2), custom]
    assert [placement.name for placement in names] == ["plain", "looped", "v", "custom"]


@pytest.mark.parametrize("slots", [[], [(1, 0)], [(0, 1)], [(0, 0), (0, 2)], [(0, 0), (0, 0)]])
def test_bad_placements(slots: list[tuple[int, int]]) -> None:
    with pytest.raises(ScheduleError, match="is not a map of stages onto ranks"):
        Placement(tuple(Slot(*slot) for slot in slots))
