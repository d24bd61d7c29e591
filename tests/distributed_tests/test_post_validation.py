"""Optimizer post-validation: the same training as with ranks that meet, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import LLAMA

pytestmark = pytest.mark.timeout(120)

_ON, _OFF = "--enable-optimizer-post-validation", "--disable-optimizer-post-validation"
_STEPS = "--train-iters 8 --eval-iters 0 --log-interval 1 --global-batch-size 16"
_ALWAYS, _NEVER = 0.01, 1.0e9


def _rollbacks(history: History) -> list[int | None]:
    return [step.optimizer_rollbacks for step in history.steps]


def _clipped(history: History, clip: float) -> list[int]:
    """Which steps are clipped; the last is not taken early, so it is never rolled back."""
    norms = [float.fromhex(norm) for norm in history.norms]
    return [int(clip / (norm + 1.0e-6) < 1.0) for norm in norms[:-1]] + [0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half"])
def test_equals_the_synchronous_step(pool: Any, schedule: str) -> None:
    """Every step rolled back, none, and some: losses, norms, weights and moments are equal."""
    base = f"{LLAMA} {_STEPS} --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    some = _middle_norm(pool, base)
    clips = (_ALWAYS, some, _NEVER)
    cases = [f"{base} --clip-grad {clip} {mode}" for clip in clips for mode in (_OFF, _ON)]
    histories = run(pool, 2, *cases)
    for clip, met, early in zip(clips, histories[::2], histories[1::2], strict=True):
        assert_same_training(early, met, f"{schedule}, clip {clip}")
        assert _rollbacks(early) == _clipped(met, clip)
        assert _rollbacks(met) == [None] * 8
    counts = [sum(x or 0 for x in _rollbacks(early)) for early in histories[1::2]]
    assert counts[0] == 7 and 0 < counts[1] < 7 and counts[2] == 0


def _middle_norm(pool: Any, case: str) -> float:
    """A clip value that some steps of this run exceed and some do not."""
    (history,) = run(pool, 2, f"{case} --clip-grad {_NEVER} {_OFF}")
    norms = sorted(float.fromhex(norm) for norm in history.norms)
    return (norms[3] + norms[4]) / 2
