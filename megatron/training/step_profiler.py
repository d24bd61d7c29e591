"""`--profile`: record iterations --profile-step-start to --profile-step-end on some ranks."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import torch

from megatron.training.printing import print_line
from megatron.training.session import Session

logger = logging.getLogger(__name__)


class StepProfiler:
    """Starts before the first profiled iteration and stops before the first one behind them.

    With --use-pytorch-profiler a Chrome trace is written beside TensorBoard's or the checkpoint's
    files; otherwise an outside profiler such as nsys is told when to record (CUDA only).
    """

    def __init__(self, session: Session) -> None:
        settings = session.run.profiling
        self._session, self._settings = session, settings
        self._active = settings.profile and session.rank in (settings.profile_ranks or (0,))
        self._torch_profiler: Any = None
        if self._active and not settings.use_pytorch_profiler and not session.device.is_cuda:
            logger.warning("--profile without --use-pytorch-profiler records on CUDA only")
            self._active = False

    def before_iteration(self, iteration: int) -> None:
        """`iteration` is the one about to run, from 1."""
        if not self._active:
            return
        if iteration == self._settings.profile_step_start:
            self._start()
        if iteration == self._settings.profile_step_end:
            self.stop()

    def stop(self) -> None:
        """Stop recording, if it goes on, and write what was recorded."""
        if self._torch_profiler is not None:
            self._torch_profiler.stop()
            path = self._trace_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torch_profiler.export_chrome_trace(str(path))
            self._torch_profiler = None
            print_line(f"profile of rank {self._session.rank} written to {path}")
        elif self._active and not self._settings.use_pytorch_profiler:
            self._session.device.outside_profiler(start=False)

    def _start(self) -> None:
        if self._settings.use_pytorch_profiler:
            self._torch_profiler = torch.profiler.profile(record_shapes=True)
            self._torch_profiler.start()
        else:
            self._session.device.outside_profiler(start=True)

    def _trace_path(self) -> pathlib.Path:
        run = self._session.run
        folder = run.logging.tensorboard_dir or run.checkpoint.save or "."
        return pathlib.Path(folder, f"profile_rank{self._session.rank}.json")
