"""Everything that tells a person how training goes: log line, timers, metrics, writers, memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Executed
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.core.transformer.kernels import kernel_choices, parameters_not_split
from megatron.training.memory_report import (
    ActivationSizes,
    MemoryReporter,
    memory_line,
    memory_scalars,
    peak_layers_in_flight,
    theoretical_report,
)
from megatron.training.metrics_file import MetricsFile
from megatron.training.model_setup import Trainer
from megatron.training.pipeline_trace import PipelineTrace
from megatron.training.printing import print_line
from megatron.training.session import Session, TrainState
from megatron.training.step_report import StepReport
from megatron.training.throughput import throughput_notice
from megatron.training.training_log import TrainingLog
from megatron.training.writers import WriterOptions, Writers, open_writers

logger = logging.getLogger(__name__)

_TIMERS = ("forward-backward", "optimizer")


@dataclass
class Reporting:
    """Where a run reports to."""

    session: Session
    log: TrainingLog
    memory: MemoryReporter
    writers: Writers | None
    trace: PipelineTrace | None
    estimate: list[str]  # lines of the memory estimate, until they are printed

    def record_step(self, report: StepReport, executed: list[Executed]) -> None:
        """Tell of one step; on ranks that do not log, only what is collective."""
        if self.trace is not None:
            self.trace.record(report.iteration, executed)
        logged = self.log.record_step(report)
        if self.memory.is_due(report.iteration, logged=logged):
            self._report_memory(report.iteration)
        if logged and self.session.run.logging.timing_log_level > 0:
            self._report_timers(report.iteration)

    def _report_memory(self, iteration: int) -> None:
        """The estimate once, from rank 0; what is used, from one replica's ranks."""
        if self.estimate:
            logger.info("%s", "\n".join(self.estimate))
            self.estimate = []
        if self.session.groups.position.dp == 0:
            print_line(memory_line(self.session.rank, iteration, self.session.device))

    def _report_timers(self, iteration: int) -> None:
        """Collective: the times of all ranks are gathered."""
        session, settings = self.session, self.session.run.logging
        if settings.log_timers_to_tensorboard:
            session.timers.write(
                _TIMERS, self.writers, iteration, normalizer=settings.log_interval, reset=False
            )
        text = session.timers.report(_TIMERS, normalizer=settings.log_interval)
        if text and session.is_logging_rank:
            print_line(text)


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
            log_breakdown=run.logging.log_step_breakdown,
            writer=writers,
            metrics=metrics,
        )
        _log_start(trainer)
        memory = MemoryReporter(run.logging.log_memory_interval)
        trace = None
        if run.profiling.trace_pipeline is not None:
            trace = PipelineTrace(session, run.profiling.trace_pipeline)
        yield Reporting(session, log, memory, writers, trace, _memory_estimate(trainer))
        if trace is not None:
            trace.write()


def _log_start(trainer: Trainer) -> None:
    """What was chosen for this run, and why (rank 0)."""
    for part, choice in kernel_choices(trainer.model[0].config, trainer.session.device).items():
        logger.info("kernel: %s: %s", part, choice)
    _log_split(trainer)
    pipelined = trainer.session.groups.sizes.pp > 1
    if pipelined or trainer.session.run.zero_bubble.enable_optimizer_post_validation:
        _log_post_validation(trainer)
    if pipelined:
        _log_prediction(trainer)
    if trainer.session.run.logging.log_throughput:
        logger.info("%s", throughput_notice("causal", trainer.session.model_sizes))


def _log_split(trainer: Trainer) -> None:
    """How many weight gradients each stage's B leaves for its W, and what cannot be split."""
    session = trainer.session
    mine = [
        (stage.context.stage, stage.num_deferred, _names_not_split(stage.module.module))
        for stage in trainer.stages
    ]
    gathered = [mine]
    if session.groups.pp is not None:
        gathered = [[]] * session.groups.sizes.pp
        dist.all_gather_object(gathered, mine, group=session.groups.pp)
    name = session.pipeline.schedule
    splits = name in SCHEDULES and SCHEDULES[name].splits_backward
    stages = sorted(entry for part in gathered for entry in part)
    counts = " ".join(str(count) for _, count, _ in stages)
    how = "deferred from each B to its W" if splits else "done with the backward (no split)"
    logger.info("schedule %s: weight gradients per stage, %s: %s", name, how, counts)
    for stage, _, unsplit in stages:
        if unsplit:
            logger.warning(
                "stage %d: the gradients of %s cannot be split and are done in B",
                stage,
                ", ".join(unsplit),
            )


