"""What is alive while a plan runs: never more than the plan says, nothing afterwards."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    SCHEDULES,
    plan_schedule,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from tests.distributed_tests import test_runtime as toy
from tests.worker_pool import RankFailure


def _peaks_while_running(plans: list[Plan]) -> list[tuple[int, int]]:
    """Per plan on this rank: the most activations alive at once, and how many are left over."""
    return [_peak(plan) for plan in plans]


def _peak(plan: Plan) -> tuple[int, int]:
    """Counts what a layer keeps from its F to its W: the input that `_SplitLinear` saves."""
    alive: list[weakref.ref] = []
    peak = 0
    original = torch.Tensor.clone
    forward = toy._Layer.forward

    def counted(self: Any, batch: torch.Tensor) -> torch.Tensor:
        nonlocal peak
        x = batch if self._input is None else self._input
        self._input = original(x)  # a tensor that nothing but this layer's graph holds
        alive.append(weakref.ref(self._input))
        output = forward(self, batch)
        self._input = None
        peak = max(peak, sum(ref() is not None for ref in alive))
        return output

    with mock.patch.object(toy._Layer, "forward", counted):
        toy._run(plan)  # nothing waits for the garbage collector
    return peak, sum(ref() is not None for ref in alive)


def _planned_peaks(plan: Plan) -> list[int]:
    """Stage activations held from F to W (or BW), per rank, by the simulator."""
    chunks = plan.placement.max_chunks
    timeline = simulate(plan, Costs.uniform(plan.placement))
    return [round(peak * chunks) for peak in timeline.peaks]


@pytest.mark.timeout(120)
def test_live_activations_stay_within_the_plan(pool: Any) -> None:
    for p in (2, 4):
        plans = [
            plan_schedule(name, PlanRequest(num_ranks=p, num_microbatches=m))
            for name in SCHEDULES
            for m in (3, 9)
        ]
        per_rank = pool.run(p, _peaks_while_running, plans)
        for index, plan in enumerate(plans):
            planned = _planned_peaks(plan)
            for rank, results in enumerate(per_rank):
                peak, left = results[index]
                assert peak <= planned[rank], f"{plan.schedule} p={p} rank {rank}"
                assert left == 0, f"{plan.schedule} p={p} rank {rank} keeps activations"


@pytest.mark.timeout(120)
def test_peaks_do_not_grow_with_the_number_of_micro_batches(pool: Any) -> None:
    few, many = (
        [plan_schedule(name, PlanRequest(num_ranks=2, num_microbatches=m)) for name in SCHEDULES]
        for m in (8, 32)
    )
    per_rank = pool.run(2, _peaks_while_running, few + many)
    for results in per_rank:
        for index, name in enumerate(SCHEDULES):
            assert results[index + len(few)][0] <= results[index][0], name


def _silent_layer(name: str) -> None:
    """Run zb-h1 on a model whose stage 1 has a layer that its forward does not use."""
    plan = plan_schedule("zb-h1", PlanRequest(num_ranks=2, num_microbatches=2))
    original = toy._Layer.__init__

    def with_unused(self: Any, context: Any) -> None:
        original(self, context)
        self.unused = torch.nn.Linear(2, 2)
        self.unused.layer_name = name

    if dist.get_rank() == 1:
        with mock.patch.object(toy._Layer, "__init__", with_unused):
            toy._run(plan)
    else:
        toy._run(plan)


def test_a_layer_that_queues_no_weight_gradient_is_named(pool: Any) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(2, _silent_layer, "decoder.layers.7.unused")
    said = str(caught.value)
    assert "B of stage 1, micro-batch 0 left no weight gradient" in said
    assert "from decoder.layers.7.unused" in said
