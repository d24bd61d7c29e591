"""Emulated devices: F, B and W of given length spent asleep inside the real runtime.

Everything but the passes is real: executor, stage compute, autograd, weight-gradient store, and
gloo messages of a real activation's size. Sleeping ranks leave the processors free, so p = 8 can be
measured on two cores. What a step takes beyond the simulator's time is what the runtime costs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.zerobubble.runtime.channels import PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.executor import Validation
from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.core.stage_context import StageContext
from megatron.core.weight_grad_store import WeightGradTask
from megatron.training.benchmarks import torch_peer
from megatron.training.benchmarks.measure import (
    Contestant,
    RankTime,
    measure,
    sharpen_sleep,
    sleep_overshoot_s,
    sleep_until,
    transfer_s,
)

# S sequence, B micro-batch, H hidden.


class PassSeconds(NamedTuple):
    """How long the passes of one micro-batch take."""

    forward: float
    input_grad: float
    weight_grad: float

    def per_chunk(self, num_chunks: int) -> PassSeconds:
        return PassSeconds(*(length / num_chunks for length in self))


@dataclass(frozen=True, kw_only=True)
class EmulatedCase:
    """One p, m and pass length, measured for several schedules in turns."""

    plans: tuple[Plan, ...]  # one per schedule, all of one p and m
    peer_schedules: tuple[str, ...]  # of these plans, the schedules that torch runs too
    rank_seconds: PassSeconds  # of all chunks of one rank together
    shape: tuple[int, int, int]  # (S, B, H) of an activation
    repeats: int
    in_a_row: int = 1

    @property
    def num_ranks(self) -> int:
        return self.plans[0].num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.plans[0].num_microbatches

    @property
    def work_s(self) -> float:
        """The zero-bubble bound of a step: m (T_F + T_B + T_W)."""
        return self.num_microbatches * sum(self.rank_seconds)

    @property
    def expected_s(self) -> float:
        """How long measuring the case takes, by the simulator; torch taken to be as fast."""
        if self.work_s == 0:
            return 0.0
        steps = self.repeats * (self.in_a_row + 1 if self.in_a_row > 1 else 1) + 1
        return steps * sum(
            simulate(plan, costs_of(self.rank_seconds, plan.placement)).makespan
            * (2 if plan.schedule in self.peer_schedules else 1)
            for plan in self.plans
        )

    @property
    def where(self) -> str:
        pass_ms = 1e3 * self.rank_seconds.forward
        return f"p={self.num_ranks} m={self.num_microbatches} T={pass_ms:g} ms"

    def without_passes(self) -> EmulatedCase:
        """The same steps with passes of length zero: what is left is the host's work."""
        return replace(self, rank_seconds=PassSeconds(0.0, 0.0, 0.0))


def costs_of(seconds: PassSeconds, placement: Placement, transfer_s: float = 0.0) -> Costs:
    """What the simulator is told, in seconds."""
    return Costs.uniform(placement, **seconds._asdict(), transfer=transfer_s)


class RankResult(NamedTuple):
    """What one rank has measured of a case."""

    times: dict[str, list[RankTime]]
    overshoot_s: float  # of a sleep
    transfer_s: float  # of one message
    peer_plans: dict[str, Plan]  # the orders that torch's schedules ran
    refusals: dict[str, str]  # torch's reasons not to run a schedule


def run_case(case: EmulatedCase) -> RankResult:
    """Measure one case; runs on each of its ranks, over the default group."""
    sharpen_sleep()
    peers = peers_of(case)
    ours = [Contestant(plan.schedule, OurPipeline(plan, case)) for plan in case.plans]
    overshoot = sleep_overshoot_s()
    transfer = transfer_s(case.shape, torch.float32)
    times = measure([*ours, *peers.contestants], repeats=case.repeats, in_a_row=case.in_a_row)
    return RankResult(times, overshoot, transfer, peers.plans, peers.refusals)


class EmulatedStage(torch.nn.Module):
    """A stage whose passes take `seconds`, whatever the host does meanwhile for the pass itself.

    `sink` takes the weight gradient's task, as from any layer that can split its backward. The
    gradient of `anchor`, its only parameter, stays zero unless `trained`: then every W adds 1.
    """

    def __init__(
        self,
        seconds: PassSeconds,
        sink: Any,
        *,
        is_last: bool,
        stage: int = 0,
        trained: bool = False,
    ) -> None:
        super().__init__()
        self.seconds, self.sink, self.is_last = seconds, sink, is_last
        self.stage, self.trained = stage, trained
        # Gives the first stage's output, whose input has no gradient, a graph.
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self._input: torch.Tensor | None = None

    def global_parameter_name(self, name: str) -> str:
        """Unlike any other stage's, as the optimizer wants it."""
        return f"stages.{self.stage}.{name}"

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        object.__setattr__(self, "_input", tensor)  # a Module's own takes 20 us for it

    def forward(self, batch: torch.Tensor | None) -> torch.Tensor:
        """(S, B, H) -> (S, B, H); the last stage gives its loss, one number."""
        end = time.perf_counter() + self.seconds.forward
        output = _Passes.apply(batch if self._input is None else self._input, self.anchor, self)
        sleep_until(end)
        return output


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, stage: EmulatedStage
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.stage = stage
        return x.new_zeros(1) if stage.is_last else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        end = time.perf_counter() + ctx.stage.seconds.input_grad
        (x,) = ctx.saved_tensors
        grad_input = x.clone() if ctx.needs_input_grad[0] else None
        sleep_until(end)
        stage = ctx.stage
        main_grad = stage.anchor.main_grad if stage.trained else None
        arguments = (stage.seconds.weight_grad, main_grad)
        stage.sink.put(WeightGradTask("emulated", _weight_pass, arguments))
        return grad_input, None, None


