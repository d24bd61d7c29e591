"""tools/benchmark_pipeline.py: arguments, what it makes of times, verdicts, exit status."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    SCHEDULES,
    plan_schedule,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate
from megatron.training.benchmarks import (
    compute,
    emulated,
    reports,
    split,
    step_reports,
    steps,
    tables,
    torch_peer,
)
from megatron.training.benchmarks.llama import LlamaSizes
from megatron.training.benchmarks.measure import Contestant, RankTime, Times, join, measure
from megatron.training.benchmarks.verdicts import Verdict, over_ideal_limit
from tools import benchmark_pipeline as tool

# ---- the command line ------------------------------------------------------


def test_defaults_are_the_cases_that_the_targets_are_stated_for() -> None:
    options = tool.parse_options(["emulated"])
    assert (options.ranks, options.microbatches_per_rank) == ([4, 8], [2, 3])
    assert options.pass_ms == [20.0, 60.0]
    assert options.schedules == list(SCHEDULES)
    options = tool.parse_options(["steps"])
    assert (options.ranks, options.microbatches_per_rank) == ([4, 8], [2, 3])
    assert (options.pass_ms, options.in_a_row) == ([20.0, 60.0], 5)
    assert options.schedules == ["zb-h2", "zb-v"]
    options = tool.parse_options(["compute"])
    assert (options.ranks, options.microbatches) == ([2], [4, 8])
    assert {"1f1b", "zb-h1", "zb-h2"} <= set(options.schedules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emulated", "--repeats", "0"], "--repeats 0 is below 1"),
        (["emulated", "--ranks", "2", "1"], "--ranks 1 is below 2"),
        (["emulated", "--pass-ms", "-3"], "--pass-ms -3 is below"),
        (["emulated", "--schedules", "2f2b"], "invalid choice: '2f2b'"),
        (["compute", "--peer", "jax"], "invalid choice: 'jax'"),
        (["split"], "invalid choice: 'split'"),
        ([], "BENCHMARK"),
    ],
)
def test_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compute", "--num-layers", "5"], "--num-layers 5 does not divide into the 2 stages"),
        (["emulated", "--json", "/no/such/folder/x.json"], "No such file or directory"),
        (["emulated", "--pass-ratio", "0", "1", "1"], "a forward takes time"),
    ],
)
def test_says_before_any_process_starts_what_cannot_be_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["emulated", "steps", "compute", "split-cost"])
def test_help_names_the_common_flags(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main([benchmark, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--json FILE", "--repeats N", "--check", "--timeout-s S", "--peer"):
        assert flag in text
    assert "default: None" not in text


def _outcome(value: float) -> tool.Outcome:
    row = reports.SplitRow(
        case="tiny", runtime="ours", split_ms=3.0, fused_ms=2.0, ratio=value, spread=0.01
    )
    return tool.Outcome({"results": [row]}, "the table", [Verdict("claim", value, 1.2)], ["noted"])


@pytest.mark.parametrize(
    ("value", "flags", "status"),
    [(1.1, ["--check"], 0), (1.3, ["--check"], 1), (1.3, [], 0)],
)
def test_exit_status_and_output(
    value: float,
    flags: list[str],
    status: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, "run_split_cost", lambda options: _outcome(value))
    path = tmp_path / "figures.json"
    assert tool.main(["split-cost", "--json", str(path), "--repeats", "3", *flags]) == status
    shown = capsys.readouterr().out
    assert "the table" in shown and "noted" in shown
    assert ("NOT reached  claim: 1.3 (at most 1.2)" in shown) == (value > 1.2)
    figures = json.loads(path.read_text())
    assert figures["benchmark"] == "split-cost"
    assert figures["settings"]["repeats"] == 3
    assert figures["machine"]["cpus"] >= 1
    assert figures["results"][0]["ratio"] == value
    assert figures["verdicts"] == [
        {
            "claim": "claim",
            "value": value,
            "limit": 1.2,
            "at_least": False,
            "reached": value <= 1.2,
        }
    ]


# ---- times -----------------------------------------------------------------


def test_contestants_run_in_turns_and_start_outside_the_timing() -> None:
    calls: list[str] = []
    contestants = [
        Contestant(name, lambda name=name: calls.append(name), lambda: calls.append("-"))
        for name in "ABC"
    ]
    times = measure(contestants, repeats=3, warm_up=1)
    assert "".join(calls) == "-C-B-A" + "-A-B-C" + "-C-B-A" + "-A-B-C"
    assert {name: len(taken) for name, taken in times.items()} == {"A": 3, "B": 3, "C": 3}
    assert all(t.start <= t.ends[0] for taken in times.values() for t in taken)


def test_in_a_row_the_first_step_only_starts_the_clock() -> None:
    calls: list[int] = []
    (taken,) = measure([Contestant("A", lambda: calls.append(1))], repeats=1, in_a_row=4)["A"]
    assert len(taken.ends) == 5 and len(calls) == 1 + 5


def test_a_step_lasts_from_the_common_start_to_the_last_end() -> None:
    ranks = [
        {"A": [RankTime(10.0, (12.0,), 0.5), RankTime(20.0, (21.0,), 0.1)]},
        {"A": [RankTime(10.0, (13.0,), 0.25), RankTime(20.0, (20.5,), 0.1)]},
    ]
    times = join(ranks)["A"]
    assert times.step_s == (3.0, 1.0)
    assert times.cpu_s == (0.75, 0.2)
    assert times.median_s == 2.0
    assert times.spread == 0.5  # quartiles 1.5 and 2.5


def test_ratios_are_taken_turn_by_turn() -> None:
    slow_second_turn = Times((2.0, 20.0, 2.2), (0.0, 0.0, 0.0))
    assert slow_second_turn.over(Times((1.0, 10.0, 2.0), (0.0, 0.0, 0.0))) == 2.0


def test_steps_in_a_row_count_from_the_end_of_the_first() -> None:
    ranks = [
        {"A": [RankTime(0.0, (5.0, 7.0, 9.0), 3.0)]},
        {"A": [RankTime(0.0, (6.0, 8.0, 11.0), 3.0)]},
    ]
    times = join(ranks)["A"]
    assert times.step_s == (2.5,)  # (11 - 6) / 2
    assert times.cpu_s == (2.0,)  # per step
    assert times.spread == 0.0


# ---- emulated: rows and verdicts -------------------------------------------


def _plan(name: str = "1f1b", num_ranks: int = 2, num_microbatches: int = 2) -> Plan:
    request = PlanRequest(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return plan_schedule(name, request)


def _emulated_case(pass_s: float) -> emulated.EmulatedCase:
    return emulated.EmulatedCase(
        plans=(_plan(),),
        peer_schedules=("1f1b",),
        rank_seconds=emulated.PassSeconds(pass_s, pass_s, pass_s),
        shape=(4, 1, 8),
        repeats=1,
    )


def _emulated_results(ours_s: float, torch_s: float | None) -> list[emulated.RankResult]:
    steps = {"1f1b": ours_s} | ({} if torch_s is None else {"torch 1f1b": torch_s})
    times = {name: [RankTime(1.0, (1.0 + step,), 0.004)] for name, step in steps.items()}
    peers = {} if torch_s is None else {"1f1b": _plan()}
    refusals = {"1f1b": "too few micro-batches"} if torch_s is None else {}
    return [emulated.RankResult(times, 5e-5, 0.01, peers, refusals)] * 2


# 1F1B, p = 2, m = 2, T = 20 ms: the last rank computes 2 x 60 ms; before that F, after that BW.
_IDEAL_S = 0.020 + 2 * 0.060 + 0.040


def test_emulated_figures() -> None:
    case = _emulated_case(0.020)
    ours, peer = reports.emulated_rows(case, _emulated_results(0.1872, 0.216), "makespan")
    assert (ours.runtime, peer.runtime) == ("ours", "torch")
    assert ours.ideal_ms == pytest.approx(1e3 * _IDEAL_S)
    assert ours.over_ideal == pytest.approx(0.1872 / _IDEAL_S)
    assert peer.over_ideal == pytest.approx(1.2)
    assert ours.over_bound == pytest.approx(0.1872 / 0.120)
    # A transfer of 10 ms delays the first F of rank 1 and the last BW of rank 0.
    assert ours.over_ideal_with_transfer == pytest.approx(0.1872 / (_IDEAL_S + 0.020))
    limit, share = reports.emulated_verdicts([ours, peer])
    assert (limit.value, limit.limit, limit.reached) == (pytest.approx(1.04), 1.05, True)
    assert (share.value, share.limit, share.reached) == (pytest.approx(0.2), 0.5, True)


@pytest.mark.parametrize(
    ("ours_s", "torch_s", "reached"),
    [
        (1.049 * _IDEAL_S, 1.10 * _IDEAL_S, [True, True]),
        (1.051 * _IDEAL_S, 1.20 * _IDEAL_S, [False, True]),
        (1.040 * _IDEAL_S, 1.07 * _IDEAL_S, [True, False]),
        (1.040 * _IDEAL_S, 0.99 * _IDEAL_S, [True]),  # torch below the ideal has no overhead
        (1.040 * _IDEAL_S, None, [True]),
    ],
)
def test_emulated_verdicts(ours_s: float, torch_s: float | None, reached: list[bool]) -> None:
    results = _emulated_results(ours_s, torch_s)
    rows = reports.emulated_rows(_emulated_case(0.020), results, "makespan")
    assert [verdict.reached for verdict in reports.emulated_verdicts(rows)] == reached


def test_limits_by_pass_length() -> None:
    assert [over_ideal_limit(t) for t in (5, 20, 59, 60, 200)] == [None, 1.05, 1.05, 1.03, 1.03]
    rows = reports.emulated_rows(_emulated_case(0.005), _emulated_results(9.0, 9.0), "makespan")
    assert reports.emulated_verdicts(rows) == []


def test_refusals_and_conditions_are_remarked() -> None:
    remarks = reports.emulated_remarks(_emulated_case(0.02), _emulated_results(0.2, None))
    assert remarks == [
        "p=2 m=2 T=20 ms: sleeps end 50 us late, a message of 0 KiB takes 10000 us",
        "p=2 m=2 T=20 ms: torch refuses 1f1b: too few micro-batches",
    ]


def test_host_figures_are_per_instruction() -> None:
    case = _emulated_case(0.020).without_passes()
    assert case.work_s == case.expected_s == 0
    ours, _ = reports.host_rows(case, _emulated_results(0.001, 0.004))
    assert ours.wall_us == pytest.approx(1000 / 4)  # F F BW BW: four on the longest rank
    assert ours.cpu_us == pytest.approx(8000 / 8)  # two ranks' processor time over eight
    (verdict,) = reports.host_verdicts([replace(ours, wall_us=251.0)])
    assert not verdict.reached and verdict.limit == 250


def test_expected_time_counts_torch_and_the_warm_up() -> None:
    case = _emulated_case(0.020)
    assert case.expected_s == pytest.approx(2 * 2 * _IDEAL_S)
    alone = replace(case, peer_schedules=(), repeats=3, in_a_row=4)
    assert alone.expected_s == pytest.approx((3 * 5 + 1) * _IDEAL_S)


def test_tables_align_and_say_what_they_show() -> None:
    rows = reports.emulated_rows(_emulated_case(0.02), _emulated_results(0.189, 0.216), "makespan")
    head, ours, peer = tables.emulated_table(rows).splitlines()
    assert head.split() == [
        *("case", "schedule", "runtime", "step", "ms", "noise", "ideal", "ms", "step/ideal"),
        *("with", "transfer", "step/bound"),
    ]
    figures = "1f1b ours 189.0 0.0% 180.0 1.0500 0.9450 1.5750"
    assert ours.split()[-8:] == figures.split()
    assert peer.split()[-7:-5] == ["torch", "216.0"]
    assert len({len(line) for line in (head, ours, peer)}) == 1
    host = tables.host_table(reports.host_rows(_emulated_case(0.02), _emulated_results(1, 1)))
    assert "us/instruction" in host.splitlines()[0]
    text = tables.verdict_lines([Verdict("a", 1, 2), Verdict("b", 1, 2, at_least=True)])
    assert text.splitlines() == [
        "1 of 2 targets reached",
        "reached      a: 1 (at most 2)",
        "NOT reached  b: 1 (at least 2)",
    ]


# ---- steps: rows and verdicts ----------------------------------------------


def _step_rows(
    period_s: dict[str, float], counts: tuple[steps.StepCounts, ...]
) -> list[step_reports.StepsRow]:
    """Two periods of 1F1B with p = 2, m = 2 per contestant; `counts` are the ranks' early steps."""
    times = {
        name: [RankTime(0.0, (1.0, 1.0 + period, 1.0 + 2 * period), 0.1)]
        for name, period in period_s.items()
    }
    measured = emulated.RankResult(times, 5e-5, 0.001, {"1f1b": _plan()}, {})
    met = steps.StepCounts(4, 0, 0)
    results = [
        steps.StepsResult(measured, {"1f1b, early": rank, "1f1b, meeting": met}) for rank in counts
    ]
    return step_reports.rows(replace(_emulated_case(0.020), in_a_row=2), results)


