"""Compare two or more training logs: speed, losses, gradient norms, and what looks wrong.

    python tools/compare_logs.py 1f1b.log zb-v.log
    python tools/compare_logs.py 1f1b.log zb-v.log --plot runs.png --require-equal-loss

The first log is what the others are compared with. Logs may be gzip, of any Megatron version, and
may hold any other text. Exit status: 0; 1 if --require-equal-loss is given and losses differ; 2 if
a log cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.training.log_comparison import (
    WARM_UP_RULE,
    Agreement,
    Comparison,
    Run,
    compare,
    elapsed_ms,
    iteration_range,
    loss_verdict,
    make_run,
    speed_verdict,
)
from megatron.training.log_reader import GRAD_NORM, LOSS, LogError, LogRecord, read_log
from megatron.training.log_warnings import all_warnings, stuck_loss


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse_options(argv)
    try:
        names = run_names(options.logs, options.names)
        runs = [
            make_run(read_log(path), name, skip=options.skip, seq_length=options.seq_length)
            for path, name in zip(options.logs, names, strict=True)
        ]
        comparisons = [compare(runs[0], run) for run in runs[1:]]
        warnings = all_warnings(comparisons, runs, options.vocab_size)
        if options.json:
            print(json.dumps(as_json(runs, comparisons, warnings), indent=2, allow_nan=False))
        else:
            print(as_text(runs, comparisons, warnings, rule_chosen=options.skip is None))
        if options.plot:
            plot(runs, options.plot, vocab_size=options.vocab_size)
    except LogError as error:
        print(f"compare_logs.py: {error}", file=sys.stderr)
        return 2
    if options.require_equal_loss and not all(pair.loss.equal for pair in comparisons):
        print("compare_logs.py: --require-equal-loss: the losses differ", file=sys.stderr)
        return 1
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="training logs; the first is the reference")
    add("--names", nargs="+", metavar="NAME", help="what to call the runs (default: file names)")
    add(
        "--skip",
        type=int,
        metavar="N",
        help=f"warm-up records to leave out of the steady state (default: {WARM_UP_RULE})",
    )
    add("--seq-length", type=int, metavar="S", help="for tokens/s (default: as the log says)")
    add("--vocab-size", type=int, metavar="V", help="to recognise a loss that stands at ln(V)")
    add("--plot", metavar="FILE.png", help="draw losses and iteration times (needs matplotlib)")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--require-equal-loss", action="store_true", help="exit with 1 if losses differ")
    options = parser.parse_args(argv)
    for name in ("seq_length", "vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} is below 1; use a positive number")
    if options.require_equal_loss and len(options.logs) < 2:
        parser.error("--require-equal-loss needs at least two logs to compare")
    return options


def run_names(paths: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """The user's names; else file names without endings, or whole paths if those repeat."""
    if names is not None:
        if len(names) != len(paths):
            raise LogError(
                f"--names has {len(names)} names for {len(paths)} logs; give one for each"
            )
        return list(names)
    stems = [Path(path).name.removesuffix(".gz").rsplit(".", 1)[0] for path in paths]
    return stems if len(set(stems)) == len(stems) else list(paths)


def as_text(
    runs: Sequence[Run],
    comparisons: Sequence[Comparison],
    warnings: Sequence[str],
    *,
    rule_chosen: bool,
) -> str:
    """The report: verdict, table of runs, table of agreement, notes, warnings."""
    blocks = ["\n".join(verdict(runs, comparisons)), table(run_rows(runs, comparisons))]
    if comparisons:
        blocks.append(table(agreement_rows(comparisons)))
    blocks.append("\n".join(notes(runs, rule_chosen=rule_chosen)))
    if warnings:
        blocks.append("\n".join(f"WARNING: {sentence}." for sentence in warnings))
    return "\n\n".join(blocks)


