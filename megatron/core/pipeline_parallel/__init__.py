"""Pipeline parallelism: schedules as data (`zerobubble.scheduler`) and the runtime that runs them.

Imported lazily, so that the scheduler can be used without torch.
"""

from typing import Any

__all__ = ["get_forward_backward_func"]


def __getattr__(name: str) -> Any:
    if name == "get_forward_backward_func":
        from .schedules import get_forward_backward_func

        return get_forward_backward_func
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
