"""What ranks tell each other for reports: timers, the exit signal, parameter counts."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from torch import nn

from megatron.core.timers import Timers
from megatron.training.memory_report import ParameterCounts, count_parameters
from megatron.training.signals import DistributedSignalHandler
from tests.worker_pool import WorkerPool


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Written:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int, /) -> None:
        self.scalars[name] = value


def timer_reports(rank: int) -> tuple[dict[str, str | None], dict[str, float]]:
    """Every rank runs `forward` for 1 + rank seconds, and rank 1 alone runs `head`."""
    reports = {}
    for option in ("max", "minmax", "all"):
        clock = Clock()
        timers = Timers(2, option, clock=clock)
        for name in ["forward", "head"][: 1 + rank]:
            timers(name).start(barrier=name == "forward")
            clock.now += 1.0 + rank
            timers(name).stop()
        reports[option] = timers.report(reset=False, barrier=True)
    written = Written()
    timers.write(["head", "forward"], written if rank == 0 else None, iteration=1)
    return reports, written.scalars


def signals(rank: int) -> tuple[bool, bool]:
    """Rank 1 alone is told to stop; before and after that all ranks ask."""
    with DistributedSignalHandler() as handler:
        before = handler.signals_received()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return before, handler.signals_received()


def counts(rank: int) -> ParameterCounts:
    """Two pipeline ranks: an embedding of 12 and a decoder of 6, and a decoder of 8 with a head."""
    stage = nn.Module()
    if rank == 0:
        stage.embedding = nn.Linear(3, 4, bias=False)
        stage.decoder = nn.Linear(3, 2, bias=False)
    else:
        stage.decoder = nn.Linear(4, 2, bias=False)
        stage.output_layer = nn.Linear(3, 4, bias=False)
        stage.output_layer.weight.shared = True  # type: ignore[attr-defined]
    return count_parameters(stage.named_parameters(), group=dist.group.WORLD)


def report_everything() -> tuple:
    rank = dist.get_rank()
    return timer_reports(rank), signals(rank), counts(rank)


def test_reports_over_two_ranks(pool: WorkerPool) -> None:
    first, second = pool.run(2, report_everything)
    (reports, written), received, counted = first
    forward, head = ("    " + f"{name} ".ljust(48, ".") for name in ("forward", "head"))
    assert reports["minmax"] == (
        "(min, max) time across ranks (ms):\n"
        f"{forward}: (1000.00, 2000.00)\n{head}: (2000.00, 2000.00)"
    )
    assert reports["max"] == f"max time across ranks (ms):\n{forward}: 2000.00\n{head}: 2000.00"
    assert reports["all"] == (
        "times across ranks (ms):\n"
        "  forward:\n     rank  0: 1000.00\n     rank  1: 2000.00\n"
        "  head:\n     rank  1: 2000.00"
    )
    assert written == {"head-time": 2.0, "forward-time": 2.0}
    assert received == (False, True)
    assert counted == ParameterCounts(14, 12, 20)
    assert second == ((reports, {}), received, counted)
