"""tools/benchmark_planner.py: command line, table of a peer, verdicts, exit status."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.training.benchmarks import planner_report
from megatron.training.benchmarks.planner_cases import Case, answer
from megatron.training.benchmarks.planner_paper import (
    MODELS,
    PROFILES,
    frontier,
    paper_cases,
    searched,
    table_5,
    table_8,
)
from megatron.training.benchmarks.planner_peer import PEER_SCHEDULES, Ours, load_peer_cases
from megatron.training.benchmarks.planner_speed import LIMITS_S, measure_speed, speed_cases
from tools import benchmark_planner as tool

ROOT = pathlib.Path(__file__).parents[3]
HEAD = "scheduler,p,m,TF,TB,TW,Tc,mem_limit,makespan,peak_mem_max"
# 1F1B, p = 2, m = 2, unit times: 9 of time; ZB-V of p = 3, m = 5: no bubble.
ROWS = (
    "1f1b,2,2,1,1,1,0,none,9,2",
    "zbv,3,5,1,1,1,0,3,15,3",
    "interleaved_v2,2,2,1,1,1,0,none,7.5,2",
)


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(tmp_path / "peer.csv", HEAD, *ROWS)


def write(path: pathlib.Path, *lines: str) -> pathlib.Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def case(**changes: Any) -> Case:
    base = Case(
        name="peer",
        schedule="1f1b",
        num_ranks=2,
        num_microbatches=2,
        memory_limits=(2.0, 2.0),
        cost=9.0,
        tolerance=1e-6,
    )
    return dataclasses.replace(base, **changes)


# ---- verdicts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "verdict"),
    [(9.0, "equal"), (9.000005, "equal"), (8.99998, "WORSE"), (9.1, "better"), (8.0, "WORSE")],
)
def test_verdict_within_the_tolerance(cost: float, verdict: str) -> None:
    found = answer(case(cost=cost))
    assert (found.cost, found.peak_memory) == (9.0, 2.0)
    assert found.verdict == verdict
    assert found.excess == pytest.approx(9.0 / cost - 1)


def test_figures_of_an_answer() -> None:
    found = answer(case(schedule="zb", num_ranks=4, num_microbatches=8, memory_limits=(4.0,) * 4))
    assert (
        found.cost == 27.0 and found.bound == pytest.approx(27.0) and found.gap == pytest.approx(0)
    )
    assert found.bubble_rate == pytest.approx(3 / 27)
    assert found.case.bubble_rate == pytest.approx((9 - 24) / 9)
    assert found.case.num_instructions == 4 * 8 * 3


def test_a_plan_that_needs_more_memory_is_refused_not_compared() -> None:
    found = answer(case(memory_limits=(1.5, 1.5)))
    assert found.verdict == "REFUSED" and found.cost is None and found.gap is None
    assert "1f1b needs 2" in found.refusal
    assert "REFUSED: 1f1b needs 2" in planner_report.row_line(found)
    assert planner_report.answer_json(found)["excess"] is None
    assert "1" in planner_report.summary([found])


def test_gap_to_the_published_bound_of_a_v() -> None:
    """6p - 1 - 3k: with p = 8 and k = 10, 17 passes of a chunk."""
    question = case(
        schedule="v-half",
        num_ranks=8,
        num_microbatches=16,
        costs=EqualRanks(forward=2.0, input_grad=2.0, weight_grad=2.0),
        memory_limits=(5.0,) * 8,
    )
    assert answer(question).bound == 6 * 16 + 17
    few = dataclasses.replace(question, num_microbatches=4)
    assert answer(few).bound < 6 * 4 + 17  # does not hold for few micro-batches
    unequal = dataclasses.replace(question, costs=EqualRanks(forward=2.5))
    assert answer(unequal).bound == pytest.approx(answer(unequal).bound)
    assert answer(unequal).bound <= (answer(unequal).cost or 0)


# ---- the peer's table ------------------------------------------------------


def test_rows_become_cases(table: pathlib.Path) -> None:
    basic, zbv, interleaved = load_peer_cases(table)
    assert (basic.schedule, basic.cost, basic.costs) == ("1f1b", 9.0, EqualRanks())
    assert basic.memory_limits == pytest.approx((2.0, 2.0), rel=2e-6)
    assert (zbv.schedule, zbv.num_chunks, zbv.stated_limit) == ("zb-v", None, "3")
    assert (interleaved.schedule, interleaved.num_chunks) == ("interleaved", 2)
    assert [answer(one).verdict for one in (basic, zbv, interleaved)] == ["equal"] * 3


def test_limits_per_rank(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    keys = [",".join(row.split(",")[:8]) for row in ROWS]
    peaks = ((2, 1), (3, 2, 3), (2, 2))
    lines = [
        f"{key},{rank},{peak}"
        for key, row in zip(keys, peaks, strict=True)
        for rank, peak in enumerate(row)
    ]
    head = "scheduler,p,m,TF,TB,TW,Tc,mem_limit,rank,peak_mem"
    ranks = write(tmp_path / "ranks.csv", head, *lines)
    basic, zbv, _ = load_peer_cases(table, ranks)
    assert basic.memory_limits == pytest.approx((2, 1), rel=2e-6)
    assert zbv.memory_limits == pytest.approx((3, 2, 3), rel=2e-6)
    assert max(answer(zbv).case.memory_limits or ()) >= (answer(zbv).peak_memory or 9)
    write(ranks, head, *lines[:-1])
    with pytest.raises(ScheduleError, match=r"line 4: .* ranks \[0\] of 2"):
        load_peer_cases(table, ranks)


@pytest.mark.parametrize(
    ("name", "limit", "ours"),
    [
        ("zb", "8", Ours("zb")),
        ("zb_papermem", "16", Ours("zb", splits_memory=True)),
        ("zbv_greedy", "half", Ours("v-half")),
        ("zbv_greedy", "min", Ours("v-min")),
        ("v_auto", "8", Ours("zb-v")),
        ("v_auto", "5", Ours("v-half")),
        ("v_auto", "4", Ours("v-min")),
        ("group_interleaved_v4_gp/2", "none", Ours("zb-interleaved", 4)),
    ],
)
def test_which_of_ours_is_held_against_which(name: str, limit: str, ours: Ours) -> None:
    assert PEER_SCHEDULES[name](8, limit) == ours


def test_every_schedule_of_the_peer_has_one_of_ours() -> None:
    for name, choose in PEER_SCHEDULES.items():
        limit = {"zbv_greedy": "half", "v_auto": "8"}.get(name, "none")
        assert choose(8, limit).schedule in SCHEDULES


def test_the_papers_memory_split(tmp_path: pathlib.Path) -> None:
    """B frees 1 - r, W frees r = 32 h / (34 h + 5 a s), with s = 1024."""
    row = "zb_papermem,8,24,29.718,29.444,19.927,0.527,16,1903.61,15"
    (only,) = load_peer_cases(write(tmp_path / "t.csv", HEAD, row))
    assert only.costs.held_b_to_w == pytest.approx(32 * 4096 / (34 * 4096 + 5 * 32 * 1024))
    assert only.costs.held_b_to_w == pytest.approx(0.4324, abs=1e-4)
    with pytest.raises(ScheduleError, match=r"line 2: no model has TF 1;"):
        load_peer_cases(write(tmp_path / "t.csv", HEAD, row.replace("29.718", "1")))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEAD,), "has no rows"),
        (("scheduler,p,m", "zb,2,2"), "lacks the columns TF, TB, TW, Tc, mem_limit, makespan"),
        ((HEAD, "gpipe,2,2,1,1,1,0,none,9,2"), r"line 2: no schedule of ours .* 'gpipe'; known"),
        ((HEAD, "1f1b,2,2,1,1,1,0,none,nine,2"), r"line 2: makespan is 'nine'; it must be a"),
        ((HEAD, ROWS[0], "1f1b,2,2,1,1,1,0,none,nan,2"), r"line 3: makespan is 'nan'"),
        ((HEAD, "1f1b,two,2,1,1,1,0,none,9,2"), "line 2: "),
        ((HEAD, "1f1b,2,2,1,1,1"), "line 2: the row has fewer columns"),
    ],
)
def test_bad_tables_are_refused(
    lines: tuple[str, ...], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        load_peer_cases(write(tmp_path / "t.csv", *lines))
    assert "t.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.csv cannot be read: No such file"):
        load_peer_cases(tmp_path / "none.csv")


# ---- published figures -----------------------------------------------------


def test_published_figures_are_all_there() -> None:
    assert len(list(table_5())) == 12 * 4 and len(list(table_8())) == 9 * 3
    assert len(list(frontier())) == 63 + 2 * 7 + 7 + 5 + 5 - 7 + 7
    assert len(paper_cases()) == sum(len(list(f())) for f in (table_5, table_8, frontier, searched))


def test_a_printed_rate_may_be_rounded() -> None:
    """.1585 stands for anything below .15855; and the memory is the paper's."""
    first = next(iter(table_5()))
    work = 24 * (18.522 + 18.086 + 9.337)
    assert first.work == pytest.approx(work)
    assert first.bubble_rate == pytest.approx(0.1585)
    most = first.cost * (1 + first.tolerance)
    assert (most - work) / most == pytest.approx(0.15855)
    assert (
        first.costs.held_b_to_w
        == MODELS["1.5B"].share_kept_for_w
        == pytest.approx(0.3664, abs=1e-4)
    )
    assert first.memory_limits == (8.0,) * 8


