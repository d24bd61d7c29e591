"""Start-up lines, character for character."""

from __future__ import annotations

import argparse
from datetime import datetime

from megatron.training.banner import argument_dump, datetime_line, parameter_line, size_line


def test_argument_dump_sorts_without_case_and_pads_with_dots() -> None:
    namespace = argparse.Namespace(seed=1234, Beta=None, adam_eps=1e-8)
    assert argument_dump(namespace).splitlines() == [
        "------------------------ arguments ------------------------",
        "  adam_eps " + "." * 40 + " 1e-08",
        "  Beta " + "." * 44 + " None",
        "  seed " + "." * 44 + " 1234",
        "-------------------- end of arguments ---------------------",
    ]


def test_size_line() -> None:
    assert size_line(world_size=16, data=2, context=1, tensor=2, pipeline=4) == (
        "using world size: 16, data-parallel size: 2, context-parallel size: 1, "
        "tensor-model-parallel size: 2, pipeline-model-parallel size: 4 "
    )


def test_parameter_and_datetime_lines() -> None:
    assert parameter_line(tensor_rank=1, pipeline_rank=3, num_parameters=42) == (
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 3): 42"
    )
    moment = datetime(2026, 1, 2, 3, 4, 5, 678)
    assert datetime_line("after training is done", moment) == (
        "[after training is done] datetime: 2026-01-02 03:04:05 "
    )
