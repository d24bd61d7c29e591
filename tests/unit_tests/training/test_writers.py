"""Scalars of TensorBoard and wandb: names, x axes, flags, missing packages."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.core.timers import Timers
from megatron.training.step_report import StepReport
from megatron.training.writers import WriterOptions, Writers, open_writers, perplexity

REPORT = StepReport(
    iteration=10,
    consumed_samples=640,
    skipped_samples=64,
    losses={"lm loss": 2.5},
    learning_rate=3e-4,
    decoupled_learning_rate=1e-4,
    global_batch_size=64,
    loss_scale=1024.0,
    grad_norm=0.5,
    num_zeros=12.0,
    params_norm=33.0,
)
EVERYTHING = WriterOptions(
    log_timers_to_tensorboard=True,
    log_batch_size_to_tensorboard=True,
    log_world_size_to_tensorboard=True,
    log_memory_to_tensorboard=True,
    log_validation_ppl_to_tensorboard=True,
)


class Recorder:
    """A backend that keeps (name, value, iteration, samples)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int, int | None]] = []
        self.closed = False

    def add_scalars(
        self, scalars: Mapping[str, float], *, iteration: int, samples: int | None
    ) -> None:
        self.rows += [(name, value, iteration, samples) for name, value in scalars.items()]

    def close(self) -> None:
        self.closed = True

    def names(self, *, paired: bool) -> set[str]:
        return {name for name, _, _, samples in self.rows if (samples is not None) == paired}


def writers(recorder: Recorder, options: WriterOptions = EVERYTHING) -> Writers:
    return Writers(
        backends=[recorder],
        options=options,
        world_size=16,
        memory_scalars=lambda: {"mem-allocated-bytes": 5.0},
    )


def test_scalars_of_a_step_carry_megatrons_names() -> None:
    recorder = Recorder()
    writers(recorder).step(REPORT)
    assert recorder.names(paired=True) == {
        "learning-rate",
        "decoupled-learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
    }
    assert recorder.names(paired=False) == {"skipped-train-samples", "mem-allocated-bytes"}
    assert ("lm loss", 2.5, 10, 640) in recorder.rows
    assert ("world-size", 16, 10, 640) in recorder.rows
    assert ("skipped-train-samples", 64, 10, None) in recorder.rows


def test_what_was_not_measured_is_not_written() -> None:
    recorder = Recorder()
    bare = StepReport(iteration=1, consumed_samples=8, learning_rate=None, global_batch_size=8)
    writers(recorder).step(bare)
    assert recorder.names(paired=True) == {"batch-size", "loss-scale", "world-size"}


def test_rollbacks_have_a_scalar_of_their_own() -> None:
    recorder = Recorder()
    writers(recorder).step(dataclasses.replace(REPORT, num_zeros=None, optimizer_rollbacks=0))
    assert ("optimizer-rollback", 0, 10, 640) in recorder.rows
    assert "num-zeros" not in recorder.names(paired=True)


def test_flags_switch_scalars() -> None:
    recorder = Recorder()
    writers(recorder, WriterOptions()).step(REPORT)  # Megatron-LM's defaults
    assert recorder.names(paired=True) == {
        "learning-rate",
        "decoupled-learning-rate",
        "lm loss",
        "loss-scale",
        "grad-norm",
        "num-zeros",
        "params-norm",
    }
    assert recorder.names(paired=False) == {"skipped-train-samples"}
    off = WriterOptions(log_learning_rate_to_tensorboard=False, log_loss_scale_to_tensorboard=False)
    recorder = Recorder()
    writers(recorder, off).step(REPORT)
    assert recorder.names(paired=True) == {"lm loss", "grad-norm", "num-zeros", "params-norm"}


def test_steps_are_written_at_the_interval() -> None:
    recorder = Recorder()
    every_third = writers(recorder, WriterOptions(tensorboard_log_interval=3))
    for iteration in range(1, 10):
        every_third.step(dataclasses.replace(REPORT, iteration=iteration))
    assert sorted({iteration for _, _, iteration, _ in recorder.rows}) == [3, 6, 9]


def test_interval_scalars_need_the_timer_flag() -> None:
    recorder = Recorder()
    writers(recorder).interval(20, step_time_s=1.5, tflops=100.0)
    writers(recorder).interval(30, step_time_s=1.5, tflops=None)
    writers(recorder, WriterOptions()).interval(40, step_time_s=1.5, tflops=100.0)
    assert recorder.rows == [
        ("iteration-time", 1.5, 20, None),
        ("throughput", 100.0, 20, None),
        ("iteration-time", 1.5, 30, None),
    ]


