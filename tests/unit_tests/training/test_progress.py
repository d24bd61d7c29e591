"""`--log-progress`: lines and throughput over jobs."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from megatron.training.progress import ProgressFile


class Now:
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 31, 12, 0, 0)

    def __call__(self) -> datetime:
        return self.time

    def pass_seconds(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def start(save: Path, now: Now, *, gpus: int = 8, flops: float = 0.0) -> ProgressFile:
    return ProgressFile(save, world_size=gpus, num_flops_so_far=flops, now=now)


def throughputs(save: Path) -> tuple[float, float]:
    """Job and cumulative throughput of the last line."""
    line = (save / "progress.txt").read_text().splitlines()[-1]
    found = re.search(r"Job throughput: (\S+) .*Cumulative throughput: (\S+) ", line)
    assert found is not None
    return float(found[1]), float(found[2])


def test_lines_are_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    now = Now()
    save = tmp_path / "not-there-yet"
    progress = start(save, now)
    now.pass_seconds(100)
    progress.saving_async_checkpoint(10)
    progress.saved_checkpoint(10, num_flops_so_far=8e16, num_tokens_so_far=2_500_000_000)
    assert (save / "progress.txt").read_text().splitlines() == [
        "2026-01-31 12:00:00\tJob ID: 4711\t# GPUs: 8\tStarting job",
        "2026-01-31 12:01:40\tJob ID: 4711\t# GPUs: 8\tSaving async checkpoint\tIteration: 10",
        "2026-01-31 12:01:40\tJob ID: 4711\t# GPUs: 8\tSaved checkpoint\tIteration: 10\t"
        "Job throughput: 100.0 TFLOP/s/GPU\tCumulative throughput: 100.0 TFLOP/s/GPU\t"
        "Floating-point operations: 8.00e+16\tTokens (in billions): 2.50",
    ]


def test_cumulative_throughput_counts_the_time_between_jobs(tmp_path: Path) -> None:
    now = Now()
    first = start(tmp_path, now)
    now.pass_seconds(100)
    first.saved_checkpoint(10, num_flops_so_far=8e16, num_tokens_so_far=0)
    now.pass_seconds(100)  # waiting for the second job
    second = start(tmp_path, now, flops=8e16)
    now.pass_seconds(100)
    second.saved_checkpoint(20, num_flops_so_far=24e16, num_tokens_so_far=0)
    # 16e16 in 100 s, and 24e16 in 300 s, on 8 GPUs
    assert throughputs(tmp_path) == (200.0, 100.0)


def test_another_number_of_gpus_starts_the_count_again(tmp_path: Path) -> None:
    now = Now()
    for gpus, flops in ((8, 0.0), (4, 8e16), (8, 12e16), (8, 20e16)):
        progress = start(tmp_path, now, gpus=gpus, flops=flops)
        now.pass_seconds(100)
        done = flops + gpus * 1e16
        progress.saved_checkpoint(1, num_flops_so_far=done, num_tokens_so_far=0)
    # Only the last two jobs count: 16e16 on 8 GPUs in 200 s.
    assert throughputs(tmp_path) == (100.0, 100.0)


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    now = Now()
    (tmp_path / "progress.txt").write_text(
        "a remark\n2026-01-31 11:00:00\tJob ID: \t# GPUs: 8\tStarting job\n2026-01-31 11:5\n"
    )
    progress = start(tmp_path, now)
    now.pass_seconds(3600)
    progress.saved_checkpoint(1, num_flops_so_far=8 * 7200e12, num_tokens_so_far=0)
    assert throughputs(tmp_path) == (2.0, 1.0)