# 1F1B, p = 2, m = 2, T = 20 ms: rank 0 is the longest from its first to its last pass.
_PERIODS = {
    "1f1b, early": 1.04 * _IDEAL_S,
    "1f1b, meeting": 1.2 * _IDEAL_S,
    "1f1b, none": 1.02 * _IDEAL_S,
    "torch 1f1b": 1.3 * _IDEAL_S,
}


def test_step_figures() -> None:
    good = (steps.StepCounts(4, 4, 0), steps.StepCounts(4, 4, 0))
    early, meeting, none, peer = rows = _step_rows(_PERIODS, good)
    assert [(row.runtime, row.step) for row in rows] == [
        ("ours", "early"),
        ("ours", "meeting"),
        ("ours", "none"),
        ("torch", "none"),
    ]
    assert early.span_ms == early.makespan_ms == pytest.approx(1e3 * _IDEAL_S)
    assert [row.over_span for row in rows] == pytest.approx([1.04, 1.2, 1.02, 1.3])
    assert early.over_bound == pytest.approx(1.04 * _IDEAL_S / 0.120)
    assert early.over_no_step == pytest.approx(1.04 / 1.02)
    assert none.over_no_step is None and peer.over_no_step is None
    assert (early.steps, early.early_steps, early.rollbacks) == (4, 4, 0)
    assert (meeting.steps, meeting.early_steps) == (4, 0)
    assert none.steps is None
    head, first, *_ = tables.steps_table(rows).splitlines()
    assert "longest span ms" in head
    figures = "187.2 0.0% 180.0 180.0 1.0400 1.5600 1.0196"
    assert first.split()[-7:] == figures.split()


