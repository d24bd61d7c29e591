"""`get_forward_backward_func`: Megatron's entry to whatever schedule a run uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """The function that runs one iteration of this run's plan (Megatron's call signature).

    The runtime is found on the config of the model the function is called with: schedules are
    data, so there is one function for all of them, "no pipeline" included.
    """

    def run(*, model: Any, **arguments: Any) -> list[Any]:
        chunks = model if isinstance(model, (list, tuple)) else [model]
        runtime: PipelineRuntime | None = getattr(chunks[0].config, "pipeline_runtime", None)
        if runtime is None:
            raise RuntimeError(
                "the model's config has no pipeline_runtime; build the model with "
                "megatron.training.get_model, or make a PipelineRuntime and set it there"
            )
        return runtime(model=model, **arguments)

    return run
