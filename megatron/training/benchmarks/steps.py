"""Optimizer steps back to back on emulated devices: early, with a meeting of the ranks, or none.

A real optimizer (AdamW, gradient clipping on, with a limit that no gradient reaches) steps one
small parameter of each emulated stage. What iterations then take beyond those without a step, and
beyond the longest span of their plan, is what the step costs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, PostValidation
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.training.benchmarks.emulated import EmulatedCase, OurPipeline, RankResult, peers_of
from megatron.training.benchmarks.measure import (
    Contestant,
    measure,
    sharpen_sleep,
    sleep_overshoot_s,
    transfer_s,
)

StepKind = Literal["early", "meeting", "none"]
KINDS: tuple[StepKind, ...] = ("early", "meeting", "none")

# Without a validation from the step before, and with one: each runs a program of its own.
_WARM_UP = 2


class StepCounts(NamedTuple):
    """What became of one contestant's optimizer steps on one rank."""

    steps: int
    early: int  # changed the weights before the ranks had agreed
    rollbacks: int  # early or not, found wrong


class StepsResult(NamedTuple):
    """What one rank has measured of a case."""

    measured: RankResult
    counts: dict[str, StepCounts]  # of the contestants with a step


def contestant_name(schedule: str, kind: StepKind) -> str:
    """Of ours; torch's are named as everywhere."""
    return f"{schedule}, {kind}"


def run_case(case: EmulatedCase) -> StepsResult:
    """Measure one case; runs on each of its ranks, over the default group."""
    sharpen_sleep()
    peers = peers_of(case)
    ours: list[Contestant] = []
    trainings: dict[str, _Meeting | _Early] = {}
    for plan in case.plans:
        early, meeting, none = (contestant_name(plan.schedule, kind) for kind in KINDS)
        trainings |= {early: _Early(plan, case), meeting: _Meeting(plan, case)}
        ours += [Contestant(name, trainings[name].iterate) for name in (early, meeting)]
        ours.append(Contestant(none, OurPipeline(plan, case, trained=True)))
    overshoot = sleep_overshoot_s()
    transfer = transfer_s(case.shape, torch.float32)
    times = measure(
        [*ours, *peers.contestants],
        repeats=case.repeats,
        warm_up=_WARM_UP,
        in_a_row=case.in_a_row,
    )
    counts = {name: training.finish() for name, training in trainings.items()}
    return StepsResult(RankResult(times, overshoot, transfer, peers.plans, peers.refusals), counts)


class _Meeting:
    """Iterations whose optimizer step waits for the norm of all ranks' gradients."""

    def __init__(self, plan: Plan, case: EmulatedCase) -> None:
        self._run = OurPipeline(plan, case, trained=True)
        self._optimizer = _optimizer(self._run)
        self._steps = self._not_applied = 0

    def iterate(self) -> None:
        self._run()
        self._steps += 1
        self._not_applied += not self._optimizer.step().applied
        self._optimizer.zero_grad()

    def finish(self) -> StepCounts:
        assert self._not_applied == 0, "a step was skipped, but no gradient overflows here"
        return StepCounts(self._steps, early=0, rollbacks=0)


class _Early:
    """Iterations with post-validation; also the runtime's `Validation` of the step before."""

    def __init__(self, plan: Plan, case: EmulatedCase) -> None:
        self._run = OurPipeline(plan, case, trained=True)
        self._optimizer = _optimizer(self._run)
        pipeline = dist.group.WORLD
        assert pipeline is not None
        self._post_validation = PostValidation(self._optimizer, pipeline, None)
        self._unsettled = False
        self._steps = self._early = self._rollbacks = 0

    def iterate(self) -> None:
        self._run(self if self._unsettled else None)
        before = self._weight()
        self._post_validation.step()
        self._unsettled = True
        self._steps += 1
        self._early += self._weight() != before

    def verdict(self, received: torch.Tensor | None) -> torch.Tensor:
        return self._post_validation.verdict(received)

    def settle(self, verdict: torch.Tensor) -> bool:
        rolled_back = self._post_validation.settle(verdict).rolled_back
        self._optimizer.zero_grad()
        self._unsettled = False
        self._rollbacks += rolled_back
        return not rolled_back

    def finish(self) -> StepCounts:
        """Settle the last step. Collective."""
        self.settle(self._post_validation.verdict_now())
        return StepCounts(self._steps, self._early, self._rollbacks)

    def _weight(self) -> float:
        return self._optimizer.get_parameters()[0].item()


def _optimizer(pipeline: OurPipeline) -> MegatronOptimizer:
    config = OptimizerConfig(lr=1.0e-3, clip_grad=1.0e9)
    return MegatronOptimizer(
        config, pipeline.model, norm_group=dist.group.WORLD, data_parallel_group=None
    )
