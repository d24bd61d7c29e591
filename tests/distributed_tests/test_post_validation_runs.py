"""Post-validation around saves, evaluations and exits, and what a run tells of it."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.validation import add_validation
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import (
    first_difference,
    load_trace,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.training import exit_conditions
from megatron.training.arguments import read_run
from megatron.training.config import ConfigError
from megatron.training.model_setup import Trainer
from tests.distributed_tests.test_post_validation import (
    ALWAYS,
    BASE,
    NEVER,
    OFF,
    ON,
    assert_equal_runs,
    implied,
    rollbacks,
)
from tests.pretrain_runs import (
    History,
    assert_same_training,
    joined,
    pretrain_cases,
    run,
    tail,
)
from tests.training_runs import LLAMA

pytestmark = pytest.mark.timeout(120)

_P2 = "--pipeline-model-parallel-size 2"
# Every norm exceeds this, but that of the first rank alone often does not: it steps, wrongly.
_CLIPPED = f"{BASE} {_P2} --pipeline-schedule zb-h1 --clip-grad 0.8"


@pytest.mark.parametrize(
    "flags", ["", "--bf16 --use-distributed-optimizer", "--fp16 --initial-loss-scale 4194304"]
)
def test_saves_hold_settled_weights(pool: Any, tmp_path: pathlib.Path, flags: str) -> None:
    """Every step would be rolled back, also those before the saves: a resume from each is the run
    that never stopped and never stepped early."""
    base = f"{_CLIPPED} --train-iters 6 {flags}"
    saving = f"{base} --save {tmp_path}/early --save-interval 2 {ON}"
    resumed = [f"{base} --load {tmp_path}/early --ckpt-step {step} {ON}" for step in (2, 4)]
    met, early, *again = run(pool, 2, f"{base} {OFF}", saving, *resumed)
    assert_same_training(early, met)
    expected = [0 if step.iteration % 2 == 0 else 1 for step in early.steps]
    assert rollbacks(early) == expected, "ranks meet for the step before a save"
    for first, history in zip((3, 5), again, strict=True):
        assert_same_training(history, tail(met, first), f"resumed at {first}")


class _Signal:
    """Rank 1 alone is told to stop in iteration 4."""

    def __call__(self, trainer: Trainer, iteration: int) -> None:
        if iteration == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _with_a_slow_clock(cases: Sequence[str]) -> list[History]:
    """On rank 1 each look at the clock is half a minute after the last."""
    ticks = itertools.count(step=30 * dist.get_rank())
    clock = mock.Mock(monotonic=lambda: float(next(ticks)))
    with mock.patch.object(exit_conditions, "time", clock):
        return pretrain_cases(cases)


@pytest.mark.parametrize("by", ["signal", "clock"])
def test_an_exit_settles_a_wrong_step_before_the_save(
    pool: Any, tmp_path: pathlib.Path, by: str
) -> None:
    """Nobody knew that an exit would follow, so the step was taken early, and it was wrong."""
    base = f"{_CLIPPED} --train-iters 6"
    saving = f"{base} --save {tmp_path} --save-interval 100 {ON}"
    if by == "signal":
        (stopped,) = run(pool, 2, f"{saving} --exit-signal-handler", before_step=_Signal())
    else:
        per_rank = pool.run(2, _with_a_slow_clock, [f"{saving} --exit-duration-in-mins 1"])
        stopped = joined([rank[0] for rank in per_rank])
    assert "[exiting program after" in stopped.output
    last = stopped.iterations[-1]
    assert last == {"signal": 4, "clock": 3}[by]
    assert rollbacks(stopped) == [1] * last
    met, resumed = run(pool, 2, f"{base} {OFF}", f"{base} --load {tmp_path} {ON}")
    assert stopped.weights == met.weights[: last + 1]
    assert_same_training(resumed, tail(met, last + 1))


def test_evaluation_sees_settled_weights(pool: Any) -> None:
    base = f"{_CLIPPED} --eval-interval 3 --eval-iters 2"
    met, early = run(pool, 2, f"{base} {OFF}", f"{base} {ON}")
    assert_same_training(early, met)
    assert rollbacks(early) == [1, 1, 0, 1, 1, 0, 1, 0]
    assert early.evaluations == met.evaluations and len(met.evaluations) >= 3
    assert early.samples == met.samples, "replayed forwards read no further data"


def test_a_change_of_the_batch_size(pool: Any, tmp_path: pathlib.Path) -> None:
    """The step before it is settled first, and saved."""
    case = f"{LLAMA} {_P2} --pipeline-schedule zb-v --clip-grad {ALWAYS} --eval-iters 0"
    case = case.replace("--train-iters 5", "")
    case = case.replace("--lr-warmup-iters 2", "--lr-warmup-samples 8")
    case += " --rampup-batch-size 4 4 16 --train-samples 40 --global-batch-size 8"
    met, early = run(pool, 2, f"{case} {OFF}", f"{case} --save {tmp_path} --save-interval 100 {ON}")
    assert_equal_runs(early, met, ALWAYS, "ramp-up")
    assert [step.global_batch_size for step in met.steps] == [4, 4, 4, 4, 8, 8, 8]
    (resumed,) = run(pool, 2, f"{case} --load {tmp_path} --ckpt-step 4 {ON}")
    assert_same_training(resumed, tail(met, 5), "resumed at the change")


def test_log_and_metrics_count_rollbacks(pool: Any, tmp_path: pathlib.Path) -> None:
    """Two iterations to a log line; the metrics file has each step."""
    metrics = tmp_path / "metrics.jsonl"
    case = f"{_CLIPPED} --log-interval 2 --metrics-file {metrics}"
    (early,) = run(pool, 2, f"{case} {ON}")
    assert re.findall(r"\| optimizer rollback: (\S+) \|", early.output) == ["2.0"] * 3 + ["1.0"]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    assert [step["optimizer_rollbacks"] for step in steps] == [1] * 7 + [0]
    assert [step["iteration"] for step in steps] == list(range(1, 9))
    assert [step["grad_norm"].hex() for step in steps] == early.norms


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_the_trace_shows_checks_and_void_forwards(
    pool: Any, tmp_path: pathlib.Path, schedule: str
) -> None:
    """After a rollback, what ran up to the PV is there twice, once marked void; otherwise once."""
    files = {clip: tmp_path / f"{clip}.json" for clip in (ALWAYS, NEVER)}
    base = f"{BASE} --train-iters 4 {_P2} --pipeline-schedule {schedule}"
    run(pool, 2, *(f"{base} --clip-grad {c} --trace-pipeline {f} {ON}" for c, f in files.items()))
    plan = plan_schedule(schedule, PlanRequest(num_ranks=2, num_microbatches=4))
    checked = add_validation(plan)
    for clip, file in files.items():
        raw = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
        for iteration in (1, 2, 3, 4):
            ours = [e for e in raw if e["args"]["iteration"] == iteration]
            void = {(e["pid"], e["name"]) for e in ours if e["args"].get("void")}
            expected = set()
            checks = [e["name"] for e in ours if e["args"]["op"] == "PV"]
            if iteration > 1:
                assert len(checks) == 2, "one on each rank"
                if clip == ALWAYS:
                    expected = _before_checks(checked)
            else:
                assert not checks, "there was no step before"
            assert void == expected
            assert first_difference(plan, load_trace(file, iteration)) is None
    assert _before_checks(checked), "there was something to run again"


def _before_checks(plan: Any) -> set[tuple[int, str]]:
    found = set()
    for rank, program in enumerate(plan.programs):
        (check,) = (step for step, i in enumerate(program) if i.op is Op.PV)
        found |= {(rank, str(instruction)) for instruction in program[:check]}
    return found


_BANNER = re.compile(r"optimizer post-validation: (on|off) \(([^)]*)\)")


@pytest.mark.parametrize(
    ("flags", "state", "why"),
    [
        ("--pipeline-schedule zb-h1", "on", "the schedule splits the backward"),
        (f"--pipeline-schedule 1f1b {ON}", "on", ON),
        ("--pipeline-schedule 1f1b", "off", "by default only with a schedule that splits"),
        (f"--pipeline-schedule zb-h1 {OFF}", "off", OFF),
        ("--pipeline-schedule zb-h1 --log-num-zeros-in-grad", "off", "--log-num-zeros-in-grad"),
        ("--pipeline-schedule zb-h1 --log-params-norm", "off", "--log-params-norm"),
    ],
)
def test_the_banner_says_whether_and_why(pool: Any, flags: str, state: str, why: str) -> None:
    case = f"{BASE} --train-iters 3 {_P2} --clip-grad {ALWAYS} {flags}"
    (history,) = run(pool, 2, case)
    ((found, reason),) = _BANNER.findall(history.output)
    assert found == state and why in reason
    assert rollbacks(history) == ([1, 1, 0] if state == "on" else [None] * 3)
    assert ("optimizer rollback" in history.output) == (state == "on")
    assert ("12 bytes per parameter it steps" in history.output) == (state == "on")


def test_is_off_with_a_single_pipeline_rank(pool: Any) -> None:
    (history,) = run(pool, 1, f"{BASE} --train-iters 3 --clip-grad {ALWAYS} {ON}")
    assert rollbacks(history) == [None] * 3
    assert implied(history, ALWAYS) == [1, 1, 0]
    assert _BANNER.findall(history.output) == [
        ("off", "a single pipeline rank has nobody to wait for")
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{ON} --log-num-zeros-in-grad", f"{ON} excludes --log-num-zeros-in-grad"),
        (f"{ON} --log-params-norm", f"{ON} excludes --log-params-norm"),
        (f"{ON} {OFF}", OFF),
    ],
)
def test_flags_that_exclude_it_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(f"{BASE} {_P2} --pipeline-schedule zb-h1 {flags}".split(), world_size=2)
    (message,) = caught.value.messages
    assert words in message
