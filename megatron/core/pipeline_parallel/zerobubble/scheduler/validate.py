"""Proves that a plan can run, before any process starts: `validate(plan)` or a ScheduleError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Costs
from .execution import start_times
from .instruction import Instruction, Op, ScheduleError
from .memory import ROUNDING, memory_levels
from .plan import Plan


def validate(
    plan: Plan,
    *,
    costs: Costs | None = None,
    memory_limits: Sequence[float] | None = None,
    training: bool = False,
) -> None:
    """Raise a ScheduleError that names the first bad instruction, unless all of this holds:

    - stages and micro-batches are in range, and instructions on the ranks the placement names;
    - each stage runs F, and B and W (or BW), once per micro-batch; a plan with forwards and nothing
      else is an evaluation plan, and refused if it is to be used for `training`;
    - a stage's forwards, backwards and weight gradients each run in micro-batch order: data is read
      and gradients are summed in one order, whatever the schedule;
    - a stage's gradient reduction (AR), if stated, comes after its last weight gradient;
    - a check of the last optimizer step (PV), if stated, is there once on every rank, before all
      that a wrong step could not be taken back from (see `first_irrevocable`);
    - every need is made before it is used, and the ranks' orders together do not deadlock under
      FIFO channels (see execution.py);
    - if `memory_limits` (one per rank) is given: the memory a rank holds never exceeds its limit.
      `costs` says what is held; None means one unit for all the chunks of a rank.

    Linear in the number of instructions.
    """
    _check_sizes(plan)
    if training and plan.forward_only:
        raise ScheduleError(
            "the plan has forwards only, so nothing would be trained; "
            "add each stage's B and W (or BW) for every micro-batch"
        )
    _check_instructions(plan)
    _check_each_once_in_order(plan)
    _check_validations(plan)
    costs = costs or Costs.uniform(plan.placement)
    if costs.num_stages != plan.placement.num_stages:
        raise ScheduleError(
            f"costs are given for {costs.num_stages} stages, "
            f"but the plan has {plan.placement.num_stages}"
        )
    start_times(plan, costs)  # raises on a deadlock
    if memory_limits is not None:
        _check_memory(plan, costs, memory_limits)


def last_weight_grad_steps(plan: Plan) -> dict[int, int]:
    """Stage -> the step, on its rank, of its last W or BW; empty for a forward-only plan.

    From the end of that step on the stage's weight gradients are complete.
    """
    return {
        instruction.stage: step
        for program in plan.programs
        for step, instruction in enumerate(program)
        if instruction.op in (Op.W, Op.BW)
    }


def reduction_steps(plan: Plan) -> dict[int, int]:
    """Stage -> the step, on its rank, at whose end the reduction of its gradients starts.

    That is the stage's AR where the plan has one, and its last weight gradient otherwise.
    """
    stated = {
        instruction.stage: step
        for program in plan.programs
        for step, instruction in enumerate(program)
        if instruction.op is Op.AR
    }
    return {**last_weight_grad_steps(plan), **stated}


def first_irrevocable(plan: Plan, rank: int) -> int:
    """The first step of a rank that must not run on the weights of a wrong optimizer step.

    Forwards can be thrown away and run again. A backward would add to gradients that the repeated
    step still needs, and the last stage's forward scales the loss by what that step decides (fp16).
    """
    last = plan.placement.last_stage
    program = plan.programs[rank]
    return next(
        (
            step
            for step, (op, stage, _) in enumerate(program)
            if op is not Op.PV and (op is not Op.F or stage == last)
        ),
        len(program),
    )


def _check_sizes(plan: Plan) -> None:
    if plan.num_microbatches < 1:
        raise ScheduleError(
            f"the plan has {plan.num_microbatches} micro-batches; it needs at least 1"
        )
    if len(plan.programs) != plan.num_ranks:
        raise ScheduleError(
            f"the plan has programs for {len(plan.programs)} ranks, "
            f"but its placement has {plan.num_ranks}"
        )


def _check_instructions(plan: Plan) -> None:
    """Stage and micro-batch in range; each instruction on the rank of its stage."""
    num_stages, num_microbatches = plan.placement.num_stages, plan.num_microbatches
    for rank, program in enumerate(plan.programs):
        held = set(plan.placement.stages_by_rank[rank])
        for step, (_, stage, microbatch) in enumerate(program):
            if stage in held and 0 <= microbatch < num_microbatches:
                continue
            if not 0 <= stage < num_stages:
                problem = f"names stage {stage}, but the plan has stages 0 to {num_stages - 1}"
            elif stage not in held:
                problem = (
                    f"is not this rank's: the placement puts stage {stage} "
                    f"on rank {plan.placement.rank_of(stage)}"
                )
            else:
                problem = (
                    f"names micro-batch {microbatch}, "
                    f"but the plan has micro-batches 0 to {num_microbatches - 1}"
                )
            raise ScheduleError(f"rank {rank} step {step}: {program[step]} {problem}")


@dataclass
class _Progress:
    """How many micro-batches of one stage have had each pass, while its program is read."""

    forwards: int = 0
    backwards: int = 0
    weight_grads: int = 0
    reduced: bool = False


# What each operation counts as: the field of _Progress, what to call it, the spellings it has.
_FORWARD = ("forwards", "forward", (Op.F,))
_BACKWARD = ("backwards", "backward", (Op.B, Op.BW))
_WEIGHT_GRAD = ("weight_grads", "weight gradient", (Op.W, Op.BW))
_PASSES = {
    Op.F: (_FORWARD,),
    Op.B: (_BACKWARD,),
    Op.W: (_WEIGHT_GRAD,),
    Op.BW: (_BACKWARD, _WEIGHT_GRAD),
}


def _check_each_once_in_order(plan: Plan) -> None:
    """Each stage's F, its B or BW, and its W or BW run for micro-batch 0, 1, 2, ... to the last."""
    progress = [_Progress() for _ in range(plan.placement.num_stages)]
    for rank, program in enumerate(plan.programs):
        for step, instruction in enumerate(program):
            done = progress[instruction.stage]
            if instruction.op is Op.PV:
                continue
            if instruction.op is Op.AR:
                problem = _reduction_problem(done, instruction, plan)
                done.reduced = True
            else:
                problem = _advance(done, instruction, program)
            if problem:
                raise ScheduleError(f"rank {rank} step {step}: {instruction} {problem}")
    wanted = (_FORWARD,) if plan.forward_only else (_FORWARD, _BACKWARD, _WEIGHT_GRAD)
    for stage, done in enumerate(progress):
        for name, label, ops in wanted:
            count = getattr(done, name)
            if count < plan.num_microbatches:
                raise ScheduleError(
                    f"rank {plan.placement.rank_of(stage)} never runs "
                    f"{_spellings(ops, stage, count)}: the {label} of stage {stage}, "
                    f"micro-batch {count} is missing"
                )