def _names_not_split(module: Any) -> list[str]:
    return [module.global_parameter_name(name) for name in parameters_not_split(module)]


def _log_post_validation(trainer: Trainer) -> None:
    """Whether ranks meet at the optimizer step, why, and what it takes (rank 0)."""
    session = trainer.session
    on, why = session.run.post_validation
    if trainer.post_validation is None:
        logger.info("optimizer post-validation: %s (%s)", "on" if on else "off", why)
        return
    logger.info(
        "optimizer post-validation: on (%s); between a step and its validation, copies for an "
        "exact rollback take %.1f MB on this rank, %.0f bytes per parameter it steps",
        why,
        trainer.post_validation.undo_bytes / 2**20,
        trainer.post_validation.undo_bytes_per_parameter,
    )
    tied = not session.run.model.untie_embeddings_and_output_weights
    if tied and session.groups.embedding is not None and session.pipeline.loss_rank != 0:
        logger.warning(
            "the embedding and the output layer are tied and on different ranks: these two still "
            "meet at every step, which takes most of the gain of post-validation away; "
            "--untie-embeddings-and-output-weights or a V schedule avoids it"
        )


def _log_prediction(trainer: Trainer) -> None:
    """What the schedule promises against 1F1B if F, B and W take equal times (rank 0)."""
    session = trainer.session
    m, p = session.run.num_microbatches, session.groups.sizes.pp
    plan = session.pipeline.plan_for(m)
    ours = simulate(plan, Costs.uniform(plan.placement))
    baseline = plan_schedule("1f1b", PlanRequest(num_ranks=p, num_microbatches=m))
    theirs = simulate(baseline, Costs.uniform(baseline.placement))
    speed_up = theirs.makespan / ours.makespan
    logger.info(
        "predicted for equal times of F, B and W and free transfers (p = %d, m = %d): "
        "bubble %.1f %% under %s, %.1f %% under 1f1b; speed-up %.3f",
        p,
        m,
        100 * ours.bubble_rate("makespan"),
        session.pipeline.schedule,
        100 * theirs.bubble_rate("makespan"),
        speed_up,
    )
    if session.pipeline.schedule != "1f1b" and speed_up < 1.05:
        logger.warning(
            "the predicted gain over 1f1b is under 5 %%: with m = %d micro-batches on p = %d ranks "
            "there is little bubble to fill, and what is not modelled may take it away",
            m,
            p,
        )


def _memory_estimate(trainer: Trainer) -> list[str]:
    session, run = trainer.session, trainer.session.run
    sharded = run.optimizer.use_distributed_optimizer
    activations = None
    if run.recompute_granularity != "full":
        plan = session.pipeline.plan_for(run.num_microbatches)
        activations = ActivationSizes(
            seq_length=run.model.seq_length,
            micro_batch_size=run.training.micro_batch_size,
            hidden_size=run.model.hidden_size,
            ffn_hidden_size=run.ffn_hidden_size,
            tensor_parallel_size=session.groups.sizes.tp,
            peak_layers_in_flight=peak_layers_in_flight(plan, session.pipeline.layers_per_stage),
        )
    early = trainer.post_validation
    return theoretical_report(
        trainer.parameter_counts,
        distributed_optimizer_size=session.groups.sizes.dp if sharded else 1,
        activations=activations,
        undo_bytes_per_parameter=early.undo_bytes_per_parameter if early is not None else None,
    )


def _open_writers(session: Session) -> Writers | None:
    given = session.run.logging
    options = WriterOptions(
        tensorboard_dir=given.tensorboard_dir,
        tensorboard_log_interval=given.tensorboard_log_interval,
        tensorboard_queue_size=given.tensorboard_queue_size,
        log_timers_to_tensorboard=given.log_timers_to_tensorboard,
        log_loss_scale_to_tensorboard=given.log_loss_scale_to_tensorboard,
        log_learning_rate_to_tensorboard=given.log_learning_rate_to_tensorboard,
        log_batch_size_to_tensorboard=given.log_batch_size_to_tensorboard,
        log_world_size_to_tensorboard=given.log_world_size_to_tensorboard,
        log_memory_to_tensorboard=given.log_memory_to_tensorboard,
        log_validation_ppl_to_tensorboard=given.log_validation_ppl_to_tensorboard,
        wandb_project=given.wandb_project,
        wandb_exp_name=given.wandb_exp_name,
        wandb_entity=given.wandb_entity,
        wandb_save_dir=given.wandb_save_dir,
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