@pytest.mark.parametrize(
    ("period_s", "counts", "reached"),
    [
        (1.049 * _IDEAL_S, (steps.StepCounts(4, 4, 0),) * 2, [True, True, True]),
        (1.051 * _IDEAL_S, (steps.StepCounts(4, 4, 0),) * 2, [False, True, True]),
        # One rank of two was late once; another time the step was wrong.
        (_IDEAL_S, (steps.StepCounts(4, 4, 0), steps.StepCounts(4, 3, 0)), [True, False, True]),
        (_IDEAL_S, (steps.StepCounts(4, 4, 0), steps.StepCounts(4, 4, 1)), [True, True, False]),
    ],
)
def test_step_verdicts(
    period_s: float, counts: tuple[steps.StepCounts, ...], reached: list[bool]
) -> None:
    rows = _step_rows({**_PERIODS, "1f1b, early": period_s}, counts)
    assert [verdict.reached for verdict in step_reports.verdicts(rows)] == reached


# ---- compute: rows and verdicts --------------------------------------------

_SIZES = LlamaSizes(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=2,
    vocab_size=32,
    seq_length=10,
    micro_batch_size=1,
)


def _compute_rows(step_s: dict[str, float], loss: float = 2.0) -> list[reports.ComputeRow]:
    """1F1B and ZB-H1, p = 2, m = 2, passes of 1 s; a fused backward saves half a second."""
    passes = compute.StageSeconds(1.0, 1.0, 1.0, 1.5)
    losses = dict.fromkeys(step_s, 2.0) | {"torch 1f1b": loss}
    results = [
        compute.RankResult(
            {name: [RankTime(0.0, (step,), 0.0)] for name, step in step_s.items()},
            compute.Calibration({"plain": {rank: passes}}, 0.0),
            losses if rank == 1 else {},
            {},
        )
        for rank in range(2)
    ]
    case = compute.ComputeCase(
        plans=(_plan(), _plan("zb-h1")), peer_schedules=("1f1b",), sizes=_SIZES, repeats=1
    )
    return reports.compute_rows(case, results, {"1f1b": False, "zb-h1": True})


