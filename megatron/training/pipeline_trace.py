"""`--trace-pipeline FILE`: what every rank executed and when, on one clock.

The file has the planner's trace format, so planned and measured timelines can be laid over each
other (`tools/plan_schedule.py --html ... --measured FILE`).
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Executed
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import (
    TraceEvent,
    save_trace,
)
from megatron.training.session import Session

_KEPT_ITERATIONS = 10


class PipelineTrace:
    """Collects the iterations of the first replica; the newest few are written at the end."""

    def __init__(self, session: Session, path: str) -> None:
        self._session, self._path = session, path
        self._offset = _clock_offset(session)
        self._iterations: dict[int, list[Executed]] = {}

    def record(self, iteration: int, executed: list[Executed]) -> None:
        """Keep one iteration of this rank; older ones are dropped.

        Forwards that a wrong optimizer step made void ran twice (post-validation): both are kept,
        the first marked as void.
        """
        self._iterations[iteration] = executed
        self._iterations.pop(iteration - _KEPT_ITERATIONS, None)

    def write(self) -> None:
        """Gather all ranks' events on rank 0 and write the file. Collective."""
        position = self._session.groups.position
        events = [
            TraceEvent(
                position.pp,
                item.instruction,
                1e6 * (item.start + self._offset),
                1e6 * (item.end - item.start),
                iteration,
                item.void,
            )
            for iteration, executed in self._iterations.items()
            for item in executed
            if position.dp == 0
        ]
        gathered: list[Any] = [events]
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, events)
        if self._session.is_first_rank:
            everything = [event for part in gathered for event in part]
            origin = min((event.start_us for event in everything), default=0.0)
            save_trace(self._path, [e._replace(start_us=e.start_us - origin) for e in everything])


def _clock_offset(session: Session) -> float:
    """What to add to this rank's clock to get rank 0's.

    Processes of one host share their monotonic clock. Between hosts the difference is read behind
    a barrier, so it is right to within the barrier's skew.
    """
    if not dist.is_initialized():
        return 0.0
    session.barrier()
    mine = (socket.gethostname(), time.perf_counter())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    host, clock = everyone[0]
    return 0.0 if host == mine[0] else clock - mine[1]
