"""A run that stops and resumes is the run that never stopped, to the last bit."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from tests.pretrain_runs import (
    History,
    assert_same_training,
    joined,
    pretrain_case,
    pretrain_cases,
    run,
    tail,
    write_documents,
)
from tests.training_runs import GPT, LLAMA

_BASE = f"{LLAMA} --num-layers 2 --global-batch-size 8 --train-iters 6 --save-interval 3"
# Overflows at first, then grows every second clean step; the stop lies between the two.
_FP16 = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2"

_CASES = {
    "fp32": _BASE,
    "gpt, untied": (
        f"{GPT} --untie-embeddings-and-output-weights --global-batch-size 8 --train-iters 6 "
        "--num-layers 2 --save-interval 3 --lr-decay-style cosine --min-lr 1e-3"
    ),
    "bf16": f"{_BASE} --bf16",
    "fp16": f"{_BASE} {_FP16}",
    "sgd": f"{_BASE} --optimizer sgd",
    "cyclic": f"{_BASE} --dataloader-type cyclic",
}


def _stopped_and_resumed(case: str, folder: pathlib.Path) -> tuple[str, str]:
    """Command lines of the run that stops after step 3, and of the one that goes on."""
    return f"{case} --save {folder} --exit-interval 3", f"{case} --load {folder}"


def _whole_stopped_resumed(
    pool: Any, world_size: int, cases: dict[str, str], folder: pathlib.Path
) -> dict[str, tuple[History, History, History]]:
    lines: list[str] = []
    for index, case in enumerate(cases.values()):
        lines += [case, *_stopped_and_resumed(case, folder / f"{index}")]
    histories = run(pool, world_size, *lines)
    return {
        label: (histories[3 * index], histories[3 * index + 1], histories[3 * index + 2])
        for index, label in enumerate(cases)
    }


def _assert_resumed(
    whole: History, stopped: History, resumed: History, label: str, *, after: int = 3
) -> None:
    last = whole.iterations[-1]
    assert stopped.iterations == list(range(1, after + 1)), label
    assert resumed.iterations == list(range(after + 1, last + 1)), label
    assert_same_training(resumed, tail(whole, after + 1), label)
    for split in ("train", "valid", "test"):
        read = stopped.samples[split] + resumed.samples[split]
        assert read == whole.samples[split], f"{label}: {split} samples"


@pytest.mark.timeout(120)
def test_one_process(pool: Any, tmp_path: pathlib.Path) -> None:
    runs = _whole_stopped_resumed(pool, 1, _CASES, tmp_path)
    for label, histories in runs.items():
        _assert_resumed(*histories, label)
    whole = runs["fp16"][0]
    scales = [step.loss_scale for step in whole.steps]
    assert whole.steps[0].skipped and not whole.steps[-1].skipped, "an overflow, then steps"
    assert runs["fp16"][1].scaler["growth_tracker"] == 1, "half a window lies before the stop"
    assert scales[2] < scales[3], "and the other half behind it"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-distributed-optimizer --bf16"),
        (4, f"--pipeline-model-parallel-size 2 --use-distributed-optimizer {_FP16}"),
    ],
)
def test_several_ranks(pool: Any, tmp_path: pathlib.Path, world_size: int, flags: str) -> None:
    runs = _whole_stopped_resumed(pool, world_size, {flags: f"{_BASE} {flags}"}, tmp_path)
    _assert_resumed(*runs[flags], flags)


@pytest.mark.timeout(60)
def test_across_an_epoch_boundary_of_the_data(pool: Any, tmp_path: pathlib.Path) -> None:
    """About 27 samples in an epoch: the boundary lies in step 4, the stop after step 3."""
    prefix = write_documents(tmp_path, 45)
    case = f"{_BASE} --data-path {prefix} --split 100,0,0 --eval-iters 0"
    cases = {"single": case, "cyclic": f"{case} --dataloader-type cyclic"}
    runs = _whole_stopped_resumed(pool, 1, cases, tmp_path)
    for label, histories in runs.items():
        _assert_resumed(*histories, label)
    assert runs["single"][0].samples["train"] == list(range(48))
    num_tokens = (tmp_path / "documents.bin").stat().st_size // 2
    assert 3 * 8 < num_tokens // 16 < 4 * 8, "the data hold between 3 and 4 batches"


@pytest.mark.timeout(60)
def test_with_a_ramp_of_the_batch_size(pool: Any, tmp_path: pathlib.Path) -> None:
    """Batches of 4, then 8: the ramp's position resumes with the samples."""
    case = _BASE.replace("--train-iters 5", "").replace("--train-iters 6", "")
    case = case.replace("--lr-warmup-iters 2", "--lr-warmup-samples 8")
    case += " --rampup-batch-size 4 4 16 --train-samples 40"
    whole, stopped, resumed = _whole_stopped_resumed(pool, 1, {"": case}, tmp_path)[""]
    assert [step.global_batch_size for step in whole.steps] == [4, 4, 4, 4, 8, 8, 8]
    _assert_resumed(whole, stopped, resumed, "ramp-up")


