"""The one place that knows which device and backend this process computes on.

Nothing else in the project calls `torch.cuda`.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """This process's device: `cpu`, or `cuda:<local rank>`."""

    torch_device: torch.device

    @classmethod
    def choose(cls, name: str = "auto", local_rank: int = 0) -> Device:
        """The device a flag value (`auto`, `cpu`, `cuda`) means on this machine.

        Raises ValueError for `cuda` without a CUDA device.
        """
        available = torch.cuda.is_available()
        if name == "cuda" and not available:
            raise ValueError("--device cuda was asked for, but torch sees no CUDA device; use cpu")
        if name == "cpu" or not available:
            return cls(torch.device("cpu"))
        torch.cuda.set_device(local_rank)
        return cls(torch.device("cuda", local_rank))

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def default_backend(self) -> str:
        return "nccl" if self.is_cuda else "gloo"

    @property
    def generator(self) -> torch.Generator:
        """The generator that dropout on this device draws from."""
        if self.is_cuda:
            return torch.cuda.default_generators[self.torch_device.index or 0]
        return torch.default_generator

    def synchronize(self) -> None:
        """Wait for queued kernels; on CPU there are none."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def outside_profiler(self, *, start: bool) -> None:
        """Tell a profiler such as nsys to start or stop recording; CUDA only."""
        if self.is_cuda:
            (torch.cuda.profiler.start if start else torch.cuda.profiler.stop)()

    def memory_mb(self) -> dict[str, float]:
        """Memory figures for the report line; on CPU, the resident set of the process."""
        if self.is_cuda:
            stats = {
                "allocated": torch.cuda.memory_allocated(),
                "max allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "max reserved": torch.cuda.max_memory_reserved(),
            }
            return {name: size / 2**20 for name, size in stats.items()}
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        # The kernel updates the peak lazily, so it can lag behind the present value.
        peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        return {
            "allocated": resident,
            "max allocated": peak,
            "reserved": resident,
            "max reserved": peak,
        }


def device_of(tensor: torch.Tensor) -> Device:
    return Device(tensor.device)