def _weight_pass(length_s: float, main_grad: torch.Tensor | None) -> None:
    end = time.perf_counter() + length_s
    if main_grad is not None:
        main_grad += 1.0
    sleep_until(end)


def _seconds_of_stage(case: EmulatedCase, plan: Plan, stage: int) -> PassSeconds:
    held = plan.placement.stages_by_rank[plan.placement.rank_of(stage)]
    return case.rank_seconds.per_chunk(len(held))


class OurPipeline:
    """This rank's part of a plan on our runtime; called, it runs one iteration."""

    def __init__(self, plan: Plan, case: EmulatedCase, *, trained: bool = False) -> None:
        self._plan, self._shape = plan, case.shape
        self._stages = [
            _our_stage(plan, case, stage, trained=trained)
            for stage in plan.placement.stages_by_rank[dist.get_rank()]
        ]
        self._batch = itertools.repeat(torch.zeros(case.shape))
        self._runtime = PipelineRuntime(
            stages=self._stages,
            groups=PipelineGroups(dist.group.WORLD),
            plan_for=lambda m: plan,
            hidden_size=case.shape[2],
            pipeline_dtype=torch.float32,
            device=torch.device("cpu"),
            world_group=dist.group.WORLD,
        )

    @property
    def model(self) -> list[DistributedDataParallel]:
        return [stage.module for stage in self._stages]

    def __call__(self, validation: Validation | None = None) -> None:
        sequence, micro_batch, _ = self._shape
        self._runtime(
            forward_step_func=_forward_step,
            data_iterator=[self._batch if s.context.is_first else None for s in self._stages],
            model=None,
            num_microbatches=self._plan.num_microbatches,
            seq_length=sequence,
            micro_batch_size=micro_batch,
            validation=validation,
        )


def _our_stage(plan: Plan, case: EmulatedCase, stage: int, *, trained: bool) -> StageCompute:
    context = StageContext(stage=stage, num_stages=plan.placement.num_stages)
    module = EmulatedStage(
        _seconds_of_stage(case, plan, stage),
        context.store,
        is_last=context.is_last,
        stage=stage,
        trained=trained,
    )
    config = DistributedDataParallelConfig()
    return StageCompute(DistributedDataParallel(SimpleNamespace(), config, module), context)


def _forward_step(iterator: Iterator[torch.Tensor] | None, module: torch.nn.Module) -> Any:
    return module(next(iterator) if iterator is not None else None), _our_loss


def _our_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return output.sum(), {}


@dataclass(frozen=True)
class Peers:
    """Torch's contestants of a case, the orders they run, and torch's reasons for lacking some."""

    contestants: list[Contestant]
    plans: dict[str, Plan]
    refusals: dict[str, str]


def peers_of(case: EmulatedCase) -> Peers:
    """This rank's part of the case's plans whose schedules torch is to run too."""
    peers = Peers([], {}, {})
    for plan in case.plans:
        if plan.schedule not in case.peer_schedules:
            continue
        try:
            schedule = _peer_schedule(plan, case)
        except ValueError as error:
            peers.refusals[plan.schedule] = str(error)
            continue
        peers.plans[plan.schedule] = torch_peer.executed_plan(schedule, plan)
        peers.contestants.append(_peer_contestant(plan, schedule, case))
    return peers


def _peer_schedule(plan: Plan, case: EmulatedCase) -> Any:
    """Torch's schedule of the plan's name over the same emulated stages.

    It gets the cheaper of its two ways to split a backward: a `dw_builder` that hands out the
    stage's own deferred work, in place of a second walk through the autograd graph.
    """

    def make_stage(stage: int) -> Any:
        sink = _TasksOfOneBackward()
        is_last = stage == plan.placement.last_stage
        module = EmulatedStage(_seconds_of_stage(case, plan, stage), sink, is_last=is_last)
        return torch_peer.pipeline_stage(
            module,
            plan,
            stage,
            example_input=torch.zeros(case.shape),
            example_output=torch.zeros(1 if is_last else case.shape),
            weight_grad_builder=sink.take,
        )

    return torch_peer.build_schedule(plan, make_stage, lambda output, _: output.sum())


def _peer_contestant(plan: Plan, schedule: Any, case: EmulatedCase) -> Contestant:
    m = plan.num_microbatches
    inputs = torch.zeros(m * case.shape[0], *case.shape[1:])  # torch cuts along the first axis
    step = torch_peer.step_function(plan, schedule, inputs, torch.zeros(m))
    return Contestant(torch_peer.contestant_name(plan.schedule), step)


class _TasksOfOneBackward:
    """Collects what one backward puts, until torch asks for it as the work of its W."""

    def __init__(self) -> None:
        self._tasks: list[WeightGradTask] = []

    def put(self, task: WeightGradTask) -> None:
        self._tasks.append(task)

    def take(self) -> Any:
        tasks, self._tasks = self._tasks, []

        def run() -> None:
            for task in tasks:
                task.function(*task.arguments)

        return run
