"""Compare training logs: steady-state speed, and whether losses and gradient norms agree.

Pure functions from `TrainingLog`s to records; `tools/compare_logs.py` prints them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .log_reader import (
    ELAPSED_MS,
    GLOBAL_BATCH_SIZE,
    GRAD_NORM,
    LOSS,
    LogError,
    LogRecord,
    TrainingLog,
)

WARM_UP_RULE = "a tenth of the records, at least 1 and at most 10, but never all of them"


@dataclass(frozen=True)
class Run:
    """One log and its steady state."""

    name: str
    log: TrainingLog
    num_skipped: int  # warm-up records at the start that the steady state leaves out
    seq_length: int | None

    @property
    def iterations(self) -> str:
        return iteration_range(self.log.records)

    @property
    def steady(self) -> tuple[LogRecord, ...]:
        return self.log.records[self.num_skipped :]

    @cached_property
    def median_ms(self) -> float | None:
        """Median time of the steady iterations; None if the log has no times."""
        times = [time for record in self.steady if (time := elapsed_ms(record)) is not None]
        return statistics.median(times) if times else None

    @cached_property
    def samples_per_s(self) -> float | None:
        """Global batch / median time; None while the global batch size changes."""
        batches = {record.number(GLOBAL_BATCH_SIZE) for record in self.steady}
        batch = batches.pop() if len(batches) == 1 else None
        if batch is None or self.median_ms is None:
            return None
        return batch / self.median_ms * 1000

    @property
    def tokens_per_s(self) -> float | None:
        if self.samples_per_s is None or self.seq_length is None:
            return None
        return self.samples_per_s * self.seq_length

    def final(self, field: str) -> str | None:
        """The last value of a field, as printed."""
        return next(
            (r.fields[field] for r in reversed(self.log.records) if field in r.fields), None
        )


@dataclass(frozen=True)
class Agreement:
    """How two logs agree in one field over the iterations that both have."""

    common: int  # iterations in both logs where at least one has the field
    first_difference: int | None  # iteration; a value that only one log has is a difference
    largest: float | None  # largest finite absolute difference; None if there is none
    largest_at: int | None

    @property
    def equal(self) -> bool:
        """Every printed value is the same; no value at all is no agreement."""
        return self.common > 0 and self.first_difference is None


@dataclass(frozen=True)
class Comparison:
    """One run against the first."""

    base: Run
    run: Run
    loss: Agreement
    grad_norm: Agreement

    @property
    def speed_up(self) -> float | None:
        """Time of the first run / time of this one: above 1 means that this one is faster."""
        if self.base.median_ms is None or self.run.median_ms is None:
            return None
        return self.base.median_ms / self.run.median_ms


def make_run(
    log: TrainingLog, name: str, *, skip: int | None = None, seq_length: int | None = None
) -> Run:
    """`skip` warm-up records are left out of the steady state; None applies WARM_UP_RULE.

    The sequence length is looked for in the log unless given. Raises LogError if `skip` leaves
    nothing.
    """
    count = len(log.records)
    if skip is None:
        skip = min(max(1, count // 10), 10, count - 1)
    if not 0 <= skip < count:
        raise LogError(
            f"--skip {skip} leaves none of the {count} records of {log.path}; use 0 to {count - 1}"
        )
    return Run(name, log, skip, seq_length or log.argument("seq_length"))


def compare(base: Run, run: Run) -> Comparison:
    """`run` against `base`."""
    return Comparison(base, run, agreement(base, run, LOSS), agreement(base, run, GRAD_NORM))


def agreement(base: Run, run: Run, field: str) -> Agreement:
    """Compare the printed values of a field at each common iteration; NaN equals NaN."""
    common, first_difference = 0, None
    largest: tuple[float, int] | None = None
    for ours, theirs in common_records(base, run):
        one, other = ours.number(field), theirs.number(field)
        if one is None and other is None:
            continue
        common += 1
        if one is None or other is None or not _same(one, other):
            first_difference = first_difference or ours.iteration
        if one is not None and other is not None and math.isfinite(one - other):
            difference = abs(one - other)
            # Subtraction rounds; of equal differences the first is meant.
            if largest is None or difference > largest[0] * (1 + 1e-9):
                largest = difference, ours.iteration
    return Agreement(common, first_difference, *(largest or (None, None)))


def common_records(base: Run, run: Run) -> list[tuple[LogRecord, LogRecord]]:
    """The records of both runs at each iteration that both logged, in order."""
    others = {record.iteration: record for record in run.log.records}
    return [
        (record, others[record.iteration])
        for record in base.log.records
        if record.iteration in others
    ]


def speed_verdict(comparison: Comparison) -> str:
    """One sentence: who is faster, by how much, measured on what."""
    base, run = comparison.base, comparison.run
    speed_up = comparison.speed_up
    if speed_up is None:
        silent = base if base.median_ms is None else run
        return f"The speed of {run.name} and {base.name} cannot be compared: " + (
            f"{silent.name} logs no `{ELAPSED_MS}`"
        )
    # Nearer than the three decimals that are printed is called equal.
    if abs(speed_up - 1) < 0.0005:
        relation = f"{run.name} is as fast as {base.name}"
    elif speed_up > 1:
        relation = f"{run.name} is {speed_up:.3f} x faster than {base.name}"
    else:
        relation = f"{run.name} is {1 / speed_up:.3f} x slower than {base.name}"
    ours, theirs = f"{run.median_ms:.1f} ms", f"{base.median_ms:.1f} ms"
    of_run, of_base = (f"median of iterations {iteration_range(r.steady)}" for r in (run, base))
    if of_run == of_base:
        return f"{relation} ({ours} against {theirs}, {of_run})"
    return f"{relation} ({ours}, {of_run}, against {theirs}, {of_base})"


def loss_verdict(comparison: Comparison) -> str:
    """One sentence: do the losses agree, and where do they part."""
    base, run, loss = comparison.base, comparison.run, comparison.loss
    if loss.common == 0:
        return f"The losses of {run.name} and {base.name} have no iteration in common"
    if loss.equal:
        return (
            f"{run.name} and {base.name} have equal losses, as printed, "
            f"at all {loss.common} common iterations"
        )
    first = loss.first_difference
    ours, theirs = (
        next(r.fields.get(LOSS, "none") for r in one.log.records if r.iteration == first)
        for one in (run, base)
    )
    sentence = (
        f"{run.name} and {base.name} have different losses, "
        f"first at iteration {first} ({ours} against {theirs})"
    )
    if loss.largest:
        sentence += (
            f"; the largest difference is {loss.largest:.6g}, at iteration {loss.largest_at}"
        )
    return sentence


def elapsed_ms(record: LogRecord) -> float | None:
    """Time of an iteration in ms; None if it is not there or makes no sense."""
    time = record.number(ELAPSED_MS)
    return time if time is not None and math.isfinite(time) and time > 0 else None


def iteration_range(records: Sequence[LogRecord]) -> str:
    """First and last iteration, as "2-4"."""
    first, last = records[0].iteration, records[-1].iteration
    return str(first) if first == last else f"{first}-{last}"


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
