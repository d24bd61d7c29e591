"""TensorBoard and wandb: the same scalars, under Megatron-LM's names.

    writers = open_writers(options, config=vars(args), world_size=8)   # on the rank with the loss
    writers.step(report)

A scalar whose name is followed by ` vs samples` has consumed samples on its x axis in place of
iterations; wandb gets `samples vs steps` instead, since it has one x axis. Neither package is
needed unless a flag asks for it.
"""

from __future__ import annotations

import importlib
import logging
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.training.step_report import StepReport

logger = logging.getLogger(__name__)

# exp(20) is 5e8: a perplexity above it means nothing, and one of an early loss could overflow.
_LARGEST_EXPONENT = 20.0


def perplexity(loss: float) -> float:
    """exp(loss), with the loss cut at 20."""
    return math.exp(min(loss, _LARGEST_EXPONENT))  # in this order min keeps a NaN


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """The flags of TensorBoard and wandb, by their names."""

    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_learning_rate_to_tensorboard: bool = True
    log_batch_size_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_entity: str | None = None
    wandb_save_dir: str | None = None
    save: str | None = None  # --save: wandb's files go to its folder `wandb` unless told otherwise


class Backend(Protocol):
    """Something that stores scalars."""

    def add_scalars(
        self, scalars: Mapping[str, float], *, iteration: int, samples: int | None
    ) -> None:
        """Store `scalars` of an iteration; `samples` is the x of their ` vs samples` twins, None if
        they have none."""

    def close(self) -> None: ...


class TensorBoardBackend:
    """Event files in `--tensorboard-dir`; the arguments become text."""

    def __init__(self, summary_writer: Any, config: Mapping[str, Any]) -> None:
        self.summary_writer = summary_writer
        for name, value in config.items():
            summary_writer.add_text(name, str(value))

    def add_scalars(
        self, scalars: Mapping[str, float], *, iteration: int, samples: int | None
    ) -> None:
        for name, value in scalars.items():
            self.summary_writer.add_scalar(name, value, iteration)
            if samples is not None:
                self.summary_writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self.summary_writer.close()


class WandbBackend:
    """A wandb run; its config is the arguments."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def add_scalars(
        self, scalars: Mapping[str, float], *, iteration: int, samples: int | None
    ) -> None:
        axis = {} if samples is None else {"samples vs steps": samples}
        self.run.log({**scalars, **axis}, step=iteration)

    def close(self) -> None:
        self.run.finish()


@dataclass(frozen=True, kw_only=True)
class Writers:
    """What the flags ask for, written to every backend. One rank, the one with the loss, has it."""

    backends: Sequence[Backend]
    options: WriterOptions
    world_size: int
    memory_scalars: Callable[[], Mapping[str, float]] = field(default=dict)

    def step(self, report: StepReport) -> None:
        """Scalars of one training step, every `--tensorboard-log-interval` iterations."""
        if report.iteration % self.options.tensorboard_log_interval:
            return
        self._add(
            {
                name: value
                for name, value in self._step_scalars(report).items()
                if value is not None
            },
            report.iteration,
            report.consumed_samples,
        )
        unpaired: dict[str, float] = {"skipped-train-samples": report.skipped_samples}
        if self.options.log_memory_to_tensorboard:
            unpaired.update(self.memory_scalars())
        self._add(unpaired, report.iteration)

    def interval(self, iteration: int, *, step_time_s: float, tflops: float | None) -> None:
        """Means of a log interval: seconds an iteration, and TFLOP/s/GPU if measured."""
        if not self.options.log_timers_to_tensorboard:
            return
        scalars = {"iteration-time": step_time_s}
        if tflops is not None:
            scalars["throughput"] = tflops
        self._add(scalars, iteration)

    def validation(
        self, iteration: int, *, consumed_samples: int, losses: Mapping[str, float]
    ) -> None:
        """Mean losses of an evaluation, and their perplexities if asked for."""
        scalars: dict[str, float] = {}
        for name, loss in losses.items():
            scalars[f"{name} validation"] = loss
            if self.options.log_validation_ppl_to_tensorboard:
                scalars[f"{name} validation ppl"] = perplexity(loss)
        self._add(scalars, iteration, consumed_samples)

    def add_scalar(self, name: str, value: float, step: int, /) -> None:
        """One scalar without a twin; this makes a `Writers` a writer for `Timers.write`."""
        self._add({name: value}, step)

    def close(self) -> None:
        """Write out what is still in queues."""
        for backend in self.backends:
            backend.close()

    def _step_scalars(self, report: StepReport) -> dict[str, float | None]:
        options = self.options
        scalars: dict[str, float | None] = {}
        if options.log_learning_rate_to_tensorboard:
            scalars["learning-rate"] = report.learning_rate
            scalars["decoupled-learning-rate"] = report.decoupled_learning_rate
        if options.log_batch_size_to_tensorboard:
            scalars["batch-size"] = report.global_batch_size
        scalars.update(report.losses)
        if options.log_loss_scale_to_tensorboard:
            scalars["loss-scale"] = report.loss_scale
        if options.log_world_size_to_tensorboard:
            scalars["world-size"] = self.world_size
        scalars["grad-norm"] = report.grad_norm
        scalars["num-zeros"] = report.num_zeros
        scalars["optimizer-rollback"] = report.optimizer_rollbacks
        scalars["params-norm"] = report.params_norm
        return scalars

    def _add(
        self, scalars: Mapping[str, float], iteration: int, samples: int | None = None
    ) -> None:
        for backend in self.backends:
            backend.add_scalars(scalars, iteration=iteration, samples=samples)


def open_writers(
    options: WriterOptions,
    *,
    config: Mapping[str, Any],
    world_size: int,
    memory_scalars: Callable[[], Mapping[str, float]] = dict,
) -> Writers | None:
    """The writers that the options ask for; None if they ask for none.

    Without the tensorboard package one warning says so and the run goes on, as Megatron-LM's does:
    most launch scripts pass --tensorboard-dir. Without wandb a ValueError says how to get it.
    """
    found = [_open_tensorboard(options, config), _open_wandb(options, config)]
    backends = [backend for backend in found if backend is not None]
    if not backends:
        return None
    return Writers(
        backends=backends, options=options, world_size=world_size, memory_scalars=memory_scalars
    )


def _open_tensorboard(options: WriterOptions, config: Mapping[str, Any]) -> Backend | None:
    if not options.tensorboard_dir:
        return None
    try:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        logger.warning(
            "--tensorboard-dir %s is given, but the tensorboard package is not installed; no "
            "TensorBoard files will be written (pip install tensorboard)",
            options.tensorboard_dir,
        )
        return None
    return TensorBoardBackend(
        tensorboard.SummaryWriter(
            log_dir=options.tensorboard_dir, max_queue=options.tensorboard_queue_size
        ),
        config,
    )


def _open_wandb(options: WriterOptions, config: Mapping[str, Any]) -> Backend | None:
    if not options.wandb_project:
        return None
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"--wandb-project {options.wandb_project} is given, but the wandb package is not "
            "installed; pip install wandb, or leave the flag out"
        ) from error
    folder = options.wandb_save_dir
    if folder is None and options.save is not None:
        folder = str(pathlib.Path(options.save, "wandb"))
    if folder is not None:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=options.wandb_project,
        name=options.wandb_exp_name,
        entity=options.wandb_entity,
        dir=folder,
        config=dict(config),
    )
    return WandbBackend(run)
