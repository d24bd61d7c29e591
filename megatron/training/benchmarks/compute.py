"""Real compute: a small Llama on the real runtime, one thread per rank, every schedule in turns.

Beside the measured step stands the one that the simulator predicts from passes measured in the
same run, so a gain over 1F1B can be held against the gain that was promised. A step is forward
and backward of all micro-batches; gradient clearing and optimizer are outside the timing.
"""

# S sequence, B micro-batch, H hidden, V vocabulary, m micro-batches.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from megatron.core.pipeline_parallel.zerobubble.runtime.channels import PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import LossScaling, StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.training.benchmarks import torch_peer
from megatron.training.benchmarks.llama import (
    LlamaSizes,
    OrdinaryStage,
    build_model,
    stage_contexts,
    with_gradient_buffer,
)
from megatron.training.benchmarks.measure import Contestant, RankTime, measure, transfer_s

Losses = dict[str, Callable[[], float]]  # by contestant: the mean loss of its last step


@dataclass(frozen=True, kw_only=True)
class ComputeCase:
    """One p and m, measured for several schedules in turns."""

    plans: tuple[Plan, ...]  # one per schedule, all of one p and m
    peer_schedules: tuple[str, ...]  # of these plans, the schedules that torch runs too
    sizes: LlamaSizes
    repeats: int

    @property
    def num_ranks(self) -> int:
        return self.plans[0].num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.plans[0].num_microbatches

    @property
    def where(self) -> str:
        return f"p={self.num_ranks} m={self.num_microbatches}"

    @property
    def tokens_per_step(self) -> int:
        return self.num_microbatches * self.sizes.micro_batch_size * self.sizes.seq_length


class StageSeconds(NamedTuple):
    """Measured passes of one micro-batch in one stage; medians."""

    forward: float
    input_grad: float
    weight_grad: float
    full_backward: float


class Calibration(NamedTuple):
    """What one rank has measured of single passes and messages."""

    passes: dict[str, dict[int, StageSeconds]]  # by placement's name: of this rank's stages
    transfer_s: float  # of one message


class RankResult(NamedTuple):
    """What one rank has measured of a case."""

    times: dict[str, list[RankTime]]
    calibration: Calibration
    losses: dict[str, float]  # by contestant; empty where the loss is not
    refusals: dict[str, str]  # torch's reasons not to run a schedule


def merged(calibrations: Sequence[Calibration]) -> Calibration:
    """All ranks' stages together."""
    passes: dict[str, dict[int, StageSeconds]] = {}
    for calibration in calibrations:
        for placement, stages in calibration.passes.items():
            passes.setdefault(placement, {}).update(stages)
    return Calibration(passes, calibrations[0].transfer_s)


def costs_of(calibration: Calibration, placement: Placement, *, splits_backward: bool) -> Costs:
    """What planners and simulator are told of a placement's stages, in seconds.

    A plan that does not split is told the fused pass: its two shares add up to that.
    """
    passes = calibration.passes[placement.name]
    stages = [passes[stage] for stage in range(placement.num_stages)]
    held = tuple(1 / len(placement.stages_by_rank[slot.rank]) for slot in placement.slots)
    return Costs(
        forward=tuple(s.forward for s in stages),
        input_grad=tuple(s.input_grad for s in stages),
        weight_grad=tuple(
            s.weight_grad if splits_backward else max(0.0, s.full_backward - s.input_grad)
            for s in stages
        ),
        transfer=calibration.transfer_s,
        held_f_to_b=held,
        held_b_to_w=held,
    )


def run_case(case: ComputeCase) -> RankResult:
    """Measure one case; runs on each of its ranks, over the default group."""
    losses: Losses = {}
    refusals: dict[str, str] = {}
    stages = {p.placement.name: _our_stages(case.sizes, p.placement) for p in case.plans}
    watches = {name: PassWatch(held, case.sizes) for name, held in stages.items()}
    contestants = [
        _our_contestant(plan, stages[plan.placement.name], case, losses) for plan in case.plans
    ]
    for plan in case.plans:
        if plan.schedule in case.peer_schedules:
            try:
                contestants.append(_peer_contestant(plan, case, losses))
            except ValueError as error:
                refusals[plan.schedule] = str(error)
    transfer = transfer_s(case.sizes.activation_shape, torch.float32)
    passes = [Contestant(f"passes {name}", watch.step) for name, watch in watches.items()]
    times = measure([*passes, *contestants], repeats=case.repeats)
    return RankResult(
        {contestant.name: times[contestant.name] for contestant in contestants},
        Calibration({name: watch.medians() for name, watch in watches.items()}, transfer),
        {name: loss() for name, loss in losses.items()},
        refusals,
    )


def calibrate(sizes: LlamaSizes, placements: Sequence[Placement], repeats: int) -> Calibration:
    """Passes of this rank's stages under each placement; collective over the default group."""
    watches = {p.name: PassWatch(_our_stages(sizes, p), sizes) for p in placements}
    passes = [Contestant(name, watch.step) for name, watch in watches.items()]
    measure(passes, repeats=repeats)
    transfer = transfer_s(sizes.activation_shape, torch.float32)
    return Calibration({name: watch.medians() for name, watch in watches.items()}, transfer)


