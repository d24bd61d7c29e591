"""What looks wrong in one training log, or stands in the way of comparing two, as sentences."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from .log_comparison import Comparison, Run, common_records, elapsed_ms, iteration_range
from .log_reader import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATE,
    LOSS,
    NAN_ITERATIONS,
    SKIPPED_ITERATIONS,
    LogRecord,
)

# Sizes that published tokenizers have, and the sizes that padding makes of them.
# fmt: off
COMMON_VOCAB_SIZES = (
    28996, 29056, 30522, 30592, 32000, 32064, 32128, 32256, 32768, 49152, 50257, 50272, 50304,
    50432, 50688, 51200, 64000, 64128, 65024, 65536, 100277, 100352, 102400, 119547, 128000,
    128256, 129024, 129280, 131072, 151643, 151936, 152064, 156032, 250112, 250880, 256000,
    256256, 262144,
)
# fmt: on
_STILL = 1e-3  # a loss that moves by less than this, relative, stands still
_NEAR_LN_VOCAB = 2e-3  # how near to ln(vocabulary), absolute; an untrained healthy head is further
_FEWEST_LOSSES = 3  # before one can say that a loss stands still
_GROWTH = 1.1  # the last third of the iterations takes this much longer than the first
_FEWEST_TIMES = 12


@dataclass(frozen=True)
class StuckLoss:
    """A loss that stands still at ln(vocabulary)."""

    level: float
    vocab_size: int
    source: str  # what the vocabulary size is
    num_records: int


def all_warnings(
    comparisons: Sequence[Comparison], runs: Sequence[Run], vocab: int | None
) -> list[str]:
    """Every warning, run by run and then pair by pair; `vocab` is the user's --vocab-size."""
    found = [sentence for run in runs for sentence in run_warnings(run, vocab)]
    return found + [sentence for pair in comparisons for sentence in pair_warnings(pair)]


def run_warnings(run: Run, vocab: int | None = None) -> list[str]:
    """What looks wrong in one run."""
    candidates = (
        _stuck_sentence(run, vocab),
        _non_finite_losses(run),
        _counted(run, SKIPPED_ITERATIONS, "skipped", "its gradients overflowed"),
        _counted(run, NAN_ITERATIONS, "counted as nan", "its loss was not finite"),
        _changing_batch(run),
        _growing_times(run),
        _repeated_iterations(run),
    )
    return [sentence for sentence in candidates if sentence]


def pair_warnings(pair: Comparison) -> list[str]:
    """What stands in the way of comparing two runs."""
    candidates = (
        _different_iterations(pair),
        _different_intervals(pair),
        _different_setting(
            pair, GLOBAL_BATCH_SIZE, "so their iterations do not hold the same work"
        ),
        _different_setting(pair, LEARNING_RATE, "so their losses are expected to differ"),
    )
    return [sentence for sentence in candidates if sentence]


def stuck_loss(run: Run, vocab: int | None = None) -> StuckLoss | None:
    """The vocabulary at whose logarithm the loss stands still, if it does.

    ln(V) is the loss of a model that gives each of V tokens the same probability, as an output
    layer of zeros does. V is the user's, the log's own, or else a common one.
    """
    losses = [loss for record in run.log.records if _finite(loss := record.number(LOSS))]
    if len(losses) < _FEWEST_LOSSES or max(losses) - min(losses) > _STILL * abs(max(losses)):
        return None
    level = statistics.fmean(losses)
    sources = {
        "given by --vocab-size": [vocab],
        "the log's own vocabulary size": [
            run.log.argument(n) for n in ("padded_vocab_size", "vocab_size")
        ],
        "a common vocabulary size": COMMON_VOCAB_SIZES,
    }
    for source, sizes in sources.items():
        distances = [(abs(level - math.log(size)), size) for size in sizes if size]
        if distances and min(distances)[0] <= _NEAR_LN_VOCAB:
            return StuckLoss(level, min(distances)[1], source, len(losses))
    return None


