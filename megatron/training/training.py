"""The main flow of a run: `pretrain` -> `train` -> `train_step` -> the pipeline runtime."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import Any

from megatron.core.pipeline_parallel.zerobubble.runtime.compute import ForwardStep
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op
from megatron.training.banner import datetime_line
from megatron.training.checkpointing import Checkpointer
from megatron.training.data import DatasetProvider, RunData, StageIterators, build_run_data
from megatron.training.evaluation import evaluate_and_report, run_iteration
from megatron.training.exit_conditions import ExitConditions
from megatron.training.initialize import initialize_megatron
from megatron.training.losses import LossMeter
from megatron.training.model_setup import ModelProvider, Trainer, build_trainer
from megatron.training.optimizer_steps import OptimizerSteps
from megatron.training.progress import ProgressFile
from megatron.training.reporting import Reporting, open_reporting
from megatron.training.session import TrainState
from megatron.training.step_profiler import StepProfiler
from megatron.training.step_report import StepReport

logger = logging.getLogger(__name__)


def pretrain(
    train_valid_test_dataset_provider: DatasetProvider,
    model_provider: ModelProvider,
    model_type: Any,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[..., None] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    argv: list[str] | None = None,
) -> TrainState:
    """Train, evaluate and save as the command line says (Megatron's signature, spec 6.4)."""
    session = initialize_megatron(extra_args_provider, args_defaults, argv=argv)
    _log_time("after megatron is initialized")
    trainer = build_trainer(session, model_provider)
    checkpointer = Checkpointer(trainer)
    state = checkpointer.load()
    session.microbatches.update(state.consumed_train_samples, consistency_check=False)
    _log_time("after model, optimizer, and learning rate scheduler are built")
    data = build_run_data(session, train_valid_test_dataset_provider, state)
    _log_time("after dataloaders are built")
    logger.info("done with setup ...")
    if session.run.logging.log_progress and session.run.checkpoint.save and session.is_first_rank:
        checkpointer.progress = ProgressFile(
            session.run.checkpoint.save,
            world_size=session.run.world_size,
            num_flops_so_far=state.floating_point_operations,
        )
    with open_reporting(trainer, state) as reporting:
        if session.run.training.skip_train:
            logger.info("skipping training (--skip-train is on) ...")
        else:
            logger.info("training ...")
            exited = train(trainer, forward_step_func, data, state, checkpointer, reporting)
            if exited:
                return state
        _evaluate_at_end(trainer, forward_step_func, data, state, reporting)
        checkpointer.finish()
    return state


def train(
    trainer: Trainer,
    forward_step: ForwardStep,
    data: RunData,
    state: TrainState,
    checkpointer: Checkpointer,
    reporting: Reporting,
) -> bool:
    """Train to train-iters, or until an exit condition holds; True if one did. All is saved."""
    run = trainer.session.run
    with ExitStack() as stack:
        conditions = stack.enter_context(ExitConditions(trainer.session))
        _log_time("before the start of training step")
        if run.validation.eval_at_start and data.valid is not None and state.iteration == 0:
            evaluate_and_report(
                trainer, forward_step, data.valid, state, reporting.log, "iteration 0"
            )
        profiler = StepProfiler(trainer.session)
        stack.callback(profiler.stop)
        reporting.log.start()
        steps = OptimizerSteps(trainer, reporting.record_step)
        while state.iteration < run.train_iters:
            assert data.train is not None, "training without a training set"
            _change_batch_size(trainer, state, checkpointer, reporting, steps)
            profiler.before_iteration(state.iteration + 1)
            meet = _ranks_meet(trainer, data, conditions, state.iteration + 1)
            report = train_step(trainer, forward_step, data.train, state, steps, meet=meet)
            checkpointer.poll()
            _stop_on_bad_loss(trainer, report)
            evaluate_now = _evaluation_is_due(trainer, data, state.iteration)
            if evaluate_now:
                steps.settle_now()
                _evaluate_between_steps(trainer, forward_step, data, state, reporting)
            _collect_garbage(trainer, state, evaluated=evaluate_now)
            reason = conditions.reason_to_exit(state.iteration)
            if reason is not None or _save_is_due(trainer, state.iteration):
                steps.settle_now()
                with reporting.log.pause():
                    checkpointer.save(state)
            if reason is not None:
                checkpointer.finish()
                logger.info("%s", datetime_line(f"exiting program {reason}", datetime.now()))
                return True
        steps.settle_now()
        _log_time("after training is done")
        checkpointer.save(state)
    return False


def train_step(
    trainer: Trainer,
    forward_step: ForwardStep,
    iterators: StageIterators,
    state: TrainState,
    steps: OptimizerSteps | None = None,
    *,
    meet: bool = True,
) -> StepReport:
    """One iteration: the plan, the optimizer, the learning rate. Advances `state`.

    `meet`: ranks meet at the optimizer step. Otherwise, with post-validation, `steps` settles it
    later, and the report lacks what is known only then.
    """
    session = trainer.session
    steps = steps or OptimizerSteps(trainer)
    for stage in trainer.stages:
        stage.context.random.iteration = state.iteration
    if steps.validation is None:  # otherwise the last step still needs its gradients
        trainer.optimizer.zero_grad()
    timers, barrier = session.timers, session.run.logging.barrier_with_L1_time
    timers("forward-backward", log_level=1).start(barrier=barrier)
    reported = run_iteration(
        trainer,
        forward_step,
        iterators,
        session.microbatches.get(),
        forward_only=False,
        validation=steps.validation,
    )
    timers("forward-backward").stop()
    batch = session.microbatches.current_global_batch_size
    state.iteration += 1
    state.consumed_train_samples += batch
    state.floating_point_operations += session.flops_per_sample * batch
    meter = LossMeter(session.groups.dp)
    meter.add(reported)
    report = StepReport(
        iteration=state.iteration,
        consumed_samples=state.consumed_train_samples,
        skipped_samples=state.skipped_train_samples,
        losses=meter.means(),
        learning_rate=None,
        global_batch_size=batch,
        timings_ms=_timings_ms(trainer, iterators),
    )
    timers("optimizer", log_level=1).start(barrier=barrier)
    report = steps.step(report, trainer.runtime.times.executed, meet=meet)
    timers("optimizer").stop()
    return report


def _ranks_meet(
    trainer: Trainer, data: RunData, conditions: ExitConditions, iteration: int
) -> bool:
    """Whether something else than another iteration is known to follow this one."""
    return (
        iteration == trainer.session.run.train_iters
        or _evaluation_is_due(trainer, data, iteration)
        or _save_is_due(trainer, iteration)
        or conditions.interval_ends(iteration)
    )


def _change_batch_size(
    trainer: Trainer,
    state: TrainState,
    checkpointer: Checkpointer,
    reporting: Reporting,
    steps: OptimizerSteps,
) -> None:
    """Let a ramp-up change the batch size; what was reached before is saved."""
    microbatches = trainer.session.microbatches
    before = microbatches.get()
    microbatches.update(state.consumed_train_samples, consistency_check=True)
    if microbatches.get() != before and state.iteration > 0:
        logger.info(
            "global batch size is now %d at iteration %d",
            microbatches.current_global_batch_size,
            state.iteration,
        )
        steps.settle_now()
        with reporting.log.pause():
            checkpointer.save(state)


def _stop_on_bad_loss(trainer: Trainer, report: StepReport) -> None:
    """A loss that is not a number ends the run, unless that check is off."""
    if not trainer.session.run.check_for_nan_in_loss_and_grad:
        return
    for name, value in report.losses.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value} at iteration {report.iteration}; the run stops so that weights "
                "are not lost (--no-check-for-nan-in-loss-and-grad goes on)"
            )


