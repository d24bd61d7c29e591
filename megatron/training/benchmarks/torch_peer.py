"""torch.distributed.pipelining's schedules, to measure ours against.

Its order lists are read from attributes that torch does not document; nothing else depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

# Our name -> torch's, for schedules with the same placement.
PEER_SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}

_OPS = {
    "FORWARD": Op.F,
    "BACKWARD_INPUT": Op.B,
    "BACKWARD_WEIGHT": Op.W,
    "FULL_BACKWARD": Op.BW,
}


def contestant_name(schedule: str) -> str:
    return f"torch {schedule}"


def pipeline_stage(
    module: torch.nn.Module,
    plan: Plan,
    stage: int,
    *,
    example_input: torch.Tensor,
    example_output: torch.Tensor,
    weight_grad_builder: Callable[[], Callable[..., None]] | None = None,
) -> Any:
    """A torch PipelineStage of known shapes; without a builder torch splits the autograd graph."""
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(
        module,
        stage,
        plan.placement.num_stages,
        torch.device("cpu"),
        input_args=example_input.requires_grad_(stage > 0),
        output_args=example_output.requires_grad_(),
        dw_builder=weight_grad_builder,
    )


def build_schedule(
    plan: Plan, make_stage: Callable[[int], Any], loss: Callable[[Any, Any], torch.Tensor]
) -> Any:
    """Torch's schedule of the plan's name over this rank's stages of the plan's placement.

    A ValueError is torch's refusal of this p and m.
    """
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleSingle,
        get_schedule_class,
    )

    schedule_class = get_schedule_class(PEER_SCHEDULES[plan.schedule])
    stages = [make_stage(s) for s in plan.placement.stages_by_rank[dist.get_rank()]]
    return schedule_class(
        stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages,
        n_microbatches=plan.num_microbatches,
        loss_fn=loss,
        scale_grads=False,
    )


def step_function(
    plan: Plan,
    schedule: Any,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    losses: list[torch.Tensor] | None = None,
) -> Callable[[], None]:
    """One step of this rank; inputs and targets hold all micro-batches along their first axis.

    `losses` receives the losses of the last step on the rank with the last stage.
    """
    rank, placement = dist.get_rank(), plan.placement
    arguments = (inputs,) if placement.rank_of(0) == rank else ()
    has_loss = placement.rank_of(placement.last_stage) == rank

    def step() -> None:
        schedule.step(
            *arguments,
            target=targets if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )

    return step


def executed_plan(schedule: Any, ours: Plan) -> Plan:
    """The order that torch's schedule runs, for the simulator.

    Torch's 1F1B has no usable list (the loop that runs is another); its order is ours.
    """
    orders = getattr(schedule, "pipeline_order", None)
    if ours.schedule == "1f1b" or orders is None:
        return ours
    programs = [list(_instructions(orders[rank])) for rank in range(ours.num_ranks)]
    return Plan.of(ours.schedule, ours.placement, ours.num_microbatches, programs)


def _instructions(actions: Any) -> Iterator[Instruction]:
    for action in actions:
        if action is None:  # a bubble
            continue
        if action.sub_actions:
            yield from _instructions(action.sub_actions)
        else:
            op = _OPS[action.computation_type.name]
            yield Instruction(op, action.stage_index, action.microbatch_index)
