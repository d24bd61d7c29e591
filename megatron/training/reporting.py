"""Everything that tells a person how training goes: log line, timers, metrics, writers, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.training.memory_report import MemoryReporter, memory_line, memory_scalars
from megatron.training.metrics_file import MetricsFile
from megatron.training.model_setup import Trainer
from megatron.training.session import Session, TrainState
from megatron.training.step_report import StepReport
from megatron.training.training_log import TrainingLog
from megatron.training.writers import WriterOptions, Writers, open_writers

_TIMERS = ("forward-backward", "optimizer")


@dataclass
class Reporting:
    """Where a run reports to."""

    session: Session
    log: TrainingLog
    memory: MemoryReporter
    writers: Writers | None

    def record_step(self, report: StepReport, state: TrainState) -> None:
        """Tell of one step; on ranks that do not log, only what is collective."""
        logged = self.log.record_step(report)
        if self.memory.is_due(report.iteration, logged=logged):
            if self.session.groups.position.dp == 0:
                line = memory_line(self.session.rank, report.iteration, self.session.device)
                print(line, flush=True)
        if logged and self.session.run.logging.timing_log_level > 0:
            self.session.timers.log(
                list(_TIMERS),
                rank=self.session.logging_rank,
                normalizer=self.session.run.logging.log_interval,
            )


@contextlib.contextmanager
def open_reporting(trainer: Trainer, state: TrainState) -> Iterator[Reporting]:
    """Open what the command line asks for; closed at the end, also after an error."""
    session = trainer.session
    with contextlib.ExitStack() as stack:
        writers = metrics = None
        if session.is_logging_rank:
            writers = _open_writers(session)
            if writers is not None:
                stack.callback(writers.close)
            metrics = _open_metrics(session, state)
            if metrics is not None:
                stack.callback(metrics.close)
        run = session.run
        log = TrainingLog(
            train_iters=run.train_iters,
            log_interval=run.logging.log_interval,
            world_size=run.world_size,
            seq_length=run.model.seq_length,
            is_logging_rank=session.is_logging_rank,
            flops_per_sample=session.flops_per_sample,
            log_throughput=run.logging.log_throughput,
            writer=writers,
            metrics=metrics,
        )
        yield Reporting(session, log, MemoryReporter(run.logging.log_memory_interval), writers)


def _open_writers(session: Session) -> Writers | None:
    logging = session.run.logging
    options = WriterOptions(
        tensorboard_dir=logging.tensorboard_dir,
        tensorboard_log_interval=logging.tensorboard_log_interval,
        tensorboard_queue_size=logging.tensorboard_queue_size,
        log_timers_to_tensorboard=logging.log_timers_to_tensorboard,
        log_loss_scale_to_tensorboard=logging.log_loss_scale_to_tensorboard,
        log_learning_rate_to_tensorboard=logging.log_learning_rate_to_tensorboard,
        log_batch_size_to_tensorboard=logging.log_batch_size_to_tensorboard,
        log_world_size_to_tensorboard=logging.log_world_size_to_tensorboard,
        log_memory_to_tensorboard=logging.log_memory_to_tensorboard,
        log_validation_ppl_to_tensorboard=logging.log_validation_ppl_to_tensorboard,
        wandb_project=logging.wandb_project,
        wandb_exp_name=logging.wandb_exp_name,
        wandb_entity=logging.wandb_entity,
        wandb_save_dir=logging.wandb_save_dir,
        save=session.run.checkpoint.save,
    )
    return open_writers(
        options,
        config=_config(session),
        world_size=session.run.world_size,
        memory_scalars=lambda: memory_scalars(session.device),
    )


def _open_metrics(session: Session, state: TrainState) -> MetricsFile | None:
    path = session.run.logging.metrics_file
    if path is None:
        return None
    return MetricsFile(path, config=_config(session), resumed_iteration=state.iteration)


def _config(session: Session) -> dict[str, Any]:
    """The flat arguments as JSON values."""
    plain = (str, int, float, bool, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in sorted(vars(session.namespace).items())
    }
