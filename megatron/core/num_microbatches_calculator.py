"""Global batch size over a run, and the number of micro-batches that follows from it.

Three ways to state the batch size, one form: segments `(from_samples, batch_size)`.

    --global-batch-size 512           [(0, 512)]
    --rampup-batch-size 32 32 1000    to 128: [(0, 32), (334, 64), (667, 96), (1000, 128)]
    --step-batch-size-schedule "0:32 1M:64"    at 2048 tokens a sample: [(0, 32), (488, 64)]

Our own code passes a `NumMicroBatchesCalculator` along. The functions at the end of the file keep
one calculator for scripts written against Megatron, and are the only module state in
`megatron.core`.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Segment(NamedTuple):
    """`batch_size` holds once `from_samples` samples have been consumed."""

    from_samples: int
    batch_size: int


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of consumed samples."""

    segments: tuple[Segment, ...]

    @classmethod
    def constant(cls, batch_size: int) -> BatchSizes:
        return cls((Segment(0, batch_size),))

    @classmethod
    def rampup(cls, start: int, increment: int, samples: int, final: int) -> BatchSizes:
        """From `start` to `final` in equal steps of `increment`, evenly over `samples` samples.

        Step k begins where `int(consumed / (samples / steps))` reaches k.
        Raises ValueError naming --rampup-batch-size.
        """
        given = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(f"{given}: start and increment are at least 1, samples at least 0")
        if start > final or (final - start) % increment:
            raise ValueError(
                f"{given} does not reach the global batch size {final} in whole increments; "
                f"let --global-batch-size be {start} + a multiple of {increment}"
            )
        steps = (final - start) // increment
        segments = [Segment(0, start)]
        for k in range(1, steps + 1):
            threshold = -(-k * samples // steps)
            while samples and int(threshold / (samples / steps)) < k:
                threshold += 1  # the quotient is rounded; stay with the formula above
            segments.append(Segment(threshold, start + k * increment))
        return cls(tuple(segments))

    @classmethod
    def steps(cls, text: str, seq_length: int | None = None) -> BatchSizes:
        """`"0:16 300B:32"`: thresholds in tokens if `seq_length` is known, else in samples.

        Raises ValueError naming --step-batch-size-schedule.
        """
        segments = []
        for piece in text.replace(",", " ").split():
            match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", piece)
            if match is None or int(match[3]) < 1:
                raise ValueError(
                    f"--step-batch-size-schedule: {piece!r} is not THRESHOLD:BATCH_SIZE; "
                    'write e.g. "0:16 2.4B:320" (suffixes K, M, B, T)'
                )
            threshold = round(float(match[1]) * _SUFFIXES[match[2]])
            segments.append(Segment(threshold // (seq_length or 1), int(match[3])))
        starts = [segment.from_samples for segment in segments]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(
                f"--step-batch-size-schedule {text!r}: thresholds start at 0 and rise, "
                "each at least one sample above the one before"
            )
        return cls(tuple(segments))

    @property
    def final(self) -> int:
        return self.segments[-1].batch_size

    @property
    def is_constant(self) -> bool:
        return len(self.segments) == 1

    def at(self, consumed_samples: int) -> int:
        """Batch size of the iteration that starts after `consumed_samples` samples."""
        starts = [segment.from_samples for segment in self.segments]
        return self.segments[bisect.bisect_right(starts, consumed_samples) - 1].batch_size

    def num_iterations(self, num_samples: int) -> int:
        """Whole iterations that `num_samples` samples give."""
        consumed = iterations = 0
        ends = [segment.from_samples for segment in self.segments[1:]]
        for segment, end in zip(self.segments, [*ends, num_samples], strict=True):
            if consumed >= min(end, num_samples):
                continue  # the last iteration of an earlier segment has crossed this one
            to_next = -(-(min(end, num_samples) - consumed) // segment.batch_size)
            affordable = (num_samples - consumed) // segment.batch_size
            iterations += min(to_next, affordable)
            consumed += min(to_next, affordable) * segment.batch_size
            if affordable < to_next:
                break
        return iterations


class NumMicroBatchesCalculator:
    """Number of micro-batches per iteration and data-parallel rank, as the batch size grows."""

    def __init__(
        self, batch_sizes: BatchSizes, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        if micro_batch_size < 1 or data_parallel_size < 1:
            raise ValueError(
                f"micro-batch size {micro_batch_size} and data-parallel size {data_parallel_size} "
                "must be at least 1"
            )
        self.batch_sizes = batch_sizes
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.current_global_batch_size = 0
        self.update(0)

    def get(self) -> int:
        """Micro-batches of one data-parallel rank in the current iteration."""
        return self.current_global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def update(self, consumed_samples: int, consistency_check: bool = True) -> None:
        """Take the batch size for the iteration that starts after `consumed_samples`.

        Raises ValueError if it does not divide into micro-batches, unless told not to check.
        """
        batch_size = self.batch_sizes.at(consumed_samples)
        if consistency_check:
            check_batch_size(batch_size, self.micro_batch_size, self.data_parallel_size)
        self.current_global_batch_size = batch_size


def check_batch_size(
    batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    source: str = "--global-batch-size",
) -> None:
    """Raise ValueError, naming `source`, unless each rank gets whole micro-batches."""
    unit = micro_batch_size * data_parallel_size
    if batch_size < 1 or batch_size % unit:
        nearest = sorted({max(unit, batch_size // unit * unit), -(-batch_size // unit) * unit})
        raise ValueError(
            f"{source} {batch_size} is not a multiple of --micro-batch-size "
            f"{micro_batch_size} x data-parallel size {data_parallel_size} = {unit}; "
            f"use {' or '.join(map(str, nearest))}"
        )


def build_num_microbatches_calculator(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    rampup_batch_size: Sequence[int] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """The calculator for a constant, a ramped or a stepped batch size."""
    batch_sizes = batch_sizes_of(
        global_batch_size, rampup_batch_size, step_batch_size_schedule, seq_length
    )
    return NumMicroBatchesCalculator(batch_sizes, micro_batch_size, data_parallel_size)


def batch_sizes_of(
    global_batch_size: int,
    rampup_batch_size: Sequence[int] | None = None,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> BatchSizes:
    """Batch sizes of a run from Megatron's flags; `global_batch_size` is the final one.

    Raises ValueError for a ramp or schedule that cannot be read, or when both are given.
    """
    if rampup_batch_size is not None and step_batch_size_schedule is not None:
        raise ValueError(
            "--rampup-batch-size and --step-batch-size-schedule both change the batch size; "
            "give one"
        )
    if step_batch_size_schedule is not None:
        return BatchSizes.steps(step_batch_size_schedule, seq_length)
    if rampup_batch_size is not None:
        if len(rampup_batch_size) != 3:
            raise ValueError("--rampup-batch-size takes START INCREMENT SAMPLES")
        start, increment, samples = (int(value) for value in rampup_batch_size)
        return BatchSizes.rampup(start, increment, samples, global_batch_size)
    return BatchSizes.constant(global_batch_size)


# Megatron's module functions, over one calculator.

_calculator: NumMicroBatchesCalculator | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Set the calculator that the functions below read. Raises RuntimeError if one is set."""
    if _calculator is not None:
        raise RuntimeError("the number-of-micro-batches calculator is already initialized")
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Set or replace the calculator. `rank` is taken for compatibility only."""
    if decrease_batch_size_if_needed:
        raise ValueError(
            "decrease_batch_size_if_needed is not supported; give a global batch size that is a "
            "multiple of micro-batch size x data-parallel size"
        )
    set_num_microbatches_calculator(
        build_num_microbatches_calculator(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=data_parallel_size,
            rampup_batch_size=rampup_batch_size,
            step_batch_size_schedule=step_batch_size_schedule,
            seq_length=seq_length,
        )
    )


def set_num_microbatches_calculator(calculator: NumMicroBatchesCalculator | None) -> None:
    """Let the module functions read this calculator; None forgets it."""
    global _calculator
    _calculator = calculator


def unset_num_microbatches_calculator() -> None:
    """Forget the calculator."""
    set_num_microbatches_calculator(None)


def destroy_num_microbatches_calculator() -> None:
    """Forget the calculator (Megatron has two names for this)."""
    set_num_microbatches_calculator(None)


def get_num_microbatches() -> int:
    """Micro-batches of one data-parallel rank in the current iteration."""
    return _current().get()


def get_current_global_batch_size() -> int:
    """Global batch size of the current iteration."""
    return _current().current_global_batch_size


def get_current_running_global_batch_size() -> int:
    """The same: a batch is never run smaller than it is stated."""
    return _current().current_global_batch_size


def get_micro_batch_size() -> int:
    """Sequences of one micro-batch."""
    return _current().micro_batch_size


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Take the batch size for the iteration after `consumed_samples`; `verbose` has no effect."""
    _current().update(consumed_samples, consistency_check)


def _current() -> NumMicroBatchesCalculator:
    if _calculator is None:
        raise RuntimeError("call init_num_microbatches_calculator before asking for its numbers")
    return _calculator
