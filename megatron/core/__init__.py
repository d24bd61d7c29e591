"""Megatron-shaped core library: models, parallelism, pipeline schedules, datasets, optimizers.

Names are imported when first used, so that the scheduler and the datasets can be used without
loading models.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "DistributedDataParallel": "distributed",
    "ModelParallelConfig": "model_parallel_config",
    "Timers": "timers",
}
_MODULES = {"mpu": "parallel_state", "parallel_state": "parallel_state"}
_MODULES |= {"tensor_parallel": "tensor_parallel"}

__all__ = ["DistributedDataParallel", "ModelParallelConfig", "Timers", "mpu", "parallel_state"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
