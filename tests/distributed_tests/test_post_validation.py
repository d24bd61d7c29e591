"""Optimizer post-validation: the same training as with ranks that meet, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import GPT, LLAMA

pytestmark = pytest.mark.timeout(120)

ON, OFF = "--enable-optimizer-post-validation", "--disable-optimizer-post-validation"
BASE = f"{LLAMA} --train-iters 8 --eval-iters 0 --log-interval 1 --global-batch-size 8"
ALWAYS, NEVER = 0.01, 1.0e9
_FP16 = "--fp16 --loss-scale-window 2 --hysteresis 1 --initial-loss-scale"
# The scale overflows at the start, and grows in the run, again and again up to an overflow.
_OVERFLOWS, _GROWS = f"{_FP16} 4194304", f"{_FP16} 1024"


def rollbacks(history: History) -> list[int | None]:
    return [step.optimizer_rollbacks for step in history.steps]


def implied(met: History, clip: float) -> list[int]:
    """What must be rolled back: clipped and skipped steps, but not the last, for which ranks meet.

    `met` is the run whose ranks always meet.
    """
    wrong = [
        int(step.skipped or (clip > 0 and clip / ((step.grad_norm or 0.0) + 1.0e-6) < 1.0))
        for step in met.steps
    ]
    return [*wrong[:-1], 0]


def assert_equal_runs(early: History, met: History, clip: float, label: str) -> None:
    assert_same_training(early, met, label)
    assert rollbacks(early) == implied(met, clip), label
    assert rollbacks(met) == [None] * len(met.steps), label


def _middle(history: History) -> float:
    """A clip value that some steps of this run exceed and some do not."""
    norms = sorted(step.grad_norm for step in history.steps if step.grad_norm is not None)
    return (norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2


def _compare(pool: Any, world_size: int, base: str, schedules: list[str]) -> list[int]:
    """Clipped always, in some steps and never, and no clipping: each schedule and the first
    schedule's own run with ranks that meet, which all others equal too. Counts per clip value."""
    one = f"{base} --pipeline-schedule {schedules[0]}"
    (free,) = run(pool, world_size, f"{one} --clip-grad {NEVER} {OFF}")
    counts = []
    for clip in (ALWAYS, _middle(free), NEVER):
        lines = [f"{base} --pipeline-schedule {s} --clip-grad {clip} {ON}" for s in schedules]
        met, *early = run(pool, world_size, f"{one} --clip-grad {clip} {OFF}", *lines)
        for schedule, history in zip(schedules, early, strict=True):
            assert_equal_runs(history, met, clip, f"{base} {schedule}, clip {clip}")
        counts.append(sum(implied(met, clip)))
    return counts


@pytest.mark.parametrize("clip", ["always", "some", "never"])
def test_every_schedule_equals_the_synchronous_step(pool: Any, clip: str) -> None:
    """p = 2, fp32, tied: losses, norms, weights after each step and moments."""
    base = f"{BASE} --pipeline-model-parallel-size 2"
    one = f"{base} --pipeline-schedule zb-h1"
    (free,) = run(pool, 2, f"{one} --clip-grad {NEVER} {OFF}")
    value = {"always": ALWAYS, "some": _middle(free), "never": NEVER}[clip]
    schedules = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half"]
    lines = [f"{base} --pipeline-schedule {s} --clip-grad {value} {ON}" for s in schedules]
    met, *early = run(pool, 2, f"{one} --clip-grad {value} {OFF}", *lines)
    for schedule, history in zip(schedules, early, strict=True):
        assert_equal_runs(history, met, value, f"{schedule}, clip {clip}")
    count = sum(implied(met, value))
    assert {"always": count == 7, "some": 0 < count < 7, "never": count == 0}[clip]


