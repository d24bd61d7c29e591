"""Our schedules against figures that others reached: never worse at equal or lower peak memory.

The figures: golden/peer_rows.csv, 75 schedules that an existing scheduler plans, of all its kinds,
p 4 to 32, m from p to 8p and six sets of times; tables and figures of arXiv:2401.10241; and a few
that slow searches found. `tools/benchmark_planner.py` prints them beside ours.

With `-m grid` all published figures, and the whole table of the existing scheduler if its path is
in the environment variable PEER_SCHEDULES_CSV.
"""

from __future__ import annotations

import os
import pathlib

import pytest

from megatron.training.benchmarks.planner_cases import FAILURES, Case, answer
from megatron.training.benchmarks.planner_paper import (
    frontier,
    paper_cases,
    searched,
    table_5,
    table_8,
)
from megatron.training.benchmarks.planner_peer import load_peer_cases
from megatron.training.benchmarks.planner_report import row_line

GOLDEN = pathlib.Path(__file__).parents[3] / "golden" / "peer_rows.csv"
TABLE_VARIABLE = "PEER_SCHEDULES_CSV"
QUICK_SIZE = 600  # instructions
QUICK_SIZE_ON_A_V = 4700  # the smallest case of table 8


def label(case: Case) -> str:
    """Such as `zbv-p8-m16-T1-limit8`."""
    times = f"T{case.costs.forward:g}+{case.costs.transfer:g}"
    name = case.name.replace(" ", "_").replace("/", ":")
    return f"{name}-p{case.num_ranks}-m{case.num_microbatches}-{times}-limit{case.stated_limit}"


ROW_SIZE = 2000  # instructions; larger rows of the golden table take seconds each

# Rows that the search does not reach yet, and by how much at most: not to grow, and to be deleted
# when they are reached.
SHORT = {
    "zbv-p16-m32-T11.347+0.377-limit16": 5e-4,
    "searched-p4-m8-T18.522+0.601-limit4": 6e-3,
}


def check(case: Case) -> None:
    found = answer(case)  # has passed validate with the case's limits
    short = SHORT.get(label(case), 0.0)
    if short:
        assert 0 < found.excess <= short, f"SHORT says {short}: {row_line(found)}"
    else:
        assert found.verdict not in FAILURES, row_line(found)
    assert found.bound <= case.cost * (1 + max(case.tolerance, 1e-6)), "the lower bound is wrong"


golden = load_peer_cases(GOLDEN)
quick = [case for case in (*table_5(), *frontier()) if case.num_instructions <= QUICK_SIZE]
quick += [case for case in table_8() if case.num_instructions <= QUICK_SIZE_ON_A_V]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=label(c), marks=[pytest.mark.grid] * (c.num_instructions > ROW_SIZE))
        for c in golden
    ],
)
def test_peer_rows(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", quick, ids=label)
def test_published_bubbles(case: Case) -> None:
    """1.5B and 6.2B on 8 ranks, m = 24; ZB-V on 16 ranks, m = 48."""
    check(case)


@pytest.mark.parametrize("case", list(searched()), ids=label)
def test_bubbles_that_searches_found(case: Case) -> None:
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", paper_cases(), ids=label)
def test_all_published_bubbles(case: Case) -> None:
    check(case)


@pytest.mark.grid
@pytest.mark.timeout(7200)
def test_all_peer_rows() -> None:
    """Every row that is worse, at once."""
    path = os.environ.get(TABLE_VARIABLE)
    if path is None:
        pytest.skip(f"no table: set {TABLE_VARIABLE} to the path of one")
    answers = map(answer, load_peer_cases(path))
    worse = [row_line(found) for found in answers if found.verdict in FAILURES]
    assert worse == []


def test_golden_rows_are_spread() -> None:
    """Every kind of schedule, size and set of times of the table they are from."""
    assert len(golden) == 75
    assert {case.name for case in golden} == {
        "1f1b",
        "1f1b_v",
        "interleaved_v2",
        "interleaved_v4",
        "group_interleaved_v2_gp",
        "group_interleaved_v2_gp/2",
        "group_interleaved_v4_gp",
        "group_interleaved_v4_gp/2",
        "zb",
        "zb_papermem",
        "zbv",
        "handcrafted_zbv",
        "zbv_greedy",
        "v_auto",
    }
    assert {case.num_ranks for case in golden} == {4, 8, 16, 32}
    assert {case.num_microbatches // case.num_ranks for case in golden} == {1, 2, 3, 4, 8}
    assert len({case.costs.forward + case.costs.transfer for case in golden}) == 6
