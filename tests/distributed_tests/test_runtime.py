"""The runtime on a toy model: any valid plan gives one process's gradients, whatever the delays."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.zerobubble.runtime.channels import Channels, PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    Op,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import (
    SCHEDULES,
    plan_schedule,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.stage_context import StageContext
from megatron.core.weight_grad_store import WeightGradTask, accumulate_linear_weight_grad

# S sequence, B micro-batch, H hidden; one layer per stage: tanh(x W^T).
S, B, H = 3, 2, 8


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.store.put(WeightGradTask("linear", accumulate_linear_weight_grad, (weight, x, grad)))
        return grad @ weight, None, None


class _Layer(torch.nn.Module):
    def __init__(self, context: StageContext) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(context.stage)
        self.weight = torch.nn.Parameter(torch.randn(H, H, generator=generator))
        self.bias = torch.nn.Parameter(torch.zeros(H))
        self._context, self._input = context, None

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        self._input = tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch if self._input is None else self._input
        return torch.tanh(_SplitLinear.apply(x, self.weight, self._context.store) + self.bias)


def _batches(num_microbatches: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    for _ in range(num_microbatches):
        yield torch.randn(S, B, H, generator=generator)


def _forward_step(iterator: Iterator[torch.Tensor] | None, module: torch.nn.Module) -> Any:
    batch = next(iterator) if iterator is not None else None

    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.square().mean()
        return loss, {"loss": loss.item()}

    return module(batch), loss_function


def _stages(placement: Placement, rank: int) -> list[StageCompute]:
    stages = []
    for stage in placement.stages_by_rank[rank]:
        context = StageContext(stage=stage, num_stages=placement.num_stages)
        module = DistributedDataParallel(
            SimpleNamespace(), DistributedDataParallelConfig(), _Layer(context)
        )
        stages.append(StageCompute(module, context))
    return stages


def _run(plan: Plan, *, check_identity: bool = False) -> tuple[list[float], dict[int, Any]]:
    """Losses, and each of this rank's stages' gradients, after two iterations of the plan."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.group.WORLD if dist.is_initialized() else None
    stages = _stages(plan.placement, rank)
    runtime = PipelineRuntime(
        stages=stages,
        groups=PipelineGroups(group),
        plan_for=lambda m: plan,
        hidden_size=H,
        pipeline_dtype=torch.float32,
        device=torch.device("cpu"),
        world_group=group,
        check_message_identity=check_identity,
    )
    m = plan.num_microbatches
    losses: list[float] = []
    for _ in range(2):
        iterators = [_batches(m) if s.context.is_first else None for s in stages]
        reported = runtime(
            forward_step_func=_forward_step,
            data_iterator=iterators,
            model=None,
            num_microbatches=m,
            seq_length=S,
            micro_batch_size=B,
        )
        losses += [entry["loss"] for entry in reported]
    grads = {s.context.stage: s.module.buffer.data.clone().numpy() for s in stages}
    return losses, grads


def _plans() -> list[Plan]:
    plans = []
    for name, schedule in SCHEDULES.items():
        for p, m in ((2, 3), (3, 2), (4, 1), (4, 5), (5, 4)):
            if not schedule.splits_backward or p < 5:
                plans.append(plan_schedule(name, PlanRequest(num_ranks=p, num_microbatches=m)))
    return plans


def _run_all(plans: list[Plan], seed: int | None) -> list[tuple[list[float], dict[int, Any]]]:
    with _delays(seed):
        return [_run(plan, check_identity=seed is not None) for plan in plans]


_DELAYED = {
    StageCompute: ("forward", "input_backward", "weight_backward", "full_backward"),
    Channels: ("post_receive", "wait_receive", "send"),
}