class PassWatch:
    """Times the passes of this rank's stages outside a pipeline, all ranks at the same time.

    Two micro-batches are under way, as in a pipeline: a pass that follows the one before it on the
    same micro-batch finds everything in the processor's caches, and is 2 to 3 % faster.
    """

    def __init__(self, stages: Sequence[StageCompute], sizes: LlamaSizes) -> None:
        self._stages = stages
        (self._batch,) = _batches(sizes, 1)
        generator = torch.Generator().manual_seed(1)
        self._activation = torch.randn(sizes.activation_shape, generator=generator)
        self._taken: dict[int, list[StageSeconds]] = {s.context.stage: [] for s in stages}

    def step(self) -> None:
        """Run two micro-batches through every stage, once split and once fused."""
        for stage in self._stages:
            grad = None if stage.context.is_last else self._activation
            forward = self._seconds(partial(self._forward, stage))
            input_grad = self._seconds(partial(stage.input_backward, grad=grad, hand_on=_nowhere))
            weight_grad = self._seconds(stage.weight_backward)
            self._seconds(partial(self._forward, stage))
            full = self._seconds(partial(stage.full_backward, grad=grad, hand_on=_nowhere))
            passes = zip(forward, input_grad, weight_grad, full, strict=True)
            self._taken[stage.context.stage] += [StageSeconds(*taken) for taken in passes]

    def _seconds(self, run_pass: Callable[[int], object]) -> list[float]:
        """How long the pass takes, of one micro-batch after the other."""
        seconds = []
        for microbatch in range(2):
            start = time.perf_counter()
            run_pass(microbatch)
            seconds.append(time.perf_counter() - start)
        return seconds

    def medians(self) -> dict[int, StageSeconds]:
        return {
            stage: StageSeconds(*map(statistics.median, zip(*taken, strict=True)))
            for stage, taken in self._taken.items()
        }

    def _forward(self, stage: StageCompute, microbatch: int) -> None:
        stage.forward(
            microbatch,
            None if stage.context.is_first else self._activation,
            forward_step=_forward_step,
            data_iterator=iter([self._batch]),
            scaling=LossScaling(),
            forward_only=False,
            hand_on=_nowhere,
        )


def _nowhere(value: torch.Tensor) -> None:
    """A pass outside a pipeline has no neighbour."""


# Tokens and labels (B, S) of one micro-batch.
Batch = tuple[torch.Tensor, torch.Tensor]


def _batches(sizes: LlamaSizes, num_microbatches: int) -> list[Batch]:
    """A step's micro-batches: the same on every rank and for every contestant."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_microbatches, sizes.micro_batch_size, sizes.seq_length + 1)
    text = torch.randint(sizes.vocab_size, shape, generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


def _our_stages(sizes: LlamaSizes, placement: Placement) -> list[StageCompute]:
    mine = placement.stages_by_rank[dist.get_rank()]
    return [
        with_gradient_buffer(build_model(sizes, context), context)
        for context in stage_contexts(sizes, placement, mine)
    ]


def _our_contestant(
    plan: Plan, stages: list[StageCompute], case: ComputeCase, losses: Losses
) -> Contestant:
    sizes, batches = case.sizes, _batches(case.sizes, case.num_microbatches)
    runtime = PipelineRuntime(
        stages=stages,
        groups=PipelineGroups(dist.group.WORLD),
        plan_for=lambda m: plan,
        hidden_size=sizes.hidden_size,
        pipeline_dtype=torch.float32,
        device=torch.device("cpu"),
        world_group=dist.group.WORLD,
    )
    reported: list[torch.Tensor] = []

    def step() -> None:
        reported[:] = runtime(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in stages],
            model=None,
            num_microbatches=plan.num_microbatches,
            seq_length=sizes.seq_length,
            micro_batch_size=sizes.micro_batch_size,
        )

    def clear_gradients() -> None:
        for stage in stages:
            stage.module.zero_grad_buffer()

    if any(stage.context.is_last for stage in stages):
        losses[plan.schedule] = lambda: float(torch.stack(reported).mean())
    return Contestant(plan.schedule, step, clear_gradients)


def _forward_step(iterator: Iterator[Batch] | None, module: Any) -> Any:
    """Embedding and head read the batch; the stages between have no use for it."""
    assert iterator is not None
    tokens, labels = next(iterator)
    return module(tokens, labels=labels), _our_loss


def _our_loss(losses: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Losses of the tokens (B, S) -> their mean, twice: to start backward from, and to report."""
    loss = losses.mean()
    return loss, loss.detach()


def _peer_contestant(plan: Plan, case: ComputeCase, losses: Losses) -> Contestant:
    """Torch's schedule of the plan's name over the same model of torch's ordinary layers."""
    sizes, placement = case.sizes, plan.placement
    modules: list[OrdinaryStage] = []

    def make_stage(stage: int) -> Any:
        (context,) = stage_contexts(sizes, placement, [stage])
        modules.append(OrdinaryStage(build_model(sizes, context)))
        tokens = torch.zeros(sizes.micro_batch_size, sizes.seq_length, dtype=torch.long)
        logits = torch.zeros(*tokens.shape, sizes.vocab_size)
        hidden = torch.zeros(sizes.activation_shape)
        return torch_peer.pipeline_stage(
            modules[-1],
            plan,
            stage,
            example_input=tokens if context.is_first else hidden,
            example_output=logits if context.is_last else hidden.clone(),
        )

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean = functional.cross_entropy(logits.view(-1, sizes.vocab_size), labels.view(-1))
        return mean / plan.num_microbatches

    schedule = torch_peer.build_schedule(plan, make_stage, loss)
    batches = _batches(sizes, case.num_microbatches)
    tokens, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    parts: list[torch.Tensor] = []
    step = torch_peer.step_function(plan, schedule, tokens, labels, parts)
    name = torch_peer.contestant_name(plan.schedule)

    def clear_gradients() -> None:
        for module in modules:
            module.zero_grad()

    if placement.rank_of(placement.last_stage) == dist.get_rank():
        losses[name] = lambda: float(torch.stack(parts).detach().sum())
    return Contestant(name, step, clear_gradients)