def verdict(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader wants to know first, in plain words."""
    if comparisons:
        return [
            sentence(pair) for pair in comparisons for sentence in (speed_verdict, loss_verdict)
        ]
    (run,) = runs
    speed = "an unknown time" if run.median_ms is None else f"{run.median_ms:.1f} ms"
    return [f"{run.name} takes {speed} an iteration (median of iterations {steady_range(run)})"]


def run_rows(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> list[list[str]]:
    speed_ups = [None, *(pair.speed_up for pair in comparisons)]
    heads = ["run", "records", "iterations", "ms/iteration", "speed-up"]
    rows = [[*heads, "samples/s", "tokens/s", "final loss", "final grad norm"]]
    for run, speed_up in zip(runs, speed_ups, strict=True):
        rows.append(
            [
                run.name,
                str(len(run.log.records)),
                run.iterations,
                number(run.median_ms, ".1f"),
                "1.000" if run is runs[0] else number(speed_up, ".3f"),
                number(run.samples_per_s, ".3f"),
                number(run.tokens_per_s, ".1f"),
                run.final(LOSS) or "-",
                run.final(GRAD_NORM) or "-",
            ]
        )
    return rows


def agreement_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    first = comparisons[0].base.name
    rows = [[f"against {first}", "of", "common", "agree", "first differing", "largest difference"]]
    for pair in comparisons:
        for label, values in (("loss", pair.loss), ("grad norm", pair.grad_norm)):
            rows.append([pair.run.name, label, str(values.common), *agreement_cells(values)])
    return rows


def agreement_cells(values: Agreement) -> list[str]:
    if values.common == 0:
        return ["-", "-", "-"]
    largest = number(values.largest, ".6g")
    if values.largest:
        largest += f" (iteration {values.largest_at})"
    if values.equal:
        return ["equal as printed", "-", largest]
    return ["differ", f"iteration {values.first_difference}", largest]


def notes(runs: Sequence[Run], *, rule_chosen: bool) -> list[str]:
    skipped = ", ".join(f"{run.num_skipped} of {len(run.log.records)} ({run.name})" for run in runs)
    reason = f"the rule is {WARM_UP_RULE}; --skip N sets it" if rule_chosen else "set by --skip"
    lines = [f"Warm-up records left out of the medians: {skipped}; {reason}."]
    unknown = [run.name for run in runs if run.seq_length is None]
    if unknown:
        lines.append(f"No tokens/s for {', '.join(unknown)}: give --seq-length.")
    return lines


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_json(
    runs: Sequence[Run], comparisons: Sequence[Comparison], warnings: Sequence[str]
) -> dict[str, Any]:
    """The report for machines; numbers that are not finite become strings."""
    return {
        "verdict": verdict(runs, comparisons),
        "runs": [
            {
                "name": run.name,
                "file": str(run.log.path),
                "records": len(run.log.records),
                "first_iteration": run.log.records[0].iteration,
                "last_iteration": run.log.records[-1].iteration,
                "warm_up_records": run.num_skipped,
                "median_ms": run.median_ms,
                "samples_per_s": run.samples_per_s,
                "tokens_per_s": run.tokens_per_s,
                "final_loss": json_number(run.log.records, LOSS),
                "final_grad_norm": json_number(run.log.records, GRAD_NORM),
            }
            for run in runs
        ],
        "comparisons": [
            {
                "name": pair.run.name,
                "against": pair.base.name,
                "speed_up": pair.speed_up,
                "loss": {"equal": pair.loss.equal, **asdict(pair.loss)},
                "grad_norm": {"equal": pair.grad_norm.equal, **asdict(pair.grad_norm)},
            }
            for pair in comparisons
        ],
        "warnings": list(warnings),
    }


def json_number(records: Sequence[LogRecord], field: str) -> float | str | None:
    """The last value of a field."""
    values = (value for record in reversed(records) if (value := record.number(field)) is not None)
    value = next(values, None)
    return value if value is None or math.isfinite(value) else str(value)


def plot(runs: Sequence[Run], path: str, *, vocab_size: int | None) -> None:
    """Draw losses and iteration times over iterations. Raises LogError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LogError(
            f"--plot {path} needs the package matplotlib, which is not there ({error}); "
            "`pip install matplotlib` mends it"
        ) from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss_axes, time_axes = figure.subplots(1, 2)
    draw_losses(loss_axes, runs, vocab_size)
    draw_times(time_axes, runs)
    for axes in (loss_axes, time_axes):
        axes.set_xlabel("iteration")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture format
        raise LogError(f"--plot {path} cannot be written: {error}") from error


def draw_losses(axes: Any, runs: Sequence[Run], vocab_size: int | None) -> None:
    for index, run in enumerate(runs):
        points = [(r.iteration, x) for r in run.log.records if (x := r.number(LOSS)) is not None]
        # Dashes over the first, unbroken line: where losses are equal, both are seen.
        dashes = "-" if index == 0 else (3 * index, (4, 4))
        style = {"color": f"C{index}", "linestyle": dashes, "marker": marker_for(points)}
        axes.plot(*columns(points), label=run.name, markersize=4, **style)
    levels = {s.vocab_size: s.level for run in runs if (s := stuck_loss(run, vocab_size))}
    for vocab, level in levels.items():
        label = f"ln({vocab}) = {level:.3f}"
        axes.axhline(level, color="black", linestyle=":", linewidth=1, label=label)
    axes.legend(frameon=False)
    axes.set_title("Loss")
    axes.set_ylabel("lm loss")


def draw_times(axes: Any, runs: Sequence[Run]) -> None:
    shown = [0.0]
    for index, run in enumerate(runs):
        points = [(r.iteration, t) for r in run.log.records if (t := elapsed_ms(r)) is not None]
        if not points or run.median_ms is None:
            continue
        steady = [point for point in points if point[0] >= run.steady[0].iteration]
        label = f"{run.name}: median {run.median_ms:.1f} ms"
        style = {"color": f"C{index}", "marker": marker_for(points), "markersize": 4}
        axes.plot(*columns(points), linewidth=1, alpha=0.4, **style)
        axes.plot(*columns(steady), label=label, **style)
        shown += [time for _, time in points if time < 3 * run.median_ms]
    # From zero, so that heights compare. A very slow first iteration leaves the picture.
    axes.set_ylim(0, max(shown) * 1.1 or 1)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("Iteration time (warm-up pale)")
    axes.set_ylabel("ms per iteration")


def marker_for(points: Sequence[Any]) -> str:
    """Points are marked while they are few, so that even a single one is seen."""
    return "o" if len(points) <= 20 else ""


def columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]


def steady_range(run: Run) -> str:
    return iteration_range(run.steady)


if __name__ == "__main__":
    sys.exit(main())