def test_compute_predicts_from_measured_passes() -> None:
    base, peer, split_ = _compute_rows({"1f1b": 8.0, "torch 1f1b": 9.0, "zb-h1": 7.0})
    # F, then m (F + BW) on the last rank, then BW, with the fused pass of 1.5 s.
    assert base.predicted_ms == pytest.approx(1e3 * (1 + 2 * 2.5 + 1.5))
    # ZB-H1: bubble (p - 1)(T_F + T_B - T_W) = 1 s over m (T_F + T_B + T_W).
    assert split_.predicted_ms == pytest.approx(1e3 * (2 * 3 + 1))
    assert split_.predicted_gain == pytest.approx(7.5 / 7 - 1)
    assert split_.gain == pytest.approx(8 / 7 - 1)
    assert (base.tokens_per_s, peer.tokens_per_s) == (20 / 8, 20 / 9)
    assert peer.predicted_ms is None
    assert "+14.3%" in tables.compute_table([base, peer, split_])


def test_compute_verdicts() -> None:
    steps = {"1f1b": 7.5, "torch 1f1b": 7.4, "zb-h1": 7.5 / (1 + 0.9 * (7.5 / 7 - 1))}
    faster, realised, same = reports.compute_verdicts(_compute_rows(steps))
    assert faster.value == pytest.approx(7.4 / 7.5) and not faster.reached
    assert realised.value == pytest.approx(0.9) and realised.reached
    assert same.value == 0 and same.reached
    steps["zb-h1"] = 7.5 / (1 + 0.7 * (7.5 / 7 - 1))
    _, realised, same = reports.compute_verdicts(_compute_rows(steps, loss=2.1))
    assert not realised.reached
    assert not same.reached  # another loss: not the same model


