"""CPU processes joined by gloo that stay alive between runs, because starting torch is slow.

    pool = WorkerPool()
    pool.run(4, body, arg)    # body(arg) on 4 ranks; returns what each rank returned
    pool.close()

For tests and benchmarks on one machine. `body` is a function of a module that workers can import.
Every run has a process group of its own and a time limit. If a rank fails or the limit passes,
the pool ends its own processes (no others) and starts new ones at the next run.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.optim",
    "megatron.core.models.gpt.gpt_model",
]


class _Job(NamedTuple):
    rank: int
    world_size: int
    store: str
    timeout_s: float
    body: Callable[..., Any]
    arguments: tuple[Any, ...]


class RankFailure(RuntimeError):
    """A rank raised; the message holds its traceback."""


class WorkerPool:
    """Up to `limit` worker processes, started when first needed.

    Workers have imported torch, the model and `preload` before they start.
    """

    def __init__(self, limit: int = 8, *, preload: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOAD, *preload])
        self._limit = limit
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        world_size: int,
        body: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 60,
        must_succeed: bool = True,
    ) -> list[Any]:
        """What `body(*arguments)` returned on each rank of a gloo group of `world_size`.

        With `must_succeed=False` a rank that raises has its traceback text as result.
        """
        assert world_size <= self._limit, f"the pool has {self._limit} workers"
        while len(self._workers) < world_size:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = pathlib.Path(folder, "store").as_uri()
            for rank in range(world_size):
                job = _Job(rank, world_size, store, timeout_s, body, arguments)
                self._workers[rank][1].send(job)
            try:
                return self._collect(world_size, timeout_s, must_succeed)
            except BaseException:  # also a time limit or Ctrl-C of the caller: they may be stuck
                self.close()
                raise

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout_s: float, must_succeed: bool) -> list[Any]:
        deadline = time.monotonic() + timeout_s + 30  # starting a worker takes its time
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting: dict[Any, int] = {
            connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])
        }
        while waiting and not (failures and must_succeed):
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end in {timeout_s} s")
            for connection in ready:
                rank = waiting.pop(connection)
                error: str | None
                try:
                    error, results[rank] = connection.recv()
                except EOFError:
                    error = "the process died"
                if error:
                    failures[rank] = results[rank] = error
        if failures and must_succeed:
            rank, text = next(iter(failures.items()))
            raise RankFailure(f"rank {rank} of {world_size}: {text}")
        if failures:
            self.close()
        return [results[rank] for rank in range(world_size)]


def _serve(connection: Connection) -> None:
    """A worker's life: run jobs until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            connection.send((None, _run(job)))
        except BaseException:
            connection.send((traceback.format_exc(), None))


def _run(job: _Job) -> Any:
    import torch.distributed as dist

    if job.world_size == 1:
        return job.body(*job.arguments)
    dist.init_process_group(
        "gloo",
        init_method=job.store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.timeout_s),
    )
    try:
        return job.body(*job.arguments)
    finally:
        dist.destroy_process_group()