def test_transfers_of_the_profile_with_two_chunks_are_not_doubled() -> None:
    first = next(iter(table_8())).costs
    assert (first.forward, first.transfer) == (2 * 14.407, 1.610)


def test_hand_made_schedules_reach_the_papers_tables() -> None:
    """Independent of any search; ZB-H2 by its formula, (p-1)(T_F + T_B + 2 T_c - 2 T_W)."""
    hand_made = [c for c in (*table_5(), *table_8()) if c.schedule in ("zb-h1", "zb-h2")]
    assert len(hand_made) == 42
    for one in hand_made[::5]:
        found = answer(one)
        assert found.verdict == "equal"
        if one.schedule == "zb-h2":
            times = one.costs
            each = times.forward + times.input_grad + 2 * times.transfer - 2 * times.weight_grad
            assert found.cost == pytest.approx(one.work + (one.num_ranks - 1) * each)


def test_profiles_are_for_the_sizes_of_the_tables() -> None:
    assert all(c.num_ranks in (4, 8, 16, 24, 32) for c in paper_cases())
    assert {model for model, _, _ in PROFILES} == set(MODELS)


# ---- speed -----------------------------------------------------------------


def test_speed_is_measured_for_every_schedule_and_size() -> None:
    assert len(speed_cases()) == len(SCHEDULES) * len(LIMITS_S) == len(set(speed_cases()))
    row = measure_speed("1f1b", 8, 64)
    assert row.total_s == row.plan_s + row.validate_s + row.lower_s > 0
    assert row.over_simulate == row.total_s / row.simulate_s
    late = dataclasses.replace(row, plan_s=0.6)
    assert not late.reached and "NOT reached (at most 0.5 s)" in planner_report.speed_line(late)