def _slow_write(case: str) -> History:
    """The background writes half a second late, when training has long gone on."""
    original = dcp.FileSystemWriter.write_data

    def late(self: Any, *arguments: Any) -> Any:
        time.sleep(0.5)
        return original(self, *arguments)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", late):
        return pretrain_case(case)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, ""),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-distributed-optimizer --bf16"),
    ],
)
def test_async_save(pool: Any, tmp_path: pathlib.Path, world_size: int, flags: str) -> None:
    """What is written is the state at the save, though training changes it meanwhile."""
    case = f"{_BASE} {flags} --eval-iters 0"
    saving = f"{case} --save {tmp_path} --async-save"
    whole = joined(pool.run(world_size, _slow_write, saving))
    assert whole.output.index("scheduled an async checkpoint save at iteration       3") < (
        whole.output.index("successfully saved checkpoint from iteration       3")
    )
    (resumed,) = run(pool, world_size, f"{case} --load {tmp_path} --ckpt-step 3")
    assert_same_training(resumed, tail(whole, 4))
    (resumed,) = run(pool, world_size, f"{case} --load {tmp_path}")
    assert resumed.steps == [], "the save at the end of training is complete, too"


@pytest.mark.timeout(60)
def test_at_step_0_and_after_skipped_steps_only(pool: Any, tmp_path: pathlib.Path) -> None:
    """Optimizer state exists before the first applied step."""
    cases = {
        "at step 0": (f"{_BASE} --eval-iters 0", "--train-iters 0"),
        "only skips": (f"{_BASE} --eval-iters 0 --fp16", "--exit-interval 3"),
    }
    lines: list[str] = []
    for index, (case, stop) in enumerate(cases.values()):
        saved = f"--save {tmp_path / str(index)} {stop}"
        schedule = "--override-opt_param-scheduler --lr-decay-iters 6"
        lines += [f"{case} {schedule}", f"{case} {schedule} {saved}"]
        lines += [f"{case} {schedule} --load {tmp_path / str(index)}"]
    histories = run(pool, 1, *lines)
    whole, stopped, resumed = histories[:3]
    assert stopped.steps == []
    assert_same_training(resumed, whole, "at step 0")
    whole, stopped, resumed = histories[3:]
    assert all(step.skipped for step in stopped.steps)
    assert_same_training(resumed, tail(whole, 4), "only skips")


def _save_twice(case: str, folder: str) -> Sequence[History]:
    """Two runs in one folder, from the second on at the first's newest checkpoint."""
    return pretrain_cases([f"{case} --save {folder} --load {folder} --exit-interval 2"] * 2)


@pytest.mark.timeout(60)
def test_the_same_command_again_continues(pool: Any, tmp_path: pathlib.Path) -> None:
    """The usual way of resuming: one script with --save and --load, run until it is done."""
    whole, *_ = run(pool, 1, f"{_BASE} --save-interval 2 --eval-iters 0")
    first, second = pool.run(
        1, _save_twice, f"{_BASE} --save-interval 2 --eval-iters 0", str(tmp_path)
    )[0]
    assert "will not load any checkpoints and will start from random" in first.output
    assert [first.iterations, second.iterations] == [[1, 2], [3, 4]]
    assert first.losses + second.losses == whole.losses[:4]
    assert second.weights[-1] == whole.weights[4]