def _evaluation_is_due(trainer: Trainer, data: RunData, iteration: int) -> bool:
    validation = trainer.session.run.validation
    interval = validation.eval_interval
    wanted = bool(interval) and validation.eval_iters > 0 and data.valid is not None
    return wanted and interval is not None and iteration % interval == 0


def _save_is_due(trainer: Trainer, iteration: int) -> bool:
    interval = trainer.session.run.checkpoint.save_interval
    return bool(interval) and interval is not None and iteration % interval == 0


def _evaluate_between_steps(
    trainer: Trainer,
    forward_step: ForwardStep,
    data: RunData,
    state: TrainState,
    reporting: Reporting,
) -> None:
    assert data.valid is not None
    with reporting.log.pause():
        prefix = f"iteration {state.iteration}"
        evaluate_and_report(trainer, forward_step, data.valid, state, reporting.log, prefix)


def _evaluate_at_end(
    trainer: Trainer,
    forward_step: ForwardStep,
    data: RunData,
    state: TrainState,
    reporting: Reporting,
) -> None:
    if trainer.session.run.validation.eval_iters == 0:
        return
    for label, iterators in (("validation", data.valid), ("test", data.test)):
        if iterators is not None:
            prefix = f"iteration {state.iteration} on {label} set"
            evaluate_and_report(
                trainer, forward_step, iterators, state, reporting.log, prefix, verbose=True
            )


def _timings_ms(trainer: Trainer, iterators: StageIterators) -> dict[str, float]:
    """What this rank's host time of the iteration went into."""
    times = trainer.runtime.times
    timings = {
        "optimizer validation" if op is Op.PV else f"compute {op.value}": 1e3 * spent
        for op, spent in times.compute.items()
    }
    timings["waiting"] = 1e3 * times.waiting
    timings["communication"] = 1e3 * times.communication
    timings["data"] = 1e3 * sum(i.take_waited_s() for i in iterators if i is not None)
    timings["compute F"] -= timings["data"]  # it reads the data
    return timings


def _collect_garbage(trainer: Trainer, state: TrainState, *, evaluated: bool) -> None:
    """With manual collection: at its interval, and after an evaluation unless told not to."""
    fusion = trainer.session.run.fusion
    due = fusion.manual_gc_interval and state.iteration % fusion.manual_gc_interval == 0
    if fusion.manual_gc and (due or (evaluated and fusion.manual_gc_eval)):
        gc.collect()


def _log_time(event: str) -> None:
    logger.info("%s", datetime_line(event, datetime.now()))