def test_validation_scalars() -> None:
    recorder = Recorder()
    writers(recorder).validation(10, consumed_samples=640, losses={"lm loss": 2.0})
    assert recorder.rows == [
        ("lm loss validation", 2.0, 10, 640),
        ("lm loss validation ppl", math.exp(2.0), 10, 640),
    ]
    recorder = Recorder()
    writers(recorder, WriterOptions()).validation(10, consumed_samples=640, losses={"lm loss": 2.0})
    assert recorder.names(paired=True) == {"lm loss validation"}


def test_perplexity_is_cut_and_keeps_nan() -> None:
    assert perplexity(1.0) == math.e
    assert perplexity(1e6) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


def test_timers_write_to_writers() -> None:
    recorder = Recorder()
    ticks = iter([1.0, 4.0])
    timers = Timers(0, "max", clock=lambda: next(ticks))
    timers("evaluate", log_level=0).start()
    timers("evaluate").stop()
    timers.write(["evaluate"], writers(recorder), 7)
    assert recorder.rows == [("evaluate-time", 3.0, 7, None)]


def test_tensorboard_files_hold_scalars_samples_and_arguments(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = dataclasses.replace(EVERYTHING, tensorboard_dir=str(tmp_path))
    config = vars(argparse.Namespace(num_layers=4))
    opened = open_writers(options, config=config, world_size=2, memory_scalars=dict)
    assert opened is not None
    opened.step(REPORT)
    opened.validation(10, consumed_samples=640, losses={"lm loss": 2.0})
    opened.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert scalars["lm loss"] == [(10, 2.5)]
    assert scalars["lm loss vs samples"] == [(640, 2.5)]
    assert scalars["lm loss validation vs samples"] == [(640, 2.0)]
    assert "skipped-train-samples" in scalars
    assert "skipped-train-samples vs samples" not in scalars
    text = events.Tensors("num_layers/text_summary")[0].tensor_proto.string_val
    assert text == [b"4"]


class FakeWandb(types.ModuleType):
    """The two calls of wandb that are used, recorded."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.settings: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **settings: Any) -> FakeWandb:
        self.settings = settings
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((scalars, step))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_same_names_and_samples_vs_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = WriterOptions(
        wandb_project="p", wandb_exp_name="run", wandb_entity="team", save=str(tmp_path)
    )
    opened = open_writers(options, config={"lr": 0.1}, world_size=2)
    assert opened is not None
    assert wandb.settings == {
        "project": "p",
        "name": "run",
        "entity": "team",
        "dir": str(tmp_path / "wandb"),
        "config": {"lr": 0.1},
    }
    assert (tmp_path / "wandb").is_dir()
    opened.step(REPORT)
    opened.close()
    scalars, step = wandb.logged[0]
    assert step == 10 and scalars["lm loss"] == 2.5 and scalars["samples vs steps"] == 640
    assert not any("vs samples" in name for logged, _ in wandb.logged for name in logged)
    assert wandb.finished


def test_wandb_save_dir_wins_over_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options = WriterOptions(
        wandb_project="p", wandb_exp_name="r", wandb_save_dir=str(tmp_path / "w"), save="elsewhere"
    )
    open_writers(options, config={}, world_size=1)
    assert wandb.settings["dir"] == str(tmp_path / "w")


def test_no_flag_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_import(monkeypatch, "wandb", "torch.utils.tensorboard")
    assert open_writers(WriterOptions(), config={}, world_size=1) is None


def test_missing_wandb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_import(monkeypatch, "wandb")
    options = WriterOptions(wandb_project="p", wandb_exp_name="r")
    with pytest.raises(ValueError, match="--wandb-project p is given, but the wandb package"):
        open_writers(options, config={}, world_size=1)


def test_missing_tensorboard_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid_import(monkeypatch, "torch.utils.tensorboard")
    options = WriterOptions(tensorboard_dir=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert open_writers(options, config={}, world_size=1) is None
    (message,) = caplog.messages
    assert "--tensorboard-dir" in message and "pip install tensorboard" in message


def forbid_import(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the modules look as if they were not installed."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