# ---- split cost ------------------------------------------------------------


def test_split_rows_and_verdicts() -> None:
    (case, tiny, _) = tool.split_cases(_SIZES, _SIZES, repeats=1, with_peer=True)
    assert (case.name, tiny.name) == ("compute", "tiny")
    step_s = {split.SPLIT: 6.18, split.FUSED: 6.0, split.PEER_SPLIT: 9.0, split.PEER_FUSED: 6.0}
    times = {name: Times((step,), (step,)) for name, step in step_s.items()}
    ours, peer = reports.split_rows(case, times)
    assert (ours.split_ms, ours.ratio) == (pytest.approx(6180), pytest.approx(1.03))
    assert (peer.runtime, peer.ratio) == ("torch", 1.5)
    assert [v.reached for v in reports.split_verdicts([ours, peer])] == [False]
    host_bound, _ = reports.split_rows(tiny, times)
    assert host_bound.split_ms == pytest.approx(6180 / tiny.passes_per_repeat)
    assert [v.reached for v in reports.split_verdicts([host_bound])] == [True]


# ---- torch's schedules -----------------------------------------------------


def test_torchs_order_becomes_a_plan() -> None:
    def action(op: str, stage: int, microbatch: int) -> Any:
        kind = SimpleNamespace(name=op)
        return SimpleNamespace(
            computation_type=kind,
            stage_index=stage,
            microbatch_index=microbatch,
            sub_actions=None,
        )

    both = SimpleNamespace(
        sub_actions=(action("BACKWARD_INPUT", 1, 0), action("BACKWARD_WEIGHT", 1, 0))
    )
    orders = {
        0: [action("FORWARD", 0, 0), None, action("FULL_BACKWARD", 0, 0)],
        1: [None, action("FORWARD", 1, 0), both],
    }
    ours = replace(_plan(num_microbatches=1), schedule="zb-v")
    plan = torch_peer.executed_plan(SimpleNamespace(pipeline_order=orders), ours)
    validate(plan)
    assert [" ".join(map(str, program)) for program in plan.programs] == ["0F0 0BW0", "1F0 1B0 1W0"]
    assert torch_peer.executed_plan(SimpleNamespace(pipeline_order=None), ours) is ours


def test_every_peer_exists_in_torch() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in torch_peer.PEER_SCHEDULES.values():
        assert schedules.get_schedule_class(name)
