"""The optimizer step behind each iteration, and its report: at once, or early and settled later.

With post-validation (arXiv:2401.10241, section 4) ranks do not meet at the step: it is settled in
the next iteration's warm-up, and only then is all of it known: gradient norm, learning rate, loss
scale. So its report is told then. Where the next thing is no iteration (evaluation, a save, the
end), ranks meet anyway and the step is taken at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron.core.optimizer import PostValidation, StepResult
from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Executed
from megatron.training.model_setup import Trainer
from megatron.training.step_report import StepReport

logger = logging.getLogger(__name__)

Tell = Callable[[StepReport, list[Executed]], None]

_SUSPEND_AFTER = 10  # rollbacks in a row
_SUSPEND_FOR = 100  # steps


@dataclass(frozen=True)
class _Unsettled:
    """A step taken early: what is known of it, and what ran in its iteration."""

    report: StepReport
    executed: list[Executed]


class OptimizerSteps:
    """Steps the optimizer and the learning rate; tells of each step once it is settled.

    Also the runtime's `Validation` of the step before. All ranks take the same decisions.
    """

    def __init__(self, trainer: Trainer, tell: Tell = lambda report, executed: None) -> None:
        self._trainer, self._tell = trainer, tell
        self._early: PostValidation | None = trainer.post_validation
        self._unsettled: _Unsettled | None = None
        self._rollbacks_in_a_row = 0
        self._suspended_for = 0

    @property
    def validation(self) -> OptimizerSteps | None:
        """What the next iteration has to validate."""
        return self if self._unsettled is not None else None

    def step(self, report: StepReport, executed: list[Executed], *, meet: bool) -> StepReport:
        """The step behind an iteration, and its report as far as it is known. `meet`: at once,
        whatever the mode."""
        start = time.perf_counter()
        if self._early is None or meet or self._suspended_for > 0:
            self._suspended_for = max(0, self._suspended_for - 1)
            result = self._trainer.optimizer.step()
            report = _timed(report, time.perf_counter() - start)
            return self._conclude(report, executed, result)
        self._early.step()
        report = _timed(report, time.perf_counter() - start)
        self._unsettled = _Unsettled(report, executed)
        return report

    def settle_now(self) -> None:
        """Settle a step taken early, outside of an iteration. Collective over the pipeline."""
        if self._unsettled is not None:
            assert self._early is not None
            self.settle(self._early.verdict_now())

    def verdict(self, received: torch.Tensor | None) -> torch.Tensor:
        assert self._early is not None
        return self._early.verdict(received)

    def settle(self, verdict: torch.Tensor) -> bool:
        """Put the early step right if it was wrong; whether it was right. Gradients are zero then,
        ready for the iteration that has begun."""
        assert self._early is not None and self._unsettled is not None
        result = self._early.settle(verdict)
        self._trainer.optimizer.zero_grad()
        unsettled, self._unsettled = self._unsettled, None
        self._count(unsettled.report.iteration, result)
        self._conclude(unsettled.report, unsettled.executed, result)
        return not result.rolled_back

    def _conclude(
        self, report: StepReport, executed: list[Executed], result: StepResult
    ) -> StepReport:
        trainer = self._trainer
        if result.applied:
            trainer.scheduler.step(report.global_batch_size)
        settled = replace(
            report,
            learning_rate=_learning_rate(trainer, decoupled=False),
            decoupled_learning_rate=_learning_rate(trainer, decoupled=True),
            loss_scale=trainer.optimizer.get_loss_scale(),
            grad_norm=result.grad_norm if result.applied else None,
            num_zeros=result.num_zeros,
            params_norm=_params_norm(trainer),
            skipped=not result.applied,
            optimizer_rollbacks=None if self._early is None else int(result.rolled_back),
        )
        self._tell(settled, executed)
        return settled

    def _count(self, iteration: int, result: StepResult) -> None:
        """Stop to step early for a while if it is always wrong: the warm-up is run twice then."""
        self._rollbacks_in_a_row = self._rollbacks_in_a_row + 1 if result.rolled_back else 0
        if self._rollbacks_in_a_row >= _SUSPEND_AFTER:
            self._rollbacks_in_a_row, self._suspended_for = 0, _SUSPEND_FOR
            if not self._trainer.session.is_first_rank:  # all ranks know the same
                return
            logger.warning(
                "optimizer post-validation: the steps of %d iterations up to %d were rolled back, "
                "as gradients were clipped or not finite; ranks meet at the step for the next %d "
                "iterations (a larger --clip-grad avoids rollbacks)",
                _SUSPEND_AFTER,
                iteration,
                _SUSPEND_FOR,
            )


def _timed(report: StepReport, optimizer_s: float) -> StepReport:
    return replace(report, timings_ms={**report.timings_ms, "optimizer": 1e3 * optimizer_s})


def _learning_rate(trainer: Trainer, *, decoupled: bool) -> float | None:
    for group in trainer.optimizer.param_groups:
        if bool(group.get("is_decoupled_lr")) == decoupled:
            return group["lr"]
    return None if decoupled else trainer.scheduler.get_lr({})


def _params_norm(trainer: Trainer) -> float | None:
    if not trainer.session.run.logging.log_params_norm:
        return None
    return trainer.optimizer.params_norm()
