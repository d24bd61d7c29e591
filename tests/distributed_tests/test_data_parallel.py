"""Data parallelism: the gradients of one process, once reduced, equal on all replicas."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.training.model_setup import Trainer
from megatron.training.training import train_step
from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import GPT, LLAMA, start

_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"  # it is keyed by the replica, on purpose
_BASE = (
    f"{LLAMA} --num-layers 2 {_NO_DROPOUT} --global-batch-size 12 --train-iters 4 --eval-iters 0"
)
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
            f"{GPT} --num-layers 2 {_NO_DROPOUT} --global-batch-size 12 --train-iters 4 "
            f"--eval-iters 0 {sgd} --untie-embeddings-and-output-weights"
        ),
        "tokens": f"{_BASE} {sgd} --calculate-per-token-loss",
    }
    single = run(pool, 1, *cases.values())
    for sizes, world_size in (("", 3), (_P2, 4)):
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
    cases = [
        f"{LLAMA} --num-layers 2 --global-batch-size 12 --train-iters 3 --eval-iters 0 {x}"
        for x in _TYPES
    ]
    overlapped = [f"{case} --overlap-grad-reduce" for case in cases]
    flat = run(pool, dp, *cases, *overlapped)
    reference = flat[: len(cases)]
    for label, ours, expected in zip(_TYPES, flat[len(cases) :], reference, strict=True):
        assert_same_training(ours, expected, f"overlap {label}")
    schedules = [f"{_P2} --overlap-grad-reduce"]
    if dp == 2:
        schedules.append(f"{_P2} --pipeline-schedule zb-h1")
    for flags in schedules:
        piped = run(pool, 2 * dp, *(f"{case} {flags}" for case in cases))
        for label, ours, expected in zip(_TYPES, piped, reference, strict=True):
            assert_same_training(ours, expected, f"{flags} {label}")


_TYPES = ("", "--bf16")


class _Event(NamedTuple):
    """W: weight gradients of a stage; T: sum of a tied weight's uses; R: sum over replicas."""

    kind: str
    stage: int
    name: str = ""


@contextlib.contextmanager
def _events(trainer: Trainer) -> Iterator[list[_Event]]:
    """Log, from outside, which main gradients collectives touch and when W's run."""
    log: list[_Event] = []
    regions = {
        buffer.region_data(region).data_ptr(): (stage.context.stage, region.name)
        for stage in trainer.stages
        for buffer in stage.module.buffers_with_grads
        for region in buffer.regions
    }
    replicas = trainer.session.groups.dp

    def watched(name: str, position: int) -> Any:
        original = getattr(dist, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            touched = regions.get(args[position].data_ptr())
            if touched is not None:
                log.append(_Event("R" if kwargs["group"] is replicas else "T", *touched))
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, wrapper)

    def computed(name: str) -> Any:
        original = getattr(StageCompute, name)

        def wrapper(self: StageCompute, *args: Any, **kwargs: Any) -> Any:
            log.append(_Event("W", self.context.stage))
            return original(self, *args, **kwargs)

        return mock.patch.object(StageCompute, name, wrapper)

    with (
        watched("all_reduce", 0),
        watched("reduce_scatter_single", 1),
        computed("weight_backward"),
        computed("full_backward"),
    ):
        yield log


def _step_events(case: str) -> tuple[list[str], list[list[_Event]]]:
    """Names of this rank's main gradients, and the events of two steps."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, state, iterators = start(case)
        steps = []
        for _ in range(2):
            with _events(trainer) as log:
                train_step(trainer, pretrain_gpt.forward_step, iterators, state)
            steps.append(list(log))
    entries = [entry.name for entry in trainer.optimizer.entries]
    return entries, steps


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 2),
        ("--overlap-grad-reduce", 2),
        ("--use-distributed-optimizer", 2),
        (f"{_P2} --overlap-grad-reduce --pipeline-schedule zb-h1", 4),
        (f"{_P2} --use-distributed-optimizer --pipeline-schedule zb-h1", 4),
        (f"{_P2} --overlap-grad-reduce --pipeline-schedule dualpipe-v --num-layers 4", 4),
    ],
)
def test_every_gradient_is_summed_once_behind_its_last_w(
    pool: Any, flags: str, world_size: int
) -> None:
    """No hook is called by hand and none can be missed: one sum a parameter, at one event.

    A tied weight's uses are summed before the replicas are.
    """
    ranks = pool.run(world_size, _step_events, f"{_BASE} {flags}")
    tied = [event for _, steps in ranks for event in steps[0] if event.kind == "T"]
    on_two_ranks = _P2 in flags and "dualpipe-v" not in flags
    assert len(tied) == (4 if on_two_ranks else 0), "the two ends of two pipelines"
    for names, steps in ranks:
        for events in steps:
            summed = [event.name for event in events if event.kind == "R"]
            assert sorted(summed) == sorted(names)
            for stage in {event.stage for event in events}:
                order = [event.kind for event in events if event.stage == stage]
                first_sum, last_w = order.index("R"), len(order) - order[::-1].index("W")
                assert last_w <= first_sum, f"stage {stage}: {order}"
            for name in {event.name for event in events if event.kind == "T"}:
                kinds = [event.kind for event in events if event.name == name]
                assert kinds == ["T", "R"]
    if "dualpipe-v" in flags:
        kinds = [event.kind for event in ranks[1][1][0]]
        assert "W" in kinds[kinds.index("R") :], "a stage's sum overlaps another's backward"
