"""`--exit-signal-handler`: stop after the current iteration, on all ranks, when one is told to.

with DistributedSignalHandler(device=device) as handler:
    while not handler.signals_received():
        train_step()
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.device import Device


class DistributedSignalHandler:
    """Turns a signal into a flag that the training loop asks for between iterations.

    `group` is which ranks agree (None: all); `device` is where the group's backend wants tensors
    (None: CPU). Entered in the main thread; leaving puts the former handler back.
    """

    def __init__(
        self,
        sig: signal.Signals = signal.SIGTERM,
        *,
        group: dist.ProcessGroup | None = None,
        device: Device | None = None,
    ) -> None:
        self._signal = sig
        self._group = group
        self._torch_device = torch.device("cpu") if device is None else device.torch_device
        self._received = False
        self._former: Any = None

    def __enter__(self) -> DistributedSignalHandler:
        self._received = False
        self._former = signal.signal(self._signal, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # None is a handler that was not set from Python, which cannot be put back.
        signal.signal(self._signal, signal.SIG_DFL if self._former is None else self._former)

    def signals_received(self) -> bool:
        """Whether any rank of the group has had the signal. Collective: all ranks get one answer,
        so all leave the loop after the same iteration."""
        if not (dist.is_available() and dist.is_initialized()):
            return self._received
        flag = torch.tensor(int(self._received), device=self._torch_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True
