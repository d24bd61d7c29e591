"""What is planned and not there yet: one row each. Whoever adds a feature deletes its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .compatibility import written
from .run_config import RunConfig


class NotYet(NamedTuple):
    """Something planned, and how to see that a run asks for it."""

    what: str
    asked: Callable[[RunConfig], str]  # the flag as written; empty if it is not
    instead: str

    def check(self, run: RunConfig) -> str | None:
        """The refusal, as a rule."""
        asked = self.asked(run)
        return f"{asked} is not available yet in this version; {self.instead}" if asked else None


def _above(limit: int, group: str, name: str) -> Callable[[RunConfig], str]:
    """The flag and its value where the value is above `limit`."""

    def asked(run: RunConfig) -> str:
        value = getattr(getattr(run, group), name)
        flag = "--" + name.replace("_", "-")
        return f"{flag} {value}" if value is not None and value > limit else ""

    return asked


def _given(group: str, name: str) -> Callable[[RunConfig], str]:
    """The flag, and its value if it has one, where it is set."""

    def asked(run: RunConfig) -> str:
        value = getattr(getattr(run, group), name)
        return written("--" + name.replace("_", "-"), value) if value else ""

    return asked


NOT_YET: tuple[NotYet, ...] = (
    NotYet(
        "tensor parallelism (--tensor-model-parallel-size above 1)",
        _above(1, "parallel", "tensor_model_parallel_size"),
        "use 1 and spread the model with --pipeline-model-parallel-size",
    ),
    NotYet(
        "context parallelism (--context-parallel-size above 1)",
        _above(1, "parallel", "context_parallel_size"),
        "use 1",
    ),
    NotYet(
        "expert parallelism (--expert-model-parallel-size above 1)",
        _above(1, "parallel", "expert_model_parallel_size"),
        "use 1",
    ),
    NotYet(
        "tensor parallelism inside experts (--expert-tensor-parallel-size above 1)",
        _above(1, "parallel", "expert_tensor_parallel_size"),
        "leave it out",
    ),
    NotYet(
        "mixture of experts (--num-experts)",
        _above(0, "model", "num_experts"),
        "train a dense model",
    ),
    NotYet(
        "sharding of saved activations (--distribute-saved-activations)",
        _given("recompute", "distribute_saved_activations"),
        "leave it out",
    ),
    NotYet(
        "sequences split in the pipeline (--num-seq-splits above 1)",
        _above(1, "zero_bubble", "num_seq_splits"),
        "use 1",
    ),
    NotYet(
        "activations in host memory (--cpu-offload)",
        _given("zero_bubble", "cpu_offload"),
        "use --recompute-granularity to save memory",
    ),
)
