"""The training line and the validation block, in Megatron-LM's format.

    log = TrainingLog(...)
    log.start()
    for ...:
        line_is_due = log.record_step(report)
        with log.pause():
            evaluate, save a checkpoint

Every rank records its steps; the one rank that has the loss prints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from megatron.core.timers import Timer
from megatron.training.metrics_file import MetricsFile
from megatron.training.printing import print_line
from megatron.training.step_report import StepReport
from megatron.training.throughput import tflops_per_gpu
from megatron.training.writers import Writers, perplexity

__all__ = [
    "Interval",
    "StepReport",
    "TrainingLog",
    "format_training_line",
    "format_validation",
]


@dataclass(kw_only=True)
class Interval:
    """Sums over the steps since the last line."""

    steps: int = 0
    skipped: int = 0
    nan: int = 0
    rollbacks: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)  # of the steps not skipped
    timings_ms: dict[str, float] = field(default_factory=dict)

    def add(self, report: StepReport, elapsed_s: float) -> None:
        self.steps += 1
        self.skipped += report.skipped
        self.nan += report.has_nan
        self.rollbacks += report.optimizer_rollbacks or 0
        self.samples += report.global_batch_size
        self.elapsed_s += elapsed_s
        if not report.skipped:
            _accumulate(self.losses, report.losses)
        _accumulate(self.timings_ms, report.timings_ms)

    @property
    def step_time_s(self) -> float:
        return self.elapsed_s / self.steps

    @property
    def mean_losses(self) -> dict[str, float]:
        """Over the steps not skipped; empty if all were, since then there is no loss to tell."""
        advanced = self.steps - self.skipped
        return {name: total / advanced for name, total in self.losses.items()}

    @property
    def mean_timings_ms(self) -> dict[str, float]:
        return {name: total / self.steps for name, total in self.timings_ms.items()}


def format_training_line(
    report: StepReport,
    interval: Interval,
    *,
    train_iters: int,
    timestamp: datetime,
    tflops: float | None = None,
    breakdown: bool = False,
) -> str:
    """One line: means and counts of `interval`, and the state after its last step, `report`.

    `breakdown` appends the mean of each timing behind Megatron-LM's last field. A loss below 0 is
    not shown, as in Megatron-LM; one that is not a number is.
    """
    fields = [
        f" [{timestamp:%Y-%m-%d %H:%M:%S}] iteration {report.iteration:8d}/{train_iters:8d}",
        f" consumed samples: {report.consumed_samples:12d}",
    ]
    if report.skipped_samples > 0:
        fields.append(f" skipped samples: {report.skipped_samples:12d}")
    fields.append(f" elapsed time per iteration (ms): {interval.step_time_s * 1000:.1f}")
    if tflops is not None:
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f}")
    if report.learning_rate is not None:
        fields.append(f" learning rate: {report.learning_rate:.6E}")
    if report.decoupled_learning_rate is not None:
        fields.append(f" decoupled learning rate: {report.decoupled_learning_rate:.6E}")
    fields.append(f" global batch size: {report.global_batch_size:5d}")
    fields += [
        f" {name}: {loss:.6E}" for name, loss in interval.mean_losses.items() if not loss < 0
    ]
    fields.append(f" loss scale: {report.loss_scale:.1f}")
    if report.grad_norm is not None:
        fields.append(f" grad norm: {report.grad_norm:.3f}")
    if report.optimizer_rollbacks is not None:
        fields.append(f" optimizer rollback: {interval.rollbacks:.1f}")
    elif report.num_zeros is not None:
        fields.append(f" num zeros: {report.num_zeros:.1f}")
    if report.params_norm is not None:
        fields.append(f" params norm: {report.params_norm:.3f}")
    fields.append(f" number of skipped iterations: {interval.skipped:3d}")
    fields.append(f" number of nan iterations: {interval.nan:3d}")
    if breakdown:
        fields += [f" {name} (ms): {ms:.1f}" for name, ms in interval.mean_timings_ms.items()]
    return "".join(f"{field} |" for field in fields)


def format_validation(prefix: str, losses: Mapping[str, float]) -> list[str]:
    """The three lines of an evaluation; `prefix` is such as `iteration 100 on test set`."""
    text = f" validation loss at {prefix} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


class TrainingLog:
    """Accumulates steps; every `log_interval` iterations prints a line, on the logging rank.

    `world_size` ranks share the throughput, `flops_per_sample` is of the whole model. Writers and
    metrics file are told of every step. `log_breakdown` appends the steps' timings to the line.
    """

    def __init__(
        self,
        *,
        train_iters: int,
        log_interval: int,
        world_size: int,
        seq_length: int,
        is_logging_rank: bool,
        flops_per_sample: float | None = None,
        log_throughput: bool = False,
        log_breakdown: bool = False,
        writer: Writers | None = None,
        metrics: MetricsFile | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if log_throughput and flops_per_sample is None:
            raise ValueError("--log-throughput needs the model's operations; give flops_per_sample")
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._world_size = world_size
        self._seq_length = seq_length
        self._is_logging_rank = is_logging_rank
        self._flops_per_sample = flops_per_sample
        self._log_throughput = log_throughput
        self._log_breakdown = log_breakdown
        self._writer = writer
        self._metrics = metrics
        self._now = now
        # Not one of the run's `Timers`: those wait for the device, or may be switched off. Reading
        # a step's loss has waited for the device already.
        self._step_timer = Timer("interval-time", clock=clock)
        self._interval = Interval()

    def start(self) -> None:
        """Begin to measure; the first step's time counts from here."""
        self._step_timer.start()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of an evaluation or a checkpoint out of the steps' time."""
        self._step_timer.stop()
        yield
        self._step_timer.start()

    def record_step(self, report: StepReport) -> bool:
        """Take in a step that has just ended; whether its line was due (on every rank alike)."""
        elapsed_s = self._step_timer.elapsed()
        self._interval.add(report, elapsed_s)
        line_is_due = report.iteration % self._log_interval == 0
        if self._is_logging_rank:
            self._tell_step(report, elapsed_s)
            if line_is_due:
                self._tell_interval(report)
        if line_is_due:
            self._interval = Interval()
        return line_is_due

    def record_validation(
        self, iteration: int, *, prefix: str, consumed_samples: int, losses: Mapping[str, float]
    ) -> None:
        """Print an evaluation's block, and tell writers and metrics file; on the logging rank."""
        if not self._is_logging_rank:
            return
        for line in format_validation(prefix, losses):
            print_line(line)
        if self._writer is not None:
            self._writer.validation(iteration, consumed_samples=consumed_samples, losses=losses)
        if self._metrics is not None:
            self._metrics.evaluation(
                iteration, prefix=prefix, consumed_samples=consumed_samples, losses=losses
            )

    def _tell_step(self, report: StepReport, elapsed_s: float) -> None:
        if self._metrics is not None:
            self._metrics.step(
                report,
                elapsed_s=elapsed_s,
                tokens=report.global_batch_size * self._seq_length,
                tflops_per_gpu=self._tflops(report.global_batch_size, elapsed_s),
            )
        if self._writer is not None:
            self._writer.step(report)

    def _tell_interval(self, report: StepReport) -> None:
        interval = self._interval
        tflops = None
        if self._log_throughput:
            tflops = self._tflops(interval.samples, interval.elapsed_s)
        line = format_training_line(
            report,
            interval,
            train_iters=self._train_iters,
            timestamp=self._now(),
            tflops=tflops,
            breakdown=self._log_breakdown,
        )
        print_line(line)
        if self._writer is not None:
            self._writer.interval(report.iteration, step_time_s=interval.step_time_s, tflops=tflops)

    def _tflops(self, samples: int, seconds: float) -> float | None:
        if self._flops_per_sample is None:
            return None
        return tflops_per_gpu(self._flops_per_sample * samples, seconds, self._world_size)


def _accumulate(totals: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value
