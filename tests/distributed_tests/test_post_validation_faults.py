"""Post-validation when things go wrong: gradients that are not finite, slow ranks, many rollbacks.

Each case is compared with the same run whose ranks meet at the optimizer step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core.optimizer.post_validation import PostValidation
from megatron.core.pipeline_parallel.zerobubble.runtime.channels import Channels
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Executor
from megatron.training import optimizer_steps
from megatron.training.model_setup import Trainer
from tests.distributed_tests.test_post_validation import (
    ALWAYS,
    BASE,
    NEVER,
    OFF,
    ON,
    assert_equal_runs,
    rollbacks,
)
from tests.pretrain_runs import History, assert_same_training, joined, pretrain_cases, run

pytestmark = pytest.mark.timeout(120)

_P4 = "--pipeline-model-parallel-size 4"


class _Poison:
    """Puts a value into a gradient of one rank's first stage, behind one micro-batch's backward."""

    def __init__(self, rank: int, value: float, *, iteration: int = 3, microbatch: int = 1) -> None:
        self._rank, self._value = rank, value
        self._iteration, self._microbatch = iteration, microbatch

    def __call__(self, trainer: Trainer, iteration: int) -> None:
        if iteration != self._iteration or dist.get_rank() != self._rank:
            return
        stage: Any = next(iter(trainer.runtime._stages.values()))
        for name in ("weight_backward", "full_backward"):
            setattr(stage, name, self._poisoned(stage, name))

    def _poisoned(self, stage: StageCompute, name: str) -> Callable[..., None]:
        original = getattr(stage, name)

        def backward(microbatch: int, *arguments: Any, **options: Any) -> None:
            original(microbatch, *arguments, **options)
            if microbatch == self._microbatch:
                for each in ("weight_backward", "full_backward"):
                    stage.__dict__.pop(each, None)
                gradient: Any = next(iter(stage.module.parameters()))
                gradient.main_grad.view(-1)[0] = self._value

        return backward


@pytest.mark.parametrize(
    ("rank", "value"), [(0, math.inf), (1, math.nan), (2, -math.inf), (3, math.nan)]
)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(
    pool: Any, rank: int, value: float
) -> None:
    """On the first, a middle or the last rank, of a plain and a V placement: one step is skipped,
    counted once, the loss scale halved once, and all that comes after is unchanged."""
    fp16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1"
    kinds = (
        f"{_P4} --pipeline-schedule zb-h1 --clip-grad {NEVER}",
        f"{_P4} --pipeline-schedule zb-v --num-layers 8 --clip-grad 0 {fp16}",
    )
    base = f"{BASE} --train-iters 6"
    lines = [f"{base} {kind} {mode}" for kind in kinds for mode in (OFF, ON)]
    histories = run(pool, 4, *lines, before_step=_Poison(rank, value))
    for kind, met, early in zip(kinds, histories[::2], histories[1::2], strict=True):
        assert_same_training(early, met, kind)
        assert [step.skipped for step in early.steps] == [i == 3 for i in range(1, 7)], kind
        assert rollbacks(early) == [int(i == 3) for i in range(1, 7)], kind
        assert early.weights[2] == early.weights[3] != early.weights[4], kind
        scales = [step.loss_scale for step in early.steps]
        assert scales == ([1024.0] * 2 + [512.0] * 4 if "fp16" in kind else [1.0] * 6)
        skips = [line for line in early.output.splitlines() if "skipped iterations:   1 |" in line]
        assert len(skips) == 1 and "iteration        3/" in skips[0]


@contextlib.contextmanager
def _delays(seed: int) -> Iterator[None]:
    """Each rank sleeps now and then before instructions, messages and steps, each differently."""
    draw = random.Random(1000 * seed + dist.get_rank())

    def delayed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if draw.random() < 0.25:
                time.sleep(draw.random() * 0.008)
            return original(*arguments, **options)

        return call

    targets = [
        (Executor, "_run_step"),
        (Channels, "send"),
        (Channels, "post_receive"),
        (Channels, "start_again"),
        (PostValidation, "step"),
        (PostValidation, "settle"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, delayed(getattr(owner, name))))
        yield


def _delayed_cases(cases: Sequence[str], seeds: Sequence[int]) -> list[History]:
    histories = []
    for case, seed in zip(cases, seeds, strict=True):
        with _delays(seed):
            histories += pretrain_cases([case])
    return histories


@pytest.mark.parametrize(("schedule", "layers"), [("zb-h2", 4), ("zb-v", 8)])
def test_slow_ranks_change_nothing(pool: Any, schedule: str, layers: int) -> None:
    """Three seeds of random delays, with rollbacks and without: no hang, the same results."""
    base = f"{BASE} --train-iters 5 {_P4} --pipeline-schedule {schedule} --num-layers {layers}"
    clips, seeds = (ALWAYS, NEVER, ALWAYS), (1, 2, 3)
    met = run(pool, 4, *(f"{base} --clip-grad {clip} {OFF}" for clip in clips[:2]))
    lines = [f"{base} --clip-grad {clip} {ON} --debug-pipeline-messages" for clip in clips]
    per_rank = pool.run(4, _delayed_cases, lines, seeds, timeout_s=100)
    references = (met[0], met[1], met[0])
    for index, (clip, seed) in enumerate(zip(clips, seeds, strict=True)):
        early = joined([rank[index] for rank in per_rank])
        assert_equal_runs(early, references[index], clip, f"seed {seed}, clip {clip}")


def _soon_suspended(cases: Sequence[str], after: int, length: int) -> list[History]:
    with (
        mock.patch.object(optimizer_steps, "_SUSPEND_AFTER", after),
        mock.patch.object(optimizer_steps, "_SUSPEND_FOR", length),
    ):
        return pretrain_cases(cases)


@pytest.mark.parametrize(
    ("after", "length", "expected"),
    [(3, 100, [1, 1, 1, 0, 0, 0, 0, 0]), (2, 2, [1, 1, 0, 0, 1, 1, 0, 0])],
)
def test_steps_that_are_always_wrong_are_no_longer_taken_early(
    pool: Any, after: int, length: int, expected: list[int]
) -> None:
    """The ranks meet for a while, then try again. It is told once each time, by one rank."""
    base = f"{BASE} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --clip-grad {ALWAYS}"
    (met,) = run(pool, 2, f"{base} {OFF}")
    per_rank = pool.run(2, partial(_soon_suspended, after=after, length=length), [f"{base} {ON}"])
    early = joined([rank[0] for rank in per_rank])
    assert_same_training(early, met)
    assert rollbacks(early) == expected
    times = sum(a > b for a, b in itertools.pairwise(expected))
    assert early.output.count(f"the steps of {after} iterations up to ") == times