# world size, flags: between them every kind of run, with a clip value some steps exceed
_P2, _P4 = (f"--pipeline-model-parallel-size {p} --pipeline-schedule" for p in (2, 4))
_KINDS = {
    "bf16, untied, tokens": (
        2,
        f"{_P2} zb-h2 --bf16 --untie-embeddings-and-output-weights --calculate-per-token-loss",
    ),
    "fp16 that overflows first": (2, f"{_P2} zb-v {_OVERFLOWS} --debug-pipeline-messages"),
    "fp16 that grows, tokens": (2, f"{_P2} 1f1b {_GROWS} --calculate-per-token-loss"),
    "no clipping": (2, f"{_P2} zb-h1 {_OVERFLOWS} --clip-grad 0"),
    "p4": (4, f"{_P4} zb-h1 --debug-pipeline-messages"),
    "p4 V": (4, f"{_P4} v-half --num-layers 8 --bf16"),
    "replicas": (4, f"{_P2} zb-h1 --overlap-grad-reduce --calculate-per-token-loss"),
    "sharded": (4, f"{_P2} zb-v --bf16 --use-distributed-optimizer --overlap-grad-reduce"),
    "sharded fp16": (4, f"{_P2} zb-h2 {_OVERFLOWS} --use-distributed-optimizer"),
}
_SOME = 1.15


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_kind_of_run_equals_the_synchronous_step(pool: Any, world_size: int) -> None:
    kinds = {name: flags for name, (size, flags) in _KINDS.items() if size == world_size}
    base = f"{BASE} --clip-grad {_SOME}"
    lines = [f"{base} {flags} {mode}" for flags in kinds.values() for mode in (OFF, ON)]
    histories = run(pool, world_size, *lines)
    for name, met, early in zip(kinds, histories[::2], histories[1::2], strict=True):
        clip = 0.0 if name == "no clipping" else _SOME
        assert_equal_runs(early, met, clip, name)
        assert 0 < sum(implied(met, clip)) < 7, name
        scales = [step.loss_scale or 0.0 for step in met.steps]
        if "fp16" in kinds[name]:
            assert met.steps[0].skipped == (_OVERFLOWS in kinds[name]), name
            assert any(a < b for a, b in itertools.pairwise(scales)), f"{name}: {scales}"


_PRECISIONS = ("", "--bf16", _OVERFLOWS, _GROWS)
_REPLICAS = (
    (1, ""),
    (2, ""),
    (2, "--overlap-grad-reduce"),
    (2, "--use-distributed-optimizer"),
    (2, "--use-distributed-optimizer --overlap-grad-reduce"),
)


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("dp", "replicas"), _REPLICAS)
@pytest.mark.parametrize("precision", _PRECISIONS)
@pytest.mark.parametrize("tokens", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("tied", ["", "--untie-embeddings-and-output-weights"])
def test_the_full_product(
    pool: Any, pp: int, dp: int, replicas: str, precision: str, tokens: str, tied: str
) -> None:
    base = f"{BASE} --num-layers 8 --global-batch-size 16 --pipeline-model-parallel-size {pp}"
    base += f" {replicas} {precision} {tokens} {tied} --debug-pipeline-messages"
    counts = _compare(pool, pp * dp, base, [name for name in SCHEDULES if name != "none"])
    overflows = counts[2]
    assert counts[0] == 7 and overflows < counts[1] < 7 and (overflows == 0 or "--fp16" in base)


def test_a_gpt_with_dropout_repeats_its_forwards_exactly(pool: Any) -> None:
    """Forwards that run again draw what they drew before: dropout depends on no earlier draw."""
    base = f"{GPT} --train-iters 5 --eval-iters 0 --global-batch-size 8 --clip-grad {ALWAYS}"
    base += f" {_P2} zb-h1 --attention-dropout 0.1 --hidden-dropout 0.1"
    met, early = run(pool, 2, f"{base} {OFF}", f"{base} {ON}")
    assert_equal_runs(early, met, ALWAYS, "dropout")
    assert sum(implied(met, ALWAYS)) == 4
