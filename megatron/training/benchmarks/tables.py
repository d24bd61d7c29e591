"""The benchmarks' figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training.benchmarks.reports import ComputeRow, EmulatedRow, HostRow, SplitRow
from megatron.training.benchmarks.step_reports import StepsRow
from megatron.training.benchmarks.verdicts import Verdict

_STEP_KINDS = {
    "early": "early (post-validation)",
    "meeting": "ranks meet",
    "none": "none",
}


def emulated_table(rows: Sequence[EmulatedRow]) -> str:
    heads = ["case", "schedule", "runtime", "step ms", "noise", "ideal ms", "step/ideal"]
    lines = [[*heads, "with transfer", "step/bound"]]
    for row in rows:
        lines.append(
            [
                row.where,
                row.schedule,
                row.runtime,
                f"{row.step_ms:.1f}",
                f"{row.spread:.1%}",
                f"{row.ideal_ms:.1f}",
                f"{row.over_ideal:.4f}",
                f"{row.over_ideal_with_transfer:.4f}",
                f"{row.over_bound:.4f}",
            ]
        )
    return table(lines)


def steps_table(rows: Sequence[StepsRow]) -> str:
    heads = ["case", "schedule", "runtime", "step", "period ms", "noise", "longest span ms"]
    lines = [[*heads, "makespan ms", "period/span", "period/bound", "over no step"]]
    for row in rows:
        lines.append(
            [
                row.where,
                row.schedule,
                row.runtime,
                _STEP_KINDS[row.step],
                f"{row.period_ms:.1f}",
                f"{row.spread:.1%}",
                f"{row.span_ms:.1f}",
                f"{row.makespan_ms:.1f}",
                f"{row.over_span:.4f}",
                f"{row.over_bound:.4f}",
                "-" if row.over_no_step is None else f"{row.over_no_step:.4f}",
            ]
        )
    return table(lines)


def host_table(rows: Sequence[HostRow]) -> str:
    lines = [["passes of length zero", "runtime", "us/instruction", "noise", "cpu us/instruction"]]
    for row in rows:
        where = f"p={row.num_ranks} m={row.num_microbatches} {row.schedule}"
        figures = [f"{row.wall_us:.0f}", f"{row.spread:.1%}", f"{row.cpu_us:.0f}"]
        lines.append([where, row.runtime, *figures])
    return table(lines)


def compute_table(rows: Sequence[ComputeRow]) -> str:
    heads = ["case", "schedule", "runtime", "step ms", "noise", "tokens/s", "gain"]
    lines = [[*heads, "predicted ms", "predicted gain", "loss"]]
    for row in rows:
        lines.append(
            [
                row.where,
                row.schedule,
                row.runtime,
                f"{row.step_ms:.1f}",
                f"{row.spread:.1%}",
                f"{row.tokens_per_s:.0f}",
                f"{row.gain:+.1%}",
                "-" if row.predicted_ms is None else f"{row.predicted_ms:.1f}",
                "-" if row.predicted_gain is None else f"{row.predicted_gain:+.1%}",
                f"{row.loss:.5f}",
            ]
        )
    return table(lines)


def split_table(rows: Sequence[SplitRow]) -> str:
    lines = [["one layer", "runtime", "F+B+W ms", "F+BW ms", "split/fused", "noise"]]
    for row in rows:
        times = [f"{row.split_ms:.3f}", f"{row.fused_ms:.3f}"]
        lines.append([row.case, row.runtime, *times, f"{row.ratio:.4f}", f"{row.spread:.1%}"])
    return table(lines)


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    reached = sum(verdict.reached for verdict in verdicts)
    head = f"{reached} of {len(verdicts)} targets reached"
    return "\n".join([head, *map(str, verdicts)])


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_name = [not any(char.isdigit() for char in cell[:1]) for cell in lines[-1]]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_name, strict=True)
        ).rstrip()
        for line in lines
    )
