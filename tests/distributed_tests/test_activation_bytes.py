"""Bytes of activations that a rank holds, counted in the process while real training runs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pretrain_gpt
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.memory import peak_memory
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.training.evaluation import run_iteration
from tests.training_runs import LLAMA, start

P = 4
# A layer's activations (48 tokens of width 64) are far larger than ids, losses and messages.
_MODEL = (
    f"{LLAMA} --num-layers 8 --hidden-size 64 --ffn-hidden-size 176 --seq-length 48 "
    f"--max-position-embeddings 48 --micro-batch-size 1 --pipeline-model-parallel-size {P}"
)


class _LiveBytes(TorchDispatchMode):
    """Knows every storage that an operation made while it was on, and which are still alive.

    Forward, backward and W alike, the store's and the messages' tensors among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        given: set[StorageWeakRef] | None = None
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage in self._sizes:
                    continue
                if given is None:
                    given = set(self._storages((args, kwargs)))
                if storage not in given:  # else a view of what was there before, such as a weight
                    self._sizes[storage] = tensor.untyped_storage().nbytes()
        return made

    def now(self) -> int:
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())

    @staticmethod
    def _storages(values: Any) -> Iterator[StorageWeakRef]:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                yield StorageWeakRef(value.untyped_storage())


class _Held(NamedTuple):
    """Bytes on one rank: the most between any two passes, and what is left after the iteration."""

    most: int
    left: int


@contextlib.contextmanager
def _between_passes(look: Callable[[], object]) -> Iterator[None]:
    def watched(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look()
            return result

        return wrapper

    names = ("forward", "input_backward", "weight_backward", "full_backward")
    patches = {name: watched(getattr(StageCompute, name)) for name in names}
    with mock.patch.multiple(StageCompute, **patches):
        yield


def _held_by(cases: list[str]) -> list[_Held]:
    return [_held(case) for case in cases]


def _held(case: str) -> _Held:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, _, iterators = start(case)
    m = trainer.session.microbatches.get()
    live = _LiveBytes()
    seen: list[int] = []
    with _between_passes(lambda: seen.append(live.now())), live:
        run_iteration(trainer, pretrain_gpt.forward_step, iterators, m, forward_only=False)
    assert len(seen) >= 2 * m, "passes were seen"
    return _Held(max(seen), live.now())


def _cases(num_microbatches: int, schedules: Any) -> list[str]:
    base = f"{_MODEL} --global-batch-size {num_microbatches} --pipeline-schedule"
    return [f"{base} {schedule}" for schedule in schedules]


def _plan(schedule: str, m: int) -> Plan:
    return plan_schedule(schedule, PlanRequest(num_ranks=P, num_microbatches=m))


@pytest.fixture(scope="module")
def held(pool: Any) -> dict[str, list[_Held]]:
    """Of every schedule at m = 8, rank by rank."""
    per_rank = pool.run(P, _held_by, _cases(8, SCHEDULES), timeout_s=120)
    return {s: [rank[i] for rank in per_rank] for i, s in enumerate(SCHEDULES)}


@pytest.mark.timeout(180)
def test_no_rank_holds_more_than_its_plan_says(held: dict[str, list[_Held]]) -> None:
    """In units of what one micro-batch of one rank's layers keeps from F to BW under 1f1b."""
    unit = held["1f1b"][0].most / P
    for schedule, ranks in held.items():
        plan = _plan(schedule, 8)
        planned = peak_memory(plan, Costs.uniform(plan.placement))
        for rank, (measured, most) in enumerate(zip(ranks, planned, strict=True)):
            # Beside whole micro-batches there are messages and losses: 4 % of what 1f1b holds.
            assert measured.most <= (most + 0.04 * P) * unit, f"{schedule} rank {rank}"
            assert measured.left < 0.05 * unit, f"{schedule} rank {rank} keeps activations"
    assert held["1f1b"][P - 1].most < 0.3 * held["1f1b"][0].most, "it is not the model's own size"


@pytest.mark.timeout(180)
def test_half_and_a_third_of_the_memory_of_1f1b(pool: Any, held: dict[str, list[_Held]]) -> None:
    """Against its worst rank: v-half and v-min as they are planned, and under tighter limits.

    With 4 ranks the paper's patterns hold 3 and 2 micro-batches of 4 (arXiv:2405.15362), so their
    halves and thirds are those of many ranks; limits of 2 and 1.5 give them here as well.
    """
    worst = max(rank.most for rank in held["1f1b"])
    assert max(rank.most for rank in held["zb-v"]) <= 1.04 * worst
    assert max(rank.most for rank in held["v-half"]) <= 0.79 * worst
    assert max(rank.most for rank in held["v-min"]) <= 0.54 * worst
    shares = {
        "v-half --zero-bubble-max-pending-backward 2": 0.6,
        "v-min --zero-bubble-max-pending-backward 1.5": 0.45,
    }
    per_rank = pool.run(P, _held_by, _cases(8, shares), timeout_s=60)
    for index, (schedule, share) in enumerate(shares.items()):
        assert max(rank[index].most for rank in per_rank) <= share * worst, schedule


@pytest.mark.timeout(180)
def test_bytes_do_not_grow_with_the_micro_batches(pool: Any, held: dict[str, list[_Held]]) -> None:
    """m = 32 holds what m = 8 does, to within the scalars that are kept for the log."""
    schedules = ("1f1b", "zb-v", "v-half")
    for rank, found in enumerate(pool.run(P, _held_by, _cases(32, schedules), timeout_s=120)):
        for schedule, many in zip(schedules, found, strict=True):
            few = held[schedule][rank].most
            assert many.most <= 1.01 * few, f"{schedule} rank {rank}: {few} -> {many.most} bytes"