def _advance(done: _Progress, instruction: Instruction, program: Sequence[Instruction]) -> str:
    """Count the instruction; what is wrong with it here, or nothing."""
    op, stage, microbatch = instruction
    for name, label, ops in _PASSES[op]:
        expected = getattr(done, name)
        if microbatch < expected:
            return f"repeats the {label} of stage {stage}, micro-batch {microbatch}"
        if microbatch > expected:
            wanted = _spellings(ops, stage, expected)
            if not any(i.op in ops and i[1:] == (stage, expected) for i in program):
                return f"comes in a program that never runs {wanted}"
            return f"runs before {wanted}; a stage's {label}s must run in micro-batch order"
        setattr(done, name, expected + 1)
    return ""


def _reduction_problem(done: _Progress, instruction: Instruction, plan: Plan) -> str:
    _, stage, microbatch = instruction
    last = plan.num_microbatches - 1
    if microbatch != last:
        return (
            f"would reduce the gradients of stage {stage} after micro-batch {microbatch}, but its "
            f"last weight gradient is that of micro-batch {last}; write {stage}AR{last}"
        )
    if done.weight_grads <= last:
        wanted = _spellings((Op.W, Op.BW), stage, last)
        return (
            f"would reduce the gradients of stage {stage} before its last weight gradient, {wanted}"
        )
    return f"repeats the reduction of stage {stage}" if done.reduced else ""


def _check_validations(plan: Plan) -> None:
    """No rank has a PV, or each has one: its first stage's, before its first irrevocable step."""
    placed = [
        (rank, step, instruction)
        for rank, program in enumerate(plan.programs)
        for step, instruction in enumerate(program)
        if instruction.op is Op.PV
    ]
    if not placed:
        return
    for rank, step, instruction in placed:
        due = Instruction(Op.PV, plan.placement.stages_by_rank[rank][0], 0)
        limit = first_irrevocable(plan, rank)
        problem = ""
        if instruction != due:
            problem = f"is no check of this rank's last optimizer step; write {due}"
        elif step > limit:
            problem = (
                "checks the last optimizer step too late: "
                f"{plan.programs[rank][limit]} before it could not be taken back"
            )
        elif plan.programs[rank].count(due) > 1:
            problem = "checks the last optimizer step twice"
        if problem:
            raise ScheduleError(f"rank {rank} step {step}: {instruction} {problem}")
    missing = set(range(plan.num_ranks)) - {rank for rank, _, _ in placed}
    if missing:
        raise ScheduleError(
            f"rank {min(missing)} has no PV, but other ranks have; the optimizer step is validated "
            "on every rank or on none"
        )


def _spellings(ops: Sequence[Op], stage: int, microbatch: int) -> str:
    return " or ".join(str(Instruction(op, stage, microbatch)) for op in ops)


def _check_memory(plan: Plan, costs: Costs, limits: Sequence[float]) -> None:
    if len(limits) != plan.num_ranks:
        raise ScheduleError(
            f"{len(limits)} memory limits are given for {plan.num_ranks} ranks; give one per rank"
        )
    for rank, (program, limit) in enumerate(zip(plan.programs, limits, strict=True)):
        bound = limit * (1 + ROUNDING)
        for index, level in enumerate(memory_levels(program, costs)):
            if level > bound:
                raise ScheduleError(
                    f"rank {rank} step {index // 2}: {program[index // 2]} raises the memory held "
                    f"to {level:g}, above the limit {limit:g}"
                )