def _stuck_sentence(run: Run, vocab: int | None) -> str | None:
    stuck = stuck_loss(run, vocab)
    if stuck is None:
        return None
    return (
        f"the loss of {run.name} stands still at {stuck.level:.6g} = ln({stuck.vocab_size}) over "
        f"all {stuck.num_records} records: it guesses each token of the vocabulary alike, as a "
        f"model does whose output layer stays zero; it is not learning "
        f"({stuck.vocab_size} is {stuck.source})"
    )


def _non_finite_losses(run: Run) -> str | None:
    bad = [r for r in run.log.records if (loss := r.number(LOSS)) is not None and not _finite(loss)]
    if not bad:
        return None
    return (
        f"the loss of {run.name} is {bad[0].fields[LOSS]} at iteration {bad[0].iteration}, "
        f"and not finite in {len(bad)} of {len(run.log.records)} records"
    )


def _counted(run: Run, field: str, what: str, why: str) -> str | None:
    """A sentence about iterations that the run itself counted in `field`."""
    counts = [(r.number(field) or 0, r.iteration) for r in run.log.records]
    total = sum(count for count, _ in counts)
    if not total:
        return None
    first = next(iteration for count, iteration in counts if count)
    noun = "iteration was" if total == 1 else "iterations were"
    return (
        f"{total:.0f} {noun} {what} by {run.name} ({why}), first in the record of iteration {first}"
    )


def _changing_batch(run: Run) -> str | None:
    batches = [b for r in run.steady if (b := r.number(GLOBAL_BATCH_SIZE)) is not None]
    if len(set(batches)) < 2:
        return None
    return (
        f"the global batch size of {run.name} changes from {min(batches):.0f} to "
        f"{max(batches):.0f} in iterations {iteration_range(run.steady)}, so no rate is given; "
        "leave the change out with --skip"
    )


def _growing_times(run: Run) -> str | None:
    timed = [record for record in run.steady if elapsed_ms(record) is not None]
    if len(timed) < _FEWEST_TIMES:
        return None
    third = len(timed) // 3
    first, last = timed[:third], timed[-third:]
    before, after = (statistics.median(map(_time, part)) for part in (first, last))
    if after < _GROWTH * before:
        return None
    return (
        f"the iterations of {run.name} grow longer: median {before:.1f} ms in "
        f"{iteration_range(first)}, {after:.1f} ms in {iteration_range(last)}"
    )


def _repeated_iterations(run: Run) -> str | None:
    repeated = run.log.repeated
    if not repeated:
        return None
    others = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
    return (
        f"{run.name} logs iteration {repeated[0]}{others} again with other values, after a restart "
        "or from several ranks; the last record of each counts"
    )


def _different_iterations(pair: Comparison) -> str | None:
    base, run = pair.base, pair.run
    common = len(common_records(base, run))
    if common == len(base.log.records) == len(run.log.records):
        return None
    has = [f"{r.name} has {len(r.log.records)} records of {r.iterations}" for r in (base, run)]
    return (
        f"the logs hold different iterations: {', '.join(has)}; losses are compared at the "
        f"{common} that both have"
    )


def _different_intervals(pair: Comparison) -> str | None:
    base, run = (_log_interval(one.log.records) for one in (pair.base, pair.run))
    if base is None or run is None or base == run:
        return None
    return (
        f"the logs differ in --log-interval: {pair.base.name} {base}, {pair.run.name} {run}; a "
        "record holds averages since the one before, so even equal runs print different losses"
    )


def _different_setting(pair: Comparison, field: str, consequence: str) -> str | None:
    for ours, theirs in common_records(pair.base, pair.run):
        one, other = ours.number(field), theirs.number(field)
        if one is not None and other is not None and one != other:
            return (
                f"{pair.base.name} and {pair.run.name} differ in {field}, first at iteration "
                f"{ours.iteration} ({ours.fields[field]} against {theirs.fields[field]}), "
                + consequence
            )
    return None


def _log_interval(records: Sequence[LogRecord]) -> int | None:
    steps = [b.iteration - a.iteration for a, b in itertools.pairwise(records)]
    return Counter(steps).most_common(1)[0][0] if steps else None


def _time(record: LogRecord) -> float:
    return elapsed_ms(record) or 0.0


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
