r"""`--log-progress`: `<save>/progress.txt`, one line for each job start and each checkpoint.

    2026-01-31 12:00:00\tJob ID: 4711\t# GPUs: 8\tStarting job

Written by rank 0. The file outlives jobs, so it can tell the throughput since the first of the jobs
that ran on this many GPUs, the time between them included.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from megatron.training.throughput import tflops_per_gpu

_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\tJob ID: [^\t]*\t# GPUs: (?P<gpus>\d+)\t(?P<text>.*)"
)
_FLOPS = re.compile(r"\tFloating-point operations: (?P<flops>\d\.\d\de[+-]\d+)")
_STARTING = "Starting job"
_SAVED = "Saved checkpoint"


class _Origin(NamedTuple):
    """Where the cumulative throughput counts from."""

    time: datetime
    flops: float


class ProgressFile:
    """Appends to `<save>/progress.txt`. Rank 0 makes one when training is about to start.

    Making it notes the job's start. `num_flops_so_far` is what the checkpoint that the job goes on
    from has behind it; 0 for a new run.
    """

    def __init__(
        self,
        save: str | pathlib.Path,
        *,
        world_size: int,
        num_flops_so_far: float,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._path = pathlib.Path(save, "progress.txt")
        self._world_size = world_size
        self._now = now
        self._job = _Origin(now(), num_flops_so_far)
        self._first_job = self._find_first_job() or self._job
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._append(_STARTING)

    def saving_async_checkpoint(self, iteration: int) -> None:
        """Note that the write of a checkpoint has begun; `saved_checkpoint` follows at its end."""
        self._append(f"Saving async checkpoint\tIteration: {iteration}")

    def saved_checkpoint(
        self, iteration: int, *, num_flops_so_far: float, num_tokens_so_far: int
    ) -> None:
        """Note a finished checkpoint, and the throughput of this job and of all jobs like it."""
        job = self._throughput_since(self._job, num_flops_so_far)
        cumulative = self._throughput_since(self._first_job, num_flops_so_far)
        self._append(
            f"{_SAVED}\tIteration: {iteration}\t"
            f"Job throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {num_flops_so_far:.2e}\t"
            f"Tokens (in billions): {num_tokens_so_far / 1e9:.2f}"
        )

    def _throughput_since(self, origin: _Origin, num_flops_so_far: float) -> float:
        seconds = (self._now() - origin.time).total_seconds()
        return tflops_per_gpu(num_flops_so_far - origin.flops, seconds, self._world_size)

    def _append(self, text: str) -> None:
        job_id = os.environ.get("SLURM_JOB_ID", "")
        with self._path.open("a") as file:
            file.write(
                f"{self._now():{_TIME_FORMAT}}\tJob ID: {job_id}\t"
                f"# GPUs: {self._world_size}\t{text}\n"
            )

    def _find_first_job(self) -> _Origin | None:
        """The first of the unbroken row of jobs on this many GPUs that the file ends with.

        Lines of another form (a torn one, say) are passed over: the file is a report, and a run
        must not stop over it.
        """
        origin, flops = None, 0.0
        text = self._path.read_text() if self._path.exists() else ""
        for line in map(_LINE.fullmatch, text.splitlines()):
            if line is None:
                continue
            if int(line["gpus"]) != self._world_size:
                origin = None
            elif origin is None and line["text"] == _STARTING:
                origin = _Origin(datetime.strptime(line["time"], _TIME_FORMAT), flops)
            if line["text"].startswith(_SAVED) and (stated := _FLOPS.search(line["text"])):
                flops = float(stated["flops"])
        return origin
