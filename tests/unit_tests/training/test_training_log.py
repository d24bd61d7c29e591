"""The training line and validation block, field for field; what is told to whom, and when."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatron.training.log_reader import parse_records
from megatron.training.metrics_file import MetricsFile, read_metrics
from megatron.training.training_log import (
    Interval,
    StepReport,
    TrainingLog,
    format_training_line,
    format_validation,
)
from megatron.training.writers import WriterOptions, Writers

MOMENT = datetime(2024, 5, 1, 12, 0, 0, 987654)
EXAMPLE = (  # the compatibility specification's line to test a scraper against, section 4.1
    " [2024-05-01 12:00:00] iteration      100/   50000 | consumed samples:        25600 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 310.2 | "
    "learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 2.345678E+00 | "
    "loss scale: 1.0 | grad norm: 0.512 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
REPORT = StepReport(
    iteration=100,
    consumed_samples=25600,
    losses={"lm loss": 2.345678},
    learning_rate=3e-4,
    global_batch_size=256,
    grad_norm=0.5124,
)


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def line_of(report: StepReport, elapsed_s: float = 1.2345, **options: Any) -> str:
    interval = Interval()
    interval.add(report, elapsed_s)
    return format_training_line(report, interval, train_iters=50000, timestamp=MOMENT, **options)


def fields_of(line: str) -> list[str]:
    """The names of a line's fields, in order; every field must open and close as Megatron-LM's."""
    assert line.startswith(" ") and line.endswith(" |") and "\n" not in line
    first, *rest = line[:-2].split(" |")
    assert re.fullmatch(r" \[2024-05-01 12:00:00\] iteration [ \d]{8}/[ \d]{8}", first)
    assert all(field.startswith(" ") and not field.startswith("  ") for field in rest)
    return [field[1:].split(": ")[0] for field in rest]


def test_line_equals_the_example() -> None:
    assert line_of(REPORT, tflops=310.24) == EXAMPLE


def test_our_reader_understands_our_line() -> None:
    report = dataclasses.replace(REPORT, losses={"lm loss": math.nan}, timings_ms={"waiting": 1.5})
    (record,) = parse_records(line_of(report, breakdown=True))
    assert (record.iteration, record.train_iters) == (100, 50000)
    assert record.time == "2024-05-01 12:00:00"
    assert record.number("elapsed time per iteration (ms)") == 1234.5
    assert record.number("grad norm") == 0.512
    assert record.number("waiting (ms)") == 1.5
    loss = record.number("lm loss")
    assert loss is not None and math.isnan(loss)


def test_optional_fields_stand_where_megatron_puts_them() -> None:
    report = dataclasses.replace(
        REPORT,
        skipped_samples=512,
        losses={"lm loss": 2.0, "load_balancing_loss": 0.5},
        decoupled_learning_rate=1e-4,
        num_zeros=7.0,
        params_norm=123.4567,
        timings_ms={"compute": 800.0, "waiting": 100.25},
    )
    line = line_of(report, tflops=1.0, breakdown=True)
    assert fields_of(line) == [
        "consumed samples",
        "skipped samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "learning rate",
        "decoupled learning rate",
        "global batch size",
        "lm loss",
        "load_balancing_loss",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "number of skipped iterations",
        "number of nan iterations",
        "compute (ms)",
        "waiting (ms)",
    ]
    for text in (
        " skipped samples:          512 |",
        " decoupled learning rate: 1.000000E-04 |",
        " num zeros: 7.0 |",
        " params norm: 123.457 |",
        " compute (ms): 800.0 | waiting (ms): 100.2 |",
    ):
        assert text in line


def test_unmeasured_fields_are_left_out() -> None:
    bare = StepReport(iteration=1, consumed_samples=8, learning_rate=None, global_batch_size=8)
    assert fields_of(line_of(bare)) == [
        "consumed samples",
        "elapsed time per iteration (ms)",
        "global batch size",
        "loss scale",
        "number of skipped iterations",
        "number of nan iterations",
    ]


def test_rollbacks_take_the_place_of_zeros_and_add_up() -> None:
    report = dataclasses.replace(REPORT, num_zeros=3.0, optimizer_rollbacks=1)
    interval = Interval()
    for _ in range(2):
        interval.add(report, 1.0)
    line = format_training_line(report, interval, train_iters=100, timestamp=MOMENT)
    assert " optimizer rollback: 2.0 |" in line and "num zeros" not in line


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (0.0, " lm loss: 0.000000E+00 |"),
        (math.nan, " lm loss: NAN |"),
        (math.inf, " lm loss: INF |"),
        (-0.5, None),
    ],
)
def test_which_losses_are_shown(loss: float, field: str | None) -> None:
    line = line_of(dataclasses.replace(REPORT, losses={"lm loss": loss}))
    assert field in line if field else "lm loss" not in line


def make_log(clock: Clock, **options: Any) -> TrainingLog:
    defaults: dict[str, Any] = {
        "train_iters": 50000,
        "log_interval": 2,
        "world_size": 4,
        "seq_length": 128,
        "is_logging_rank": True,
        "clock": clock,
        "now": lambda: MOMENT,
    }
    log = TrainingLog(**{**defaults, **options})
    log.start()
    return log


def record(log: TrainingLog, clock: Clock, seconds: float, **changes: Any) -> bool:
    clock.now += seconds
    return log.record_step(dataclasses.replace(REPORT, **changes))


def test_one_line_an_interval_with_means_over_it(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    log = make_log(clock)
    due = [
        record(log, clock, seconds, iteration=iteration, losses={"lm loss": loss})
        for iteration, seconds, loss in ((1, 1.0, 8.0), (2, 3.0, 6.0), (3, 0.5, 5.0), (4, 0.5, 4.0))
    ]
    assert due == [False, True, False, True]
    first, second = capsys.readouterr().out.splitlines()
    assert "iteration        2/" in first and "iteration        4/" in second
    assert (
        " elapsed time per iteration (ms): 2000.0 |" in first and " lm loss: 7.000000E+00" in first
    )
    assert " elapsed time per iteration (ms): 500.0 |" in second
    assert " lm loss: 4.500000E+00 |" in second
    assert "throughput" not in first


def test_skipped_steps_are_counted_and_not_averaged(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    log = make_log(clock, log_interval=4)
    record(log, clock, 1, iteration=1, losses={"lm loss": 3.0})
    record(log, clock, 1, iteration=2, losses={}, skipped=True)
    record(log, clock, 1, iteration=3, losses={"lm loss": math.inf}, skipped=True)
    record(log, clock, 1, iteration=4, losses={"lm loss": 5.0})
    (line,) = capsys.readouterr().out.splitlines()
    assert " lm loss: 4.000000E+00 |" in line
    assert " number of skipped iterations:   2 | number of nan iterations:   1 |" in line


def test_an_interval_of_skips_shows_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """A 0 or -1 in its place would look like a loss."""
    clock = Clock()
    log = make_log(clock)
    for iteration in (1, 2):
        record(log, clock, 1, iteration=iteration, losses={}, skipped=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert "lm loss" not in line and " number of skipped iterations:   2 |" in line
    assert " elapsed time per iteration (ms): 1000.0 |" in line


def test_evaluation_and_checkpoint_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    log = make_log(clock)
    record(log, clock, 1.0, iteration=1)
    with log.pause():
        clock.now += 1000.0
    clock.now += 0.5
    with log.pause():
        clock.now += 1000.0
    record(log, clock, 0.5, iteration=2)
    (line,) = capsys.readouterr().out.splitlines()
    assert " elapsed time per iteration (ms): 1000.0 |" in line


def test_only_the_logging_rank_speaks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clock = Clock()
    metrics = MetricsFile(tmp_path / "m", config={})
    log = make_log(clock, is_logging_rank=False, metrics=metrics)
    assert [record(log, clock, 1, iteration=i) for i in (1, 2)] == [False, True]
    log.record_validation(2, prefix="iteration 2", consumed_samples=8, losses={"lm loss": 1.0})
    assert capsys.readouterr().out == ""
    assert len(read_metrics(tmp_path / "m")) == 1  # its start


def test_throughput_counts_the_samples_of_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """With a batch that grows: (100 + 300) samples of 1e12 in 2 s on 4 ranks are 50 each."""
    clock = Clock()
    log = make_log(clock, flops_per_sample=1e12, log_throughput=True)
    record(log, clock, 1.5, iteration=1, global_batch_size=100)
    record(log, clock, 0.5, iteration=2, global_batch_size=300)
    assert " throughput per GPU (TFLOP/s/GPU): 50.0 |" in capsys.readouterr().out


def test_every_step_reaches_the_metrics_file_with_its_own_time(tmp_path: Path) -> None:
    clock = Clock()
    metrics = MetricsFile(tmp_path / "m", config={})
    log = make_log(clock, log_interval=100, metrics=metrics, flops_per_sample=1e12)
    for iteration, seconds in ((1, 0.5), (2, 2.0)):
        record(log, clock, seconds, iteration=iteration)
    log.record_validation(2, prefix="iteration 2", consumed_samples=8, losses={"lm loss": 1.0})
    _, first, second, evaluation = read_metrics(tmp_path / "m")
    assert (first["elapsed_ms"], second["elapsed_ms"]) == (500.0, 2000.0)
    assert first["tokens_per_second"] == 256 * 128 / 0.5
    assert first["tflops_per_gpu"] == pytest.approx(256 / 0.5 / 4)
    assert evaluation["type"] == "eval" and evaluation["lm loss"] == 1.0


def test_writers_are_told_of_steps_intervals_and_evaluations() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.rows: dict[tuple[str, int], float] = {}

        def add_scalars(self, scalars: Any, *, iteration: int, samples: int | None) -> None:
            self.rows.update({(name, iteration): value for name, value in scalars.items()})

        def close(self) -> None:
            pass

    clock = Clock()
    recorder = Recorder()
    options = WriterOptions(log_timers_to_tensorboard=True)
    writer = Writers(backends=[recorder], options=options, world_size=4)
    log = make_log(clock, writer=writer, flops_per_sample=1e12, log_throughput=True)
    record(log, clock, 1, iteration=1, losses={"lm loss": 4.0})
    record(log, clock, 3, iteration=2, losses={"lm loss": 2.0})
    log.record_validation(2, prefix="iteration 2", consumed_samples=8, losses={"lm loss": 1.0})
    assert recorder.rows["lm loss", 1] == 4.0 and recorder.rows["lm loss", 2] == 2.0
    assert recorder.rows["iteration-time", 2] == 2.0
    assert recorder.rows["throughput", 2] == pytest.approx(256 * 2 / 4 / 4)
    assert recorder.rows["lm loss validation", 2] == 1.0
    assert ("iteration-time", 1) not in recorder.rows


def test_validation_block() -> None:
    dashes, text, last = format_validation("iteration 100 on test set", {"lm loss": 2.0})
    assert text == (
        " validation loss at iteration 100 on test set | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | "
    )
    assert dashes == last == "-" * (len(text) + 1)
    assert "lm loss PPL: 4.851652E+08 | " in format_validation("x", {"lm loss": 1e6})[1]


def test_validation_block_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    log = make_log(Clock())
    log.record_validation(2, prefix="iteration 2", consumed_samples=8, losses={"lm loss": 1.0})
    expected = format_validation("iteration 2", {"lm loss": 1.0})
    assert capsys.readouterr().out.splitlines() == expected


def test_throughput_without_operations_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-throughput"):
        make_log(Clock(), log_throughput=True)


def test_starting_twice_is_refused() -> None:
    log = make_log(Clock())
    with pytest.raises(RuntimeError, match="interval-time"):
        log.start()
