"""Data parallelism: the gradients of one process, once reduced, equal on all replicas."""

from __future__ import annotations

import collections
import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.weight_grad_store import GradTarget
from megatron.training.training import train_step
from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import GPT, LLAMA, start

_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"  # it is keyed by the replica, on purpose
_BASE = f"{LLAMA} {_NO_DROPOUT} --global-batch-size 12 --train-iters 4 --eval-iters 0"
_P2 = "--pipeline-model-parallel-size 2"


def assert_close_training(ours: History, reference: History, label: str = "") -> None:
    """Equal but for the order in which micro-batches are added up.

    One process adds m gradients in turn; replicas add m / dp each, then their sums. In fp32 that
    moves a sum of 6 addends by a few units of 6e-8 of its largest addend. SGD keeps the weights in
    proportion to that (AdamW would divide rounding noise by itself where gradients vanish).
    """
    numpy.testing.assert_allclose(_losses(ours), _losses(reference), rtol=1e-6, err_msg=label)
    numpy.testing.assert_allclose(_norms(ours), _norms(reference), rtol=5e-6, err_msg=label)
    for key, values in reference.moments.items():
        if key.startswith("main "):
            close = numpy.testing.assert_allclose
            close(ours.moments[key], values, rtol=1e-5, atol=1e-6, err_msg=f"{label}: {key}")


def _losses(history: History) -> list[float]:
    return [loss for step in history.steps for loss in step.losses.values()]


def _norms(history: History) -> list[float]:
    return [step.grad_norm or 0.0 for step in history.steps]


@pytest.mark.timeout(120)
def test_replicas_of_a_pipeline_equal_one_process(pool: Any) -> None:
    """dp 2 x pp 2 and dp 3 against m micro-batches in one process; tied and untied weights.

    `run` asserts on the way that replicas and tied copies are bit-equal after every step.
    """
    sgd = "--optimizer sgd --lr 0.1 --clip-grad 0.5"
    cases = {
        "llama, tied": f"{_BASE} {sgd}",
        "gpt, untied": (
            f"{GPT} {_NO_DROPOUT} --global-batch-size 12 --train-iters 4 --eval-iters 0 {sgd} "
            "--untie-embeddings-and-output-weights"
        ),
        "tokens": f"{_BASE} {sgd} --calculate-per-token-loss",
    }
    single = run(pool, 1, *cases.values())
    for sizes, world_size in (("", 3), (_P2, 2), (_P2, 4)):
        several = run(pool, world_size, *(f"{case} {sizes}" for case in cases.values()))
        for label, ours, reference in zip(cases, several, single, strict=True):
            assert len(ours.steps) == 4
            assert ours.weights[0] == reference.weights[0], "the same initial weights"
            assert_close_training(ours, reference, f"{label} on {world_size} ranks {sizes}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dp", [2, 3])
def test_replicas_are_bit_identical_for_every_pipeline_and_overlap(pool: Any, dp: int) -> None:
    """For one data-parallel size neither the pipeline nor the moment of the sum may matter.

    Three replicas are the hard case: their sum depends on the order of its addends.
    """
    cases = [f"{LLAMA} --global-batch-size 12 --train-iters 3 --eval-iters 0 {x}" for x in _TYPES]
    overlapped = [f"{case} --overlap-grad-reduce" for case in cases]
    flat = run(pool, dp, *cases, *overlapped)
    reference = flat[: len(cases)]
    for label, ours, expected in zip(_TYPES, flat[len(cases) :], reference, strict=True):
        assert_same_training(ours, expected, f"overlap {label}")
    schedules = [_P2, f"{_P2} --overlap-grad-reduce"]
    if dp == 2:
        schedules.append(f"{_P2} --pipeline-schedule zb-h1")
    for flags in schedules:
        piped = run(pool, 2 * dp, *(f"{case} {flags}" for case in cases))
        for label, ours, expected in zip(_TYPES, piped, reference, strict=True):
            assert_same_training(ours, expected, f"{flags} {label}")


_TYPES = ("", "--bf16")


@contextlib.contextmanager
def _events(log: list[tuple[str, Any]]) -> Iterator[None]:
    """Log what is reduced (by address), and when weight gradients are computed."""
    all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_single

    def reduced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(("reduce", (tensor.data_ptr(), tensor.numel())))
        return all_reduce(tensor, *args, **kwargs)

    def scattered(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(("reduce", (tensor.data_ptr(), tensor.numel())))
        return reduce_scatter(output, tensor, *args, **kwargs)

    def logged(name: str) -> Any:
        original = getattr(StageCompute, name)

        def wrapper(self: StageCompute, microbatch: int, *args: Any) -> Any:
            log.append(("weight", microbatch))
            return original(self, microbatch, *args)

        return mock.patch.object(StageCompute, name, wrapper)

    with (
        mock.patch.object(dist, "all_reduce", reduced),
        mock.patch.object(dist, "reduce_scatter_single", scattered),
        logged("weight_backward"),
        logged("full_backward"),
    ):
        yield


def _reductions(case: str) -> list[tuple[dict[str, int], list[str]]]:
    """Per step: how often each parameter's main gradient was reduced, and the order of events."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, state, iterators = start(case)
        (chunk,) = trainer.model
        data = {
            (buffer.region_data(region).data_ptr(), buffer.region_data(region).numel()): region
            for buffer in chunk.buffers_with_grads
            for region in buffer.regions
            if not isinstance(region.target, GradTarget)
        }
        steps = []
        for _ in range(2):
            log: list[tuple[str, Any]] = []
            with _events(log):
                train_step(trainer, pretrain_gpt.forward_step, iterators, state)
            counts = collections.Counter(data[w].name for what, w in log if w in data)
            order = ["W" if what == "weight" else "R" for what, w in log if what == "weight" or w in data]
            steps.append((dict(counts), order))
        names = [r.name for r in chunk.regions() if not isinstance(r.target, GradTarget)]
    assert sorted(names) == sorted(region.name for region in data.values())
    return steps


@pytest.mark.timeout(60)
def test_every_parameter_is_reduced_exactly_once_after_its_last_weight_gradient(pool: Any) -> None:
    for flags, world_size in (
        ("", 2),
        ("--overlap-grad-reduce", 2),
        ("--use-distributed-optimizer --untie-embeddings-and-output-weights", 2),
        (f"{_P2} --overlap-grad-reduce --pipeline-schedule zb-h1", 4),
        (f"{_P2} --use-distributed-optimizer --pipeline-schedule zb-h1", 4),
    ):
        for rank, steps in enumerate(pool.run(world_size, _reductions, f"{_BASE} {flags}")):
            for counts, order in steps:
                label = f"{flags} rank {rank}: {counts}"
                assert len(counts) > 10 and set(counts.values()) == {1}, label
                assert order == sorted(order, key="WR".index), f"{label} {order}"


def _late_sums(case: str) -> list[list[str]]:
    """Whether a stage's sum starts while other stages still compute."""
    return [order for _, order in _reductions(case)]