# ---- the command -----------------------------------------------------------


def test_table_summary_and_json(
    table: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert tool.main(["--peer", str(table), "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 rows" in shown and "1f1b" in shown and "equal" in shown
    (last,) = [line for line in shown.splitlines() if line.startswith("all")]
    assert last.split()[1:5] == ["3", "0", "3", "0"]  # rows, better, equal, worse
    rows = json.loads(figures.read_text())["peer"]
    assert [row["verdict"] for row in rows] == ["equal"] * 3
    assert rows[0]["longest_span"] == rows[0]["their_longest_span"] == 9


def test_a_worse_row_is_shown_and_fails(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better_than_possible = "zbv,3,5,1,1,1,0,3,14.9,3"
    table = write(tmp_path / "t.csv", HEAD, ROWS[0], better_than_possible)
    assert tool.main(["--peer", str(table), "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("WORSE") == 1 and "+0.671%" in shown
    assert tool.main(["--peer", str(table), "--only", "1f1b"]) == 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--only", "zbv"], ["zbv"]),
        (["--only", "zb-v,interleaved"], ["zbv", "interleaved_v2"]),
        (["--rows", "1:"], ["zbv", "interleaved_v2"]),
        (["--rows", "::2"], ["1f1b", "interleaved_v2"]),
        (["--rows", "0:1"], ["1f1b"]),
        (["--max-size", "16"], ["1f1b", "interleaved_v2"]),
        (["--max-size", "16", "--rows", "1:"], ["interleaved_v2"]),
    ],
)
def test_a_part_of_the_table(arguments: list[str], names: list[str], table: pathlib.Path) -> None:
    options = tool.parse_options(["--peer", str(table), *arguments])
    assert [case.name for case in tool.chosen(load_peer_cases(table), options)] == names


def test_processes_give_the_same_answers(table: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = []
    for jobs in ("1", "2"):
        figures = tmp_path / f"{jobs}.json"
        tool.main(["--peer", str(table), "--jobs", jobs, "--json", str(figures)])
        found.append([{**row, "plan_s": 0} for row in json.loads(figures.read_text())["peer"]])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do: give --peer FILE.csv, --paper or --speed"),
        (["--paper", "--only", "gpipe"], "'gpipe' is not a schedule; choose from 1f1b"),
        (["--paper", "--jobs", "0"], "'0' is not a number from 1"),
        (["--paper", "--max-size", "many"], "'many' is not a number from 1"),
        (["--paper", "--rows", "5"], "'5' is not a range of rows; write it as FIRST:STOP"),
        (["--paper", "--rows", "1:2:0"], "'1:2:0' is not a range of rows"),
        (["--paper", "--peer-ranks", "r.csv"], "--peer-ranks is given without the table"),
        (["--pap"], "unrecognized arguments: --pap"),
    ],
)
def test_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_files_that_cannot_be_used(
    table: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--peer", str(tmp_path / "none.csv")]) == 2
    assert "none.csv cannot be read" in capsys.readouterr().err
    assert tool.main(["--peer", str(table), "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().err


def test_nothing_left_to_do_is_refused(
    table: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A selection that leaves no rows must not look like success."""
    assert tool.main(["--peer", str(table), "--only", "zb-h1"]) == 2
    assert "no row is left" in capsys.readouterr().err


def test_runs_without_torch_and_numpy() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None  # importing them raises\n"
        "from tools.benchmark_planner import main\n"
        "sys.exit(main(['--paper', '--only', 'zb-h1', '--max-size', '600']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "table 5 ZB-H1 1.5B" in done.stdout