@contextlib.contextmanager
def _delays(seed: int | None) -> Iterator[None]:
    """Sleep at random before each pass and each end of a message: interleaving must not matter.

    Every other time, by chance, up to 3 ms; else not at all.
    """
    if seed is None:
        yield
        return
    chance = random.Random(f"{seed} {dist.get_rank()}")

    def delayed(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            time.sleep(max(0.0, chance.uniform(-0.003, 0.003)))
            return function(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as patches:
        for owner, names in _DELAYED.items():
            for name in names:
                patch = mock.patch.object(owner, name, delayed(getattr(owner, name)))
                patches.enter_context(patch)
        yield


def _single(num_stages: int, num_microbatches: int) -> tuple[list[float], dict[int, Any]]:
    """One process that holds all stages, one micro-batch after the other."""
    placement = Placement.looped(1, num_stages)
    program = []
    for j in range(num_microbatches):
        program += [Instruction(Op.F, s, j) for s in range(num_stages)]
        program += [Instruction(Op.BW, s, j) for s in reversed(range(num_stages))]
    return _run(Plan.of("single", placement, num_microbatches, [program]))


def _assert_same(plan: Plan, ranks: list[tuple[list[float], dict[int, Any]]]) -> None:
    losses, grads = _single(plan.placement.num_stages, plan.num_microbatches)
    assert [loss for reported, _ in ranks for loss in reported] == losses, plan.schedule
    merged = {stage: grad for _, by_stage in ranks for stage, grad in by_stage.items()}
    for stage, grad in grads.items():
        assert grad.any(), "the reference has a gradient"
        assert (merged[stage] == grad).all(), f"{plan.schedule}: stage {stage} differs"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_every_plan_gives_one_process_gradients_bit_for_bit(pool: Any, seed: int | None) -> None:
    plans = _plans()
    for p in sorted({plan.num_ranks for plan in plans}):
        chosen = [plan for plan in plans if plan.num_ranks == p]
        per_rank = pool.run(p, _run_all, chosen, seed)
        for index, plan in enumerate(chosen):
            _assert_same(plan, [results[index] for results in per_rank])


def test_gradients_equal_plain_autograd() -> None:
    """The reference itself, against torch's own backward of the whole chain."""
    _, grads = _single(3, 2)
    layers = [_Layer(StageContext(stage=s, num_stages=3)) for s in range(3)]
    total = torch.zeros(())
    for batch in _batches(2):
        x = batch
        for layer in layers:
            x = torch.tanh(x @ layer.weight.t() + layer.bias)
        total = total + x.square().mean() / 2
    total.backward()
    for stage, layer in enumerate(layers):
        weight = torch.from_numpy(grads[stage])[: H * H].view(H, H)
        torch.testing.assert_close(weight, 2 * layer.weight.grad, rtol=1e-5, atol=1e-7)


def _failing_plan() -> str:
    def plan_for(num_microbatches: int) -> Plan:
        raise ScheduleError("no plan fits into 1 byte")

    stages = _stages(Placement.plain(dist.get_world_size()), dist.get_rank())
    runtime = PipelineRuntime(
        stages=stages,
        groups=PipelineGroups(dist.group.WORLD),
        plan_for=plan_for,
        hidden_size=H,
        pipeline_dtype=torch.float32,
        device=torch.device("cpu"),
        world_group=dist.group.WORLD,
    )
    try:
        runtime.plan(4)
    except ScheduleError as error:
        return str(error)
    return "no error"


def test_a_plan_that_rank_0_cannot_make_stops_every_rank(pool: Any) -> None:
    assert pool.run(2, _failing_plan) == ["no plan fits into 1 byte"] * 2


def _fails_in_second_backward() -> None:
    plan = plan_schedule("1f1b", PlanRequest(num_ranks=1, num_microbatches=3))
    original = StageCompute.full_backward

    def failing(self: StageCompute, microbatch: int, grad: Any, **options: Any) -> None:
        if microbatch == 1:
            raise RuntimeError("out of memory")
        original(self, microbatch, grad, **options)

    with mock.patch.object(StageCompute, "full_backward", failing):
        _run(plan)


def test_an_error_names_the_instruction_and_its_neighbours() -> None:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        _fails_in_second_backward()
    assert caught.value.__notes__ == ["rank 0 at step 3: 0F0 0BW0 0F1 [0BW1] 0F2 0BW2 0AR2"]
