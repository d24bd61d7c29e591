"""When a run ends before its last iteration, agreed on by all ranks."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

import torch
import torch.distributed as dist

from megatron.training.session import Session
from megatron.training.signals import DistributedSignalHandler


class ExitConditions:
    """SIGTERM, a time limit, an iteration interval (spec section 4.5). Enter it around the loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._training = session.run.training
        self._start = time.monotonic()
        self._stack = ExitStack()
        self._handler: DistributedSignalHandler | None = None

    def __enter__(self) -> ExitConditions:
        if self._training.exit_signal_handler:
            handler = DistributedSignalHandler(device=self._session.device)
            self._handler = self._stack.enter_context(handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def reason_to_exit(self, iteration: int) -> str | None:
        """Why the run should stop now, in the words of the exit line; None to go on. Collective."""
        if self._handler is not None and self._handler.signals_received():
            return "after receiving SIGTERM."
        if self._training.exit_duration_in_mins is not None:
            minutes = (time.monotonic() - self._start) / 60
            if self._any_rank(minutes > self._training.exit_duration_in_mins):
                return f"after {minutes:.1f} minutes"
        return f"at iteration {iteration}" if self.interval_ends(iteration) else None

    def interval_ends(self, iteration: int) -> bool:
        """Whether --exit-interval ends the run after this iteration: known before it runs."""
        interval = self._training.exit_interval
        return interval is not None and iteration % interval == 0

    def _any_rank(self, condition: bool) -> bool:
        if self._session.groups.world is None:
            return condition
        flag = torch.tensor(int(condition), device=self._session.device.torch_device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
