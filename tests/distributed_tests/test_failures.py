"""How runs end that do not reach their last step: all ranks, soon, and saying why."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pathlib
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.training import exit_conditions
from megatron.training.model_setup import Trainer
from tests.pretrain_runs import (
    History,
    assert_same_training,
    joined,
    pretrain_case,
    run,
    tail,
    write_documents,
)
from tests.training_runs import LLAMA
from tests.worker_pool import RankFailure

_BASE = (
    f"{LLAMA} --num-layers 2 --global-batch-size 8 --train-iters 4 --eval-iters 0 --log-interval 4"
)
_P2 = "--pipeline-model-parallel-size 2"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _foreign_token(
    data_iterator: Iterator[Any] | None, model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """In iteration 2, rank 0 meets a token that the model does not have."""
    if data_iterator is None or _rank() != 0 or model.module.stage.random.iteration != 1:
        return pretrain_gpt.forward_step(data_iterator, model)
    batch = next(data_iterator)
    batch["tokens"][1, 3] = 500
    return pretrain_gpt.forward_step(iter([batch]), model)


def _loss_is_nan(
    data_iterator: Iterator[Any] | None, model: Any, *, rank: int
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """In iteration 2 the loss of one micro-batch of a rank is not a number."""
    output, loss_function = pretrain_gpt.forward_step(data_iterator, model)
    random = model.module.stage.random
    last = model.module.stage.is_last and rank == _rank()
    if last and (random.iteration, random.microbatch) == (1, 1):
        output = output * math.nan
    return output, loss_function


def _dies_of_error(case: str, forward_step: Any, folder: pathlib.Path) -> None:
    """A rank as the launcher knows it: an error ends its process. What it said is in a file."""
    try:
        pretrain_case(case, forward_step=forward_step)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        (folder / f"{_rank()}").write_text(f"{type(error).__name__}: {error} {notes}")
    os._exit(1)


def _last_words(pool: Any, case: str, forward_step: Any, folder: pathlib.Path) -> list[str]:
    """The errors of the two ranks of a run that fails; none comes from a time limit."""
    died = pool.run(2, _dies_of_error, case, forward_step, folder, must_succeed=False)
    assert died == ["the process died"] * 2
    texts = [(folder / f"{rank}").read_text() for rank in range(2)]
    assert not any("Timed out" in text for text in texts)
    return texts


@pytest.mark.timeout(60)
def test_a_token_outside_the_vocabulary_is_named_and_ends_all_ranks(
    pool: Any, tmp_path: pathlib.Path
) -> None:
    ours, theirs = _last_words(pool, f"{_BASE} {_P2}", _foreign_token, tmp_path)
    assert ours.startswith("ValueError: token id 500 in sample 1 of the micro-batch, position 3")
    assert "[0F0]" in ours, "the instruction"
    # "closed by peer" or "reset by peer", by whether a message was under way
    assert theirs.startswith("RuntimeError: ") and re.search("Connection .* by peer", theirs)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("flags", [_P2, "--bf16"])
def test_a_loss_that_is_not_a_number_stops_the_run(
    pool: Any, tmp_path: pathlib.Path, flags: str
) -> None:
    """With replicas, one of which has it, all know."""
    forward_step = functools.partial(_loss_is_nan, rank=1)
    endings = _last_words(pool, f"{_BASE} {flags}", forward_step, tmp_path)
    message = (
        "FloatingPointError: lm loss is nan at iteration 2; the run stops so that weights are not "
        "lost (--no-check-for-nan-in-loss-and-grad goes on)"
    )
    assert endings[1].startswith(message)
    expected = "RuntimeError" if flags == _P2 else message  # the one: its neighbour is gone
    assert endings[0].startswith(expected)


@pytest.mark.timeout(60)
def test_without_the_check_the_step_is_skipped_and_counted(pool: Any) -> None:
    unchecked = "--no-check-for-nan-in-loss-and-grad"
    cases = [f"{_BASE} {unchecked}", f"{_BASE} --bf16 {unchecked}", f"{_BASE} --fp16"]
    cases[2] += " --initial-loss-scale 1024"
    for flags, world_size in ((_P2, 2), ("--use-distributed-optimizer", 2)):
        step = functools.partial(_loss_is_nan, rank=1)
        lines = [f"{case} {flags}" for case in cases]
        for history in run(pool, world_size, *lines, forward_step=step):
            assert [step.skipped for step in history.steps] == [False, True, False, False]
            assert history.weights[1] == history.weights[2] != history.weights[3]
            (counts,) = re.findall(
                r"skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|", history.output
            )
            assert counts == ("1", "1")
            (loss,) = re.findall(r"lm loss: (\S+)", history.output)
            assert math.isfinite(float(loss)), "the mean is over the steps that were taken"


class _Signal:
    """Rank 1 alone is sent SIGTERM, in the middle of iteration 2."""

    def __call__(self, _trainer: Trainer, iteration: int) -> None:
        if iteration == 2 and _rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _with_a_slow_clock(case: str) -> History:
    """On rank 1 each look at the clock is half a minute after the last."""
    ticks = itertools.count(step=30 * _rank())
    clock = mock.Mock(monotonic=lambda: float(next(ticks)))
    with mock.patch.object(exit_conditions, "time", clock):
        return pretrain_case(case)


@pytest.mark.timeout(60)
def test_every_early_exit_saves_and_ends_all_ranks_at_the_same_step(
    pool: Any, tmp_path: pathlib.Path
) -> None:
    (whole,) = run(pool, 1, f"{_BASE} --eval-interval 1 --eval-iters 1")
    case = f"{_BASE} {_P2} --save-interval 100 --save {tmp_path}"
    (signalled,) = run(pool, 2, f"{case}/signal --exit-signal-handler", before_step=_Signal())
    slow = pool.run(2, _with_a_slow_clock, f"{case}/clock --exit-duration-in-mins 1")
    (planned,) = run(pool, 2, f"{case}/plan --exit-interval 3")
    for stopped, folder, last, reason in (
        (signalled, "signal", 2, "after receiving SIGTERM."),
        (joined(slow), "clock", 3, "after "),
        (planned, "plan", 3, "at iteration 3"),
    ):
        assert stopped.exit_code is None, "the process ends with status 0"
        assert stopped.iterations == list(range(1, last + 1)), folder
        assert f"[exiting program {reason}" in stopped.output
        assert "after training is done" not in stopped.output
        (resumed,) = run(pool, 1, f"{_BASE} --load {tmp_path}/{folder}")
        assert_same_training(resumed, tail(whole, last + 1), folder)
    assert re.search(r"exiting program after \d+\.\d minutes\] datetime: ", joined(slow).output)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.timeout(60)
def test_an_exit_at_the_last_step_saves_once(pool: Any, tmp_path: pathlib.Path) -> None:
    (history,) = run(pool, 1, f"{_BASE} --save {tmp_path} --save-interval 2 --exit-interval 4")
    saved = re.findall(r"saving checkpoint at iteration +(\d+)", history.output)
    assert saved == ["2", "4"]


@pytest.mark.timeout(60)
def test_data_that_end_before_the_run_are_refused_before_it(
    pool: Any, tmp_path: pathlib.Path
) -> None:
    """Datasets without weights are read once; with weights they repeat."""
    prefixes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prefixes.append(write_documents(tmp_path / name, 12))
    first, second = prefixes
    with pytest.raises(RankFailure) as caught:
        run(pool, 1, f"{_BASE} --split 100,0,0 --data-path {first} {second}")
    assert re.search(
        r"DatasetError: the train data have \d\d samples of 16 tokens, but the run reads 32; give "
        "each dataset a weight",
        str(caught.value),
    )
    (repeated,) = run(pool, 1, f"{_BASE} --split 100,0,0 --data-path 1 {first} 1 {second}")
    assert len(repeated.steps) == 4
