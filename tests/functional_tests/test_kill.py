"""Ranks that die: the launcher ends the job and names the rank; a checkpoint is whole or absent."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.checkpointing import Checkpointer
from megatron.training.model_setup import Trainer
from megatron.training.session import TrainState
from tests.functional_tests.test_signals import wait_for_text
from tests.training_runs import LLAMA, start
from tests.worker_pool import WorkerPool

_ROOT = pathlib.Path(__file__).parents[2]
# Every rank leaves its process id where the test finds it.
_SCRIPT = """
import os, pathlib
import pretrain_gpt
pathlib.Path({folder!r}, "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
pretrain_gpt.main()
"""


class _Job(NamedTuple):
    launcher: subprocess.Popen[bytes]
    output: pathlib.Path
    folder: pathlib.Path

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def assert_ends(self) -> str:
        """The launcher ends by itself, not with status 0, and its ranks are gone."""
        assert self.launcher.wait(timeout=60) != 0
        for rank in range(2):
            with pytest.raises(ProcessLookupError):
                os.kill(self.pid(rank), 0)
        return self.output.read_text()


@contextlib.contextmanager
def _torchrun(arguments: str, folder: pathlib.Path) -> Iterator[_Job]:
    """A job of two ranks in a session of its own, of which nothing is left behind."""
    script, output = folder / "script.py", folder / "output"
    script.write_text(_SCRIPT.format(folder=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), *arguments.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield _Job(launcher, output, folder)
        finally:
            for pid in (int(file.read_text()) for file in folder.glob("pid*")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.kill()
            launcher.wait()


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: pathlib.Path) -> None:
    arguments = f"{LLAMA} --global-batch-size 8 --train-iters 1000000 --log-interval 1"
    arguments += " --pipeline-model-parallel-size 2 --eval-iters 0"
    with _torchrun(arguments, tmp_path) as job:
        wait_for_text(job.output, "iteration        1/ 1000000 |", job.launcher)
        os.kill(job.pid(1), signal.SIGKILL)
        output = job.assert_ends()
    assert "rank      : 1 (local_rank: 1)" in output
    assert "Signal 9 (SIGKILL)" in output


@pytest.mark.timeout(150)
def test_bad_data_on_one_replica_end_the_job_and_are_named(tmp_path: pathlib.Path) -> None:
    """Tokens that the model does not have, in one document, which one replica meets."""
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=numpy.uint16)
    for index in range(40):  # each a little over one sample of 16 tokens
        token = 700 if index == 11 else index
        builder.add_item(torch.full((16,), token))
        builder.end_document()
    builder.finalize(str(tmp_path / "text.idx"))
    arguments = f"{LLAMA} --micro-batch-size 1 --global-batch-size 4 --train-iters 9 --eval-iters 0"
    arguments += f" --data-path {tmp_path / 'text'} --split 100,0,0 --log-interval 1"
    with _torchrun(arguments, tmp_path) as job:
        output = job.assert_ends()
    assert re.search(r"ValueError: (token|label) id 700 in sample 0 of the micro-batch", output)
    assert "the data and the model do not fit together" in output


class _Kill(NamedTuple):
    """One SIGKILL: what had been reported saved, what then loaded, whether a save was under way."""

    reported: int
    loaded: int
    interrupted: bool


def _killed_saves(folder: str, flags: str, *, rounds: int, same_iteration: bool) -> list[_Kill]:
    """Fork a child that saves again and again, kill it at a random moment, load; repeat."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork leaves the locks of {threads - 1} other threads taken for ever"
    case = LLAMA.replace("--num-layers 4", "--num-layers 1")
    case += f" --global-batch-size 4 --save {folder} --load {folder} --save-interval 1 {flags}"
    kills, chance, number = [], random.Random(f"{flags} {same_iteration}"), 0
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, _, _ = start(case)
        for _ in range(rounds):
            reports, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                _save_forever(trainer, number, write_end, same_iteration)
            os.close(write_end)
            reported = os.read(reports, 1000)  # until the first is saved
            time.sleep(0.06 * chance.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(reports, "rb") as rest:
                reported += rest.read()
            interrupted = any(pathlib.Path(folder).glob(".*"))
            number = _loaded_number(trainer)
            kills.append(_Kill(int(reported.split()[-1]), number, interrupted))
    return kills


def _save_forever(trainer: Trainer, number: int, reports: int, same_iteration: bool) -> NoReturn:
    """Checkpoint k holds nothing but k's, in weights, moments and position."""
    checkpointer = Checkpointer(trainer)
    asynchronous = trainer.session.run.checkpoint.async_save
    while True:
        number += 1
        for entry in trainer.optimizer.entries:
            entry.main.fill_(number)
            for tensor in trainer.optimizer.inner.state[entry.main].values():
                tensor.fill_(number)
        if same_iteration:
            checkpointer = Checkpointer(trainer)
        iteration = 5 if same_iteration else number
        checkpointer.save(TrainState(iteration=iteration, consumed_train_samples=number))
        complete = number - asynchronous  # the one before it was waited for
        if complete > 0:
            os.write(reports, f"{complete}\n".encode())


def _loaded_number(trainer: Trainer) -> int:
    state = Checkpointer(trainer).load()
    number = state.consumed_train_samples
    for entry in trainer.optimizer.entries:
        for tensor in (entry.main, *trainer.optimizer.inner.state[entry.main].values()):
            assert (tensor == number).all(), f"{entry.name} is not of checkpoint {number}"
    return number


@pytest.fixture
def fresh_pool() -> Iterator[WorkerPool]:
    """Workers that have run nothing: those of the session keep threads of earlier groups."""
    pool = WorkerPool(limit=1, preload=["tests.pretrain_runs"])
    yield pool
    pool.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "same_iteration"), [("", False), ("", True), ("--async-save", False)]
)
def test_a_kill_during_a_save_leaves_the_previous_or_the_new_checkpoint(
    fresh_pool: WorkerPool, tmp_path: pathlib.Path, flags: str, same_iteration: bool
) -> None:
    """At 20 random moments; also while a checkpoint of the same iteration is replaced."""
    (kills,) = fresh_pool.run(
        1,
        functools.partial(_killed_saves, rounds=20, same_iteration=same_iteration),
        str(tmp_path),
        flags,
        timeout_s=80,
    )
    for kill in kills:
        # What was reported is not lost; at most the one under way is newer.
        assert kill.reported <= kill.loaded <= kill.reported + 1 + bool(flags), kill
    assert len(kills) == 20
    assert sum(kill.interrupted for kill in kills) >= 5, "kills do hit saves"
