"""Measure the pipeline runtime: against its own simulator, and against torch's pipelining.

    python tools/benchmark_pipeline.py emulated --peer torch --json emulated.json
    python tools/benchmark_pipeline.py emulated --ranks 4 --pass-ms 20 --schedules 1f1b zb-v
    python tools/benchmark_pipeline.py steps --peer torch
    python tools/benchmark_pipeline.py compute --peer torch
    python tools/benchmark_pipeline.py split-cost --peer torch

Needs no GPU and no launcher: it starts its own processes, joined by gloo, and ends them. Figures
are medians over --repeats; all contestants of a case run in turns (A B C, C B A, ...), so compare
them as ratios. The column "noise" is the distance of the quartiles over the median: believe no
difference that is much smaller. Targets are meant for a machine that does nothing else.

Targets are printed as reached or NOT reached. Exit status: 0; with --check 1 if a target was not
reached; 2 if something cannot be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import schedule_named
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Objective
from megatron.training.benchmarks import (
    command_line,
    compute,
    emulated,
    reports,
    split,
    step_reports,
    steps,
    tables,
)
from megatron.training.benchmarks.cases import check_layers, make_plans, split_cases
from megatron.training.benchmarks.llama import LlamaSizes
from megatron.training.benchmarks.machine import describe_machine, machine_line
from megatron.training.benchmarks.measure import join
from megatron.training.benchmarks.torch_peer import PEER_SCHEDULES
from megatron.training.benchmarks.verdicts import Verdict
from megatron.training.worker_pool import RankFailure, WorkerPool

START_S = 60.0  # what a case may take beyond its steps: starting processes, building models
SLOWEST = 20.0  # how much longer than expected steps may take before a case is given up


class Outcome(NamedTuple):
    """What a benchmark found: rows for the JSON, text for the reader, targets."""

    rows: dict[str, list[Any]]
    text: str
    verdicts: list[Verdict]
    remarks: list[str]  # conditions of the measurement, and what could not be measured


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse_options(argv)
    run: Callable[[argparse.Namespace], Outcome] = options.run
    machine = describe_machine()
    try:
        if options.json:
            open(options.json, "a").close()  # rather fail now than after the measurements
        outcome = run(options)
    except (OSError, ValueError, RankFailure) as error:  # TimeoutError is an OSError
        print(f"benchmark_pipeline.py: {error}", file=sys.stderr)
        return 2
    print("\n\n".join([outcome.text, tables.verdict_lines(outcome.verdicts)]))
    print("\n".join([*outcome.remarks, machine_line(machine)]))
    if options.json:
        figures = as_json(options, machine, outcome)
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if options.check and not all(v.reached for v in outcome.verdicts) else 0


# ---- what the command line says --------------------------------------------


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command_line.add_emulated(commands, run_emulated)
    command_line.add_steps(commands, run_steps)
    command_line.add_compute(commands, run_compute)
    command_line.add_split_cost(commands, run_split_cost)
    options = parser.parse_args(argv)
    command_line.check_numbers(parser, options)
    return options


# ---- emulated devices ------------------------------------------------------


def run_emulated(options: argparse.Namespace) -> Outcome:
    objective: Objective = "span" if options.back_to_back > 1 else "makespan"
    remarks: list[str] = []

    def case_of(num_ranks: int, num_microbatches: int, pass_ms: float) -> emulated.EmulatedCase:
        sizes = num_ranks, num_microbatches, pass_ms
        in_a_row = options.back_to_back
        return emulated_case(options, *sizes, objective, in_a_row=in_a_row, remarks=remarks)

    cases = [case_of(*size) for size in sizes_of_cases(options)]
    rows: list[reports.EmulatedRow] = []
    host: list[reports.HostRow] = []
    with contextlib.closing(WorkerPool(max([*options.ranks, options.host_ranks]))) as pool:
        for case in cases:
            results = measure_emulated(pool, case, options)
            rows += reports.emulated_rows(case, results, objective)
            remarks += reports.emulated_remarks(case, results)
        if options.host_ranks > 1:
            case = case_of(options.host_ranks, 8 * options.host_ranks, 1.0).without_passes()
            host = reports.host_rows(case, measure_emulated(pool, case, options))
    text = [tables.emulated_table(rows)] + ([tables.host_table(host)] if host else [])
    return Outcome(
        {"results": rows, "host": host},
        "\n\n".join(text),
        reports.emulated_verdicts(rows) + reports.host_verdicts(host),
        list(dict.fromkeys(remarks)),
    )


def run_steps(options: argparse.Namespace) -> Outcome:
    remarks: list[str] = []
    cases = [
        emulated_case(options, *size, "span", in_a_row=options.in_a_row, remarks=remarks)
        for size in sizes_of_cases(options)
    ]
    rows: list[step_reports.StepsRow] = []
    with contextlib.closing(WorkerPool(max(options.ranks))) as pool:
        for case in cases:
            expected = len(steps.KINDS) * case.expected_s
            progress(f"{case.where}: at most about {expected:.0f} s")
            limit = options.timeout_s or START_S + SLOWEST * expected
            results = pool.run(case.num_ranks, steps.run_case, case, timeout_s=limit)
            rows += step_reports.rows(case, results)
            remarks += reports.emulated_remarks(case, [result.measured for result in results])
    return Outcome(
        {"results": rows},
        tables.steps_table(rows),
        step_reports.verdicts(rows),
        list(dict.fromkeys(remarks)),
    )


def sizes_of_cases(options: argparse.Namespace) -> list[tuple[int, int, float]]:
    """(ranks, micro-batches, milliseconds of F) of every case."""
    return [
        (p, k * p, pass_ms)
        for p in options.ranks
        for k in options.microbatches_per_rank
        for pass_ms in options.pass_ms
    ]


def emulated_case(
    options: argparse.Namespace,
    num_ranks: int,
    num_microbatches: int,
    pass_ms: float,
    objective: Objective,
    *,
    in_a_row: int,
    remarks: list[str],
) -> emulated.EmulatedCase:
    seconds = emulated.PassSeconds(*(pass_ms / 1e3 * ratio for ratio in options.pass_ratio))
    return emulated.EmulatedCase(
        plans=make_plans(
            options.schedules,
            num_ranks,
            num_microbatches,
            lambda _, placement: emulated.costs_of(seconds, placement),
            objective=objective,
            remarks=remarks,
        ),
        peer_schedules=tuple(PEER_SCHEDULES) if options.peer == "torch" else (),
        rank_seconds=seconds,
        shape=(options.seq_length, options.micro_batch_size, options.hidden_size),
        repeats=options.repeats,
        in_a_row=in_a_row,
    )


def measure_emulated(
    pool: WorkerPool, case: emulated.EmulatedCase, options: argparse.Namespace
) -> list[emulated.RankResult]:
    expected = case.expected_s
    progress(f"{case.where}: about {expected:.0f} s")
    limit = options.timeout_s or START_S + SLOWEST * expected
    return pool.run(case.num_ranks, emulated.run_case, case, timeout_s=limit)


# ---- real compute ----------------------------------------------------------


def run_compute(options: argparse.Namespace) -> Outcome:
    schedules = list(dict.fromkeys([reports.BASELINE, *options.schedules]))
    sizes = llama_sizes(options)
    check_layers(sizes, options.ranks, schedules)
    rows: list[reports.ComputeRow] = []
    remarks: list[str] = []
    with contextlib.closing(WorkerPool(max(options.ranks))) as pool:
        for p in options.ranks:
            calibration = calibrate(pool, p, schedules, sizes, options)
            for m in options.microbatches:
                case = compute_case(options, schedules, sizes, p, m, calibration, remarks)
                progress(f"{case.where}: {len(case.plans)} schedules")
                limit = options.timeout_s or 10 * START_S
                results = pool.run(p, compute.run_case, case, timeout_s=limit)
                splits = {name: schedule_named(name).splits_backward for name in schedules}
                rows += reports.compute_rows(case, results, splits)
                remarks += reports.refusal_remarks(case.where, results[0].refusals)
    verdicts = reports.compute_verdicts(rows)
    return Outcome({"results": rows}, tables.compute_table(rows), verdicts, remarks)


def calibrate(
    pool: WorkerPool,
    num_ranks: int,
    schedules: Sequence[str],
    sizes: LlamaSizes,
    options: argparse.Namespace,
) -> compute.Calibration:
    """Costs for the planners, from a few passes of every stage."""
    placements = list({schedule_named(name).placement_for(num_ranks) for name in schedules})
    limit = options.timeout_s or 5 * START_S
    arguments = (sizes, placements, options.repeats)
    return compute.merged(pool.run(num_ranks, compute.calibrate, *arguments, timeout_s=limit))


def compute_case(
    options: argparse.Namespace,
    schedules: Sequence[str],
    sizes: LlamaSizes,
    num_ranks: int,
    num_microbatches: int,
    calibration: compute.Calibration,
    remarks: list[str],
) -> compute.ComputeCase:
    def costs_for(name: str, placement: Placement) -> Costs:
        splits = schedule_named(name).splits_backward
        return compute.costs_of(calibration, placement, splits_backward=splits)

    return compute.ComputeCase(
        plans=make_plans(
            schedules,
            num_ranks,
            num_microbatches,
            costs_for,
            objective="makespan",
            remarks=remarks,
        ),
        peer_schedules=tuple(PEER_SCHEDULES) if options.peer == "torch" else (),
        sizes=sizes,
        repeats=options.repeats,
    )


def llama_sizes(options: argparse.Namespace) -> LlamaSizes:
    return LlamaSizes(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_attention_heads,
        vocab_size=options.vocab_size,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
    )


# ---- the cost of a split ---------------------------------------------------


def run_split_cost(options: argparse.Namespace) -> Outcome:
    one_layer = {"num_layers": 1, "vocab_size": 1}
    large = LlamaSizes(
        **one_layer,
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.ffn_hidden_size,
        num_attention_heads=options.num_attention_heads,
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
    )
    tiny = LlamaSizes(
        **one_layer,
        hidden_size=options.tiny_hidden_size,
        ffn_hidden_size=2 * options.tiny_hidden_size,
        num_attention_heads=1,
        seq_length=options.tiny_seq_length,
        micro_batch_size=1,
    )
    rows: list[reports.SplitRow] = []
    with_peer = options.peer == "torch"
    with contextlib.closing(WorkerPool(1)) as pool:
        for case in split_cases(large, tiny, repeats=options.repeats, with_peer=with_peer):
            progress(f"one layer: {case.name}")
            limit = options.timeout_s or 10 * START_S
            (times,) = pool.run(1, split.run_case, case, timeout_s=limit)
            rows += reports.split_rows(case, join([times]))
    return Outcome({"results": rows}, tables.split_table(rows), reports.split_verdicts(rows), [])


# ---- shared ----------------------------------------------------------------


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_json(
    options: argparse.Namespace, machine: dict[str, Any], outcome: Outcome
) -> dict[str, Any]:
    settings = {k: v for k, v in vars(options).items() if k not in ("run", "json", "benchmark")}
    return {
        "benchmark": options.benchmark,
        "settings": settings,
        "machine": machine,
        **{name: [asdict(row) for row in rows] for name, rows in outcome.rows.items()},
        "verdicts": [verdict.as_json() for verdict in outcome.verdicts],
        "remarks": outcome.remarks,
    }


if __name__ == "__main__":
    sys.exit(main())
