"""Lines that a run prints at its start and end, in Megatron-LM's words."""

from __future__ import annotations

import argparse
from datetime import datetime

_NAME_WIDTH = 48


def argument_dump(namespace: argparse.Namespace) -> str:
    """Every argument on a line of its own, sorted without regard to case."""
    lines = [
        f"  {name} {'.' * (_NAME_WIDTH - len(name))} {value}"
        for name, value in sorted(vars(namespace).items(), key=lambda item: item[0].lower())
    ]
    heading = "------------------------ arguments ------------------------"
    ending = "-------------------- end of arguments ---------------------"
    return "\n".join([heading, *lines, ending])


def size_line(*, world_size: int, data: int, context: int, tensor: int, pipeline: int) -> str:
    """The parallel sizes of a run; the space at the end is Megatron-LM's."""
    return (
        f"using world size: {world_size}, data-parallel size: {data}, "
        f"context-parallel size: {context}, tensor-model-parallel size: {tensor}, "
        f"pipeline-model-parallel size: {pipeline} "
    )


def parameter_line(*, tensor_rank: int, pipeline_rank: int, num_parameters: int) -> str:
    """What one model-parallel rank holds, counted in the model it built."""
    return (
        " > number of parameters on (tensor, pipeline) model parallel rank "
        f"({tensor_rank}, {pipeline_rank}): {num_parameters}"
    )


def datetime_line(event: str, now: datetime) -> str:
    """`[event] datetime: ...`, such as `after training is done`; the space at the end is
    Megatron-LM's."""
    return f"[{event}] datetime: {now:%Y-%m-%d %H:%M:%S} "
