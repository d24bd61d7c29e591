"""Memory does not grow: with the number of micro-batches beyond the plan, or from step to step."""

from __future__ import annotations

import contextlib
import gc
import io
import resource
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import pretrain_gpt
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.training.training import train_step
from tests.training_runs import LLAMA, start

_BASE = f"{LLAMA} --micro-batch-size 1"
_P2 = "--pipeline-model-parallel-size 2"


class _Outputs(NamedTuple):
    most_alive: int  # of the outputs of this rank's stages, at any F or backward
    left: int  # after the step


def _alive_outputs(cases: list[str]) -> list[_Outputs]:
    return [_outputs_of_a_step(case) for case in cases]


def _outputs_of_a_step(case: str) -> _Outputs:
    """Watch the storages of stage outputs (hidden states, or losses) and of the last logits."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, state, iterators = start(case)
    watched: list[StorageWeakRef] = []
    counts: list[int] = []

    def watch(tensor: torch.Tensor) -> None:
        watched.append(StorageWeakRef(tensor.untyped_storage()))

    def alive() -> int:
        return sum(not storage.expired() for storage in watched)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        output, loss_function = pretrain_gpt.forward_step(data_iterator, model)
        watch(output)
        counts.append(alive())
        return output, loss_function

    for stage in trainer.stages:
        head = getattr(stage.module.module, "output_layer", None)
        if head is not None:
            head.register_forward_hook(lambda _module, _inputs, outputs: watch(outputs[0]))
    backward = StageCompute._backward

    def counted(self: StageCompute, *arguments: Any) -> Any:
        result = backward(self, *arguments)
        counts.append(alive())
        return result

    with mock.patch.object(StageCompute, "_backward", counted):
        train_step(trainer, forward_step, iterators, state)
    assert len(watched) >= trainer.session.microbatches.get(), "outputs were seen"
    return _Outputs(max(counts), alive())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("p", "flags"),
    [
        (1, ""),
        (2, ""),
        (2, "--pipeline-schedule zb-h1"),
        (2, "--pipeline-schedule dualpipe-v"),
        (4, ""),
    ],
)
def test_outputs_alive_do_not_grow_with_the_micro_batches(pool: Any, p: int, flags: str) -> None:
    """They are freed once sent, so at most what is in flight is alive; losses end with their B."""
    case = f"{_BASE} {flags} --pipeline-model-parallel-size {p}"
    cases = [f"{case} --global-batch-size {size}" for size in (4, 24)]
    most = 1 if p == 1 else 2 * p + 2
    for rank, outputs in enumerate(pool.run(p, _alive_outputs, cases)):
        for of_step in outputs:
            assert of_step.left == 0, f"rank {rank} keeps outputs behind a step"
            assert 1 <= of_step.most_alive <= most, f"rank {rank}: {outputs}"


class _Memory(NamedTuple):
    tensors: int  # live torch.Tensor objects
    objects: int
    peak_kib: int  # of the process, ever


def _memory() -> _Memory:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in objects)
    return _Memory(tensors, len(objects), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _memory_over_steps(case: str) -> tuple[_Memory, _Memory]:
    """After 10 steps and after 60."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, state, iterators = start(case)
        for _ in range(10):
            train_step(trainer, pretrain_gpt.forward_step, iterators, state)
        before = _memory()
        for _ in range(50):
            train_step(trainer, pretrain_gpt.forward_step, iterators, state)
    return before, _memory()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("world_size", "flags"), [(1, ""), (2, f"{_P2} --pipeline-schedule dualpipe-v")]
)
def test_memory_is_flat_over_50_steps(pool: Any, world_size: int, flags: str) -> None:
    """No tensor, hook or message is left behind; and the allocator's high-water mark stands."""
    case = f"{LLAMA} --num-layers 2 --global-batch-size 4 --train-iters 60 {flags}"
    if world_size > 1:
        case += " --num-layers 4"
    for before, after in pool.run(world_size, _memory_over_steps, case):
        assert after.tensors == before.tensors
        assert after.objects <= before.objects + 50, "not one object a step"
        assert after.peak_kib <= 1.05 * before.peak_kib
