"""Evaluation changes nothing in training; it and the log line tell the same on every layout."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import GPT, LLAMA

_P2 = "--pipeline-model-parallel-size 2"
_P4 = "--pipeline-model-parallel-size 4"
_LAYOUTS = [
    (1, ""),
    (2, _P2),
    (2, f"{_P2} --pipeline-schedule zb-h1"),
    (2, f"{_P2} --pipeline-schedule dualpipe-v"),
    (4, _P4),
]
_TRAINING = f"{LLAMA} --global-batch-size 8 --train-iters 4"
# Before step 1, after every step, and twice at the end.
_EVALUATING = f"{_TRAINING} --eval-at-start --eval-interval 1 --eval-iters 2"


@pytest.fixture(scope="module")
def evaluated(pool: Any) -> History:
    return run(pool, 1, _EVALUATING)[0]


@pytest.mark.timeout(120)
def test_training_is_bit_identical_with_and_without_evaluation(
    pool: Any, evaluated: History
) -> None:
    (plain,) = run(pool, 1, f"{_TRAINING} --eval-iters 0")
    assert plain.evaluations == [] and plain.samples["valid"] == []
    assert len(evaluated.evaluations) == 1 + 4 + 2
    assert_same_training(evaluated, plain)
    sharded = "--bf16 --use-distributed-optimizer"
    with_evaluation, without = run(
        pool, 2, f"{_EVALUATING} {sharded}", f"{_TRAINING} --eval-iters 0 {sharded}"
    )
    assert_same_training(with_evaluation, without)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("p", [2, 4])
def test_every_schedule_evaluates_to_the_loss_of_one_process(
    pool: Any, evaluated: History, p: int
) -> None:
    """And no rank stays behind: every rank runs the forward-only plan (or this times out)."""
    size = f"--pipeline-model-parallel-size {p} --allow-padding-num-layers"
    named = [s for s in SCHEDULES if p == 2 or SCHEDULES[s].placement == "plain"]  # 4 layers
    histories = run(pool, p, *(f"{_EVALUATING} {size} --pipeline-schedule {s}" for s in named))
    for schedule, ours in zip(named, histories, strict=True):
        assert ours.evaluations == evaluated.evaluations, schedule
        assert_same_training(ours, evaluated, schedule)
        if SCHEDULES[schedule].placement != "v":  # there one rank reads for both ends
            assert ours.samples == evaluated.samples, schedule
        assert _blocks(ours) == _blocks(evaluated), schedule


def _blocks(history: History) -> list[tuple[str, str]]:
    """(prefix, loss) of every validation block that any rank printed."""
    pattern = r"^-+\n validation loss at (.*?) \| lm loss value: (\S+) \| lm loss PPL: \S+ \| \n-+$"
    return re.findall(pattern, history.output, flags=re.MULTILINE)


def test_each_block_says_where_it_was_measured(evaluated: History) -> None:
    prefixes = [prefix for prefix, _ in _blocks(evaluated)]
    inside = [f"iteration {iteration}" for iteration in range(5)]
    assert prefixes == [*inside, "iteration 4 on validation set", "iteration 4 on test set"]
    losses = [float.fromhex(losses["lm loss"]) for losses in evaluated.evaluations]
    assert [f"{loss:.6E}" for loss in losses] == [loss for _, loss in _blocks(evaluated)]
    assert len(set(losses)) == len(losses), "each on its own samples and weights"


def test_an_evaluation_reads_eval_iters_global_batches(evaluated: History) -> None:
    """2 batches of 8, each evaluation behind the one before; training reads its own samples."""
    assert evaluated.samples["valid"] == list(range(6 * 2 * 8))
    assert evaluated.samples["test"] == list(range(2 * 8))
    assert evaluated.samples["train"] == list(range(4 * 8))
    assert evaluated.output.count("Evaluating on 16 samples") == 2


@pytest.mark.timeout(60)
def test_dropout_is_off(pool: Any) -> None:
    case = f"{LLAMA} --global-batch-size 8 --train-iters 3 --eval-at-start --eval-iters 1"
    dropped, kept = run(pool, 1, case, f"{case} --attention-dropout 0 --hidden-dropout 0")
    assert dropped.evaluations[0] == kept.evaluations[0]
    assert dropped.losses[0] != kept.losses[0]


@pytest.mark.timeout(60)
def test_a_resumed_run_evaluates_on_the_samples_that_follow(
    pool: Any, tmp_path: pathlib.Path
) -> None:
    """Also when the run stops at an iteration after which an evaluation is due."""
    case = f"{_TRAINING} --eval-interval 2 --eval-iters 2"
    whole, stopped, resumed = run(
        pool,
        1,
        case,
        f"{case} --save {tmp_path} --save-interval 2 --exit-interval 2",
        f"{case} --load {tmp_path}",
    )
    assert stopped.samples["valid"] == list(range(16))
    assert stopped.samples["valid"] + resumed.samples["valid"] == whole.samples["valid"]
    assert stopped.evaluations + resumed.evaluations == whole.evaluations


@pytest.mark.timeout(60)
def test_a_ramp_of_the_batch_size_does_not_change_evaluation(pool: Any) -> None:
    case = LLAMA.replace("--train-iters 5", "").replace("--lr-warmup-iters 2", "")
    case += "--global-batch-size 8 --rampup-batch-size 4 4 16 --train-samples 24"
    (history,) = run(pool, 1, f"{case} --eval-interval 2 --eval-iters 1")
    assert [step.global_batch_size for step in history.steps] == [4, 4, 4, 4, 8]
    assert history.samples["valid"] == list(range(3 * 8))


@pytest.mark.timeout(60)
def test_skip_train_evaluates_what_was_saved(pool: Any, tmp_path: pathlib.Path) -> None:
    case = f"{_TRAINING} --eval-iters 2"
    (trained,) = run(pool, 1, f"{case} --save {tmp_path} --save-interval 4")
    only_evaluating = f"{case} --load {tmp_path} --skip-train"
    lengthless = only_evaluating.replace("--lr-warmup-iters 2", "")
    lengthless = lengthless.replace("--train-iters 5", "").replace("--train-iters 4", "")
    shorter = f"{only_evaluating} --train-iters 3"
    singles = run(pool, 1, only_evaluating, lengthless, shorter)
    (piped,) = run(pool, 2, f"{only_evaluating} {_P2}")
    for only in (*singles, piped):
        assert only.steps == []
        assert only.evaluations == trained.evaluations
        assert "skipping training (--skip-train is on) ..." in only.output
        assert _blocks(only) == _blocks(trained)


_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(?P<iteration>\d+)/ +(?P<total>\d+) \|"
    r" consumed samples: +(?P<samples>\d+) \|"
    r" elapsed time per iteration \(ms\): \d+\.\d \|"
    r" learning rate: (?P<rate>\d\.\d{6}E[+-]\d\d) \|"
    r" global batch size: +(?P<batch>\d+) \|"
    r" lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \|"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r" grad norm: (?P<norm>\d+\.\d{3}) \|"
    r"(?: optimizer rollback: \d+\.\d \|)?"  # where post-validation is on
    r" number of skipped iterations: +(?P<skipped>\d+) \|"
    r" number of nan iterations: +(?P<nan>\d+) \|"
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "flags"), [*_LAYOUTS, (4, f"{_P2} --pipeline-schedule dualpipe-v")]
)
def test_one_line_an_interval_whatever_the_layout(pool: Any, world_size: int, flags: str) -> None:
    """Printed by one rank, the one that has the loss; means over the interval's steps."""
    case = f"{GPT} --global-batch-size 8 --train-iters 6 --log-interval 2 --eval-iters 0 {flags}"
    (history,) = run(pool, world_size, case)
    lines = [line for line in history.output.splitlines() if " iteration " in line and "/" in line]
    assert len(lines) == 3
    for index, line in enumerate(lines):
        found = _LINE.fullmatch(line)
        assert found is not None, line
        steps = history.steps[2 * index : 2 * index + 2]
        last = steps[-1]
        mean = sum(step.losses["lm loss"] for step in steps) / 2
        expected = {
            "iteration": str(last.iteration),
            "total": "6",
            "samples": str(8 * last.iteration),
            "rate": f"{last.learning_rate:.6E}",
            "batch": "8",
            "loss": f"{mean:.6E}",
            "scale": "1.0",
            "norm": f"{last.grad_norm:.3f}",
            "skipped": "0",
            "nan": "0",
        }
        assert found.groupdict() == expected
