"""Costs files: reading, cutting for other placements, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import (
    EqualRanks,
    StageCosts,
    load_stage_costs,
)

FILE: dict[str, Any] = {
    "forward": [8.0, 4.0, 4.0, 16.0],
    "input_grad": [6.0, 6.0, 6.0, 12.0],
    "weight_grad": [3.0, 3.0, 3.0, 9.0],
    "transfer": 0.5,
}
HEAD = {"forward": 12.0, "input_grad": 6.0, "weight_grad": 6.0}


def load(tmp_path: Path, data: Any, per_rank: EqualRanks | None = None) -> StageCosts:
    path = tmp_path / "costs.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return load_stage_costs(path, per_rank)


def test_the_given_stages_are_taken_as_they_are(tmp_path: Path) -> None:
    costs = load(tmp_path, {**FILE, "head": HEAD}).cut(Placement.plain(4))
    assert costs.forward == (8.0, 4.0, 4.0, 16.0)
    assert costs.weight_grad == (3.0, 3.0, 3.0, 9.0)
    assert costs.transfer == 0.5
    assert costs.held_f_to_b == (1.0,) * 4


def test_a_chunked_placement_takes_halves_of_the_ranks(tmp_path: Path) -> None:
    costs = load(tmp_path, FILE).cut(Placement.v_shape(4))
    assert costs.forward == (4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 8.0, 8.0)
    assert costs.held_f_to_b == (0.5,) * 8


def test_the_head_stays_whole_in_the_last_stage(tmp_path: Path) -> None:
    # Without its head of 12 the last rank's forward is 4: two halves of 2, the last plus the head.
    parts = {"head": HEAD, "embedding": {"forward": 4.0}}
    costs = load(tmp_path, {**FILE, **parts}).cut(Placement.v_shape(4))
    assert costs.forward == (6.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 14.0)
    assert costs.input_grad[-1] == 3.0 + 6.0


def test_fewer_stages_than_given_are_joined(tmp_path: Path) -> None:
    data = {name: [1.0, 2.0, 3.0, 4.0] for name in ("forward", "input_grad", "weight_grad")}
    data |= {"held_f_to_b": [1.0, 1.0, 2.0, 2.0]}
    costs = load(tmp_path, data).cut(Placement.plain(2))
    assert costs.forward == (3.0, 7.0)
    assert costs.held_f_to_b == (2.0, 4.0)
    assert costs.held_b_to_w == (1.0, 1.0)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
def test_totals_do_not_depend_on_the_placement(tmp_path: Path, chunks: int) -> None:
    costs = load(tmp_path, {**FILE, "head": HEAD}).cut(Placement.looped(4, chunks))
    assert sum(costs.forward) == pytest.approx(32.0)
    assert sum(costs.input_grad) == pytest.approx(30.0)
    assert sum(costs.held_b_to_w) == pytest.approx(4.0)
    assert costs.num_stages == 4 * chunks


def test_memory_of_a_rank_is_shared_among_its_given_stages(tmp_path: Path) -> None:
    data = {name: [1.0] * 8 for name in ("forward", "input_grad", "weight_grad")}
    memory = EqualRanks(held_f_to_b=3.0, held_b_to_w=1.0)
    costs = load(tmp_path, data, memory).cut(Placement.v_shape(4))
    assert costs.held_f_to_b == (1.5,) * 8
    assert costs.held_b_to_w == (0.5,) * 8


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "costs.json is not JSON"),
        ([1], "holds no JSON object"),
        ({**FILE, "forwards": 1}, "'forwards' is unknown; use forward, "),
        ({**FILE, "forward": 3}, "forward is 3; it must be a list"),
        ({**FILE, "forward": [1, "x", 1, 1]}, "forward has 'x', which is not a number"),
        ({**FILE, "forward": [1, True, 1, 1]}, "forward has True, which is not a number"),
        ({**FILE, "transfer": -1}, "transfer has -1; costs are finite"),
        ({**FILE, "forward": [1, 2, 3]}, "the lists have different lengths"),
        ({"forward": [1]}, "input_grad is None; it must be a list"),
        ({**FILE, "head": {"F": 1}}, "head is {'F': 1}; it must be an object"),
        ({**FILE, "head": {"forward": 17.0}}, "embedding has 0 and head 17 of forward, more than"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=r"costs\.json") as caught:
        load(tmp_path, data)
    assert words in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read: No such file"):
        load_stage_costs(tmp_path / "none.json")


def test_a_number_of_stages_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="for 4 stages, but there are 3 ranks"):
        load(tmp_path, FILE).cut(Placement.plain(3))
