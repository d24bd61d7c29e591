"""Evaluation: forward-only runs that change nothing in training."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.pipeline_parallel.zerobubble.runtime.compute import ForwardStep
from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Validation
from megatron.training.data import StageIterators
from megatron.training.losses import LossMeter
from megatron.training.model_setup import Trainer
from megatron.training.session import TrainState
from megatron.training.training_log import TrainingLog

logger = logging.getLogger(__name__)


def evaluate(
    trainer: Trainer,
    forward_step: ForwardStep,
    iterators: StageIterators,
    state: TrainState,
    *,
    verbose: bool = False,
) -> dict[str, float]:
    """Mean losses over exactly eval-iters global batches, on ranks with the loss; {} elsewhere.

    Collective: every rank runs the forward-only plan.
    """
    run = trainer.session.run
    eval_iters = run.validation.eval_iters
    num_microbatches = run.num_microbatches  # of the full batch, also while the batch ramps up
    meter = LossMeter(trainer.session.groups.dp)
    for chunk in trainer.model:
        chunk.eval()
    if verbose:
        logger.info("Evaluating on %d samples", eval_iters * run.global_batch_size)
    for index in range(eval_iters):
        if verbose:
            logger.info("Evaluating iter %d/%d", index + 1, eval_iters)
        meter.add(run_iteration(trainer, forward_step, iterators, num_microbatches, True))
        state.consumed_valid_samples += run.global_batch_size
    for chunk in trainer.model:
        chunk.train()
    return meter.means()


def evaluate_and_report(
    trainer: Trainer,
    forward_step: ForwardStep,
    iterators: StageIterators,
    state: TrainState,
    log: TrainingLog,
    prefix: str,
    *,
    verbose: bool = False,
) -> None:
    """Evaluate, and tell the result on the logging rank."""
    losses = evaluate(trainer, forward_step, iterators, state, verbose=verbose)
    log.record_validation(
        state.iteration,
        prefix=prefix,
        consumed_samples=state.consumed_train_samples,
        losses=losses,
    )


def run_iteration(
    trainer: Trainer,
    forward_step: ForwardStep,
    iterators: StageIterators,
    num_microbatches: int,
    forward_only: bool,
    validation: Validation | None = None,
) -> list[dict[str, Any]]:
    """One iteration of the plan; the micro-batches' loss dicts on the rank with the loss.

    `validation` checks the optimizer step before it.
    """
    run = trainer.session.run
    return trainer.runtime(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=trainer.model,
        num_microbatches=num_microbatches,
        seq_length=run.model.seq_length,
        micro_batch_size=run.training.micro_batch_size,
        forward_only=forward_only,
        validation=validation,
    )
