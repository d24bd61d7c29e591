"""Runs a plan on paper: when each instruction starts, or which ranks wait for ever.

The rules are those of the runtime. A rank runs its program strictly in order, each instruction as
soon as the one before has ended and its needs are there. A value made on another rank arrives
`costs.transfer` after its maker ends; sends never block, and a receive blocks only the instruction
that needs it. Channels are FIFO in the order of the sender's program, so a message is never stuck
behind one that is sent later, and channels need no modelling of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from .costs import Costs
from .dataflow import KINDS, Value, makes, needs
from .instruction import Instruction, Op, ScheduleError
from .plan import Plan

_NOT_MADE = -1.0

# For one op and stage, at micro-batch 0: duration, (number, delay) of each need, number of each
# value made. Micro-batch j adds j to every number.
_Row = tuple[float, tuple[tuple[int, float], ...], tuple[int, ...]]


def start_times(plan: Plan, costs: Costs) -> list[list[float]]:
    """When each instruction starts, per rank and step; the first rank starts at 0.

    Expects each instruction on the rank of its stage, with stage and micro-batch in range (what
    `validate` proves first). Raises ScheduleError, naming every blocked rank, on a deadlock.
    Linear in the number of instructions.
    """
    rows = _rows(plan, costs)
    num_values = len(KINDS) * plan.placement.num_stages * plan.num_microbatches
    made_at = [_NOT_MADE] * num_values
    waiting: dict[int, list[int]] = {}  # number of a value -> the ranks that wait for it
    starts: list[list[float]] = [[] for _ in plan.programs]
    clocks = [0.0] * len(plan.programs)
    runnable = list(range(len(plan.programs)))
    while runnable:
        rank = runnable.pop()
        program, begun, clock = plan.programs[rank], starts[rank], clocks[rank]
        for step in range(len(begun), len(program)):
            op, stage, microbatch = program[step]
            duration, inputs, outputs = rows[op][stage]
            start = clock
            missing = None
            for number, delay in inputs:
                arrival = made_at[number + microbatch]
                if arrival == _NOT_MADE:
                    missing = number + microbatch
                    break
                if arrival + delay > start:
                    start = arrival + delay
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            begun.append(start)
            clock = start + duration
            for number in outputs:
                made_at[number + microbatch] = clock
                if number + microbatch in waiting:
                    runnable += waiting.pop(number + microbatch)
        clocks[rank] = clock
    if waiting:
        raise ScheduleError(_deadlock_message(plan, [len(begun) for begun in starts]))
    return starts


def _rows(plan: Plan, costs: Costs) -> dict[Op, list[_Row]]:
    placement = plan.placement
    sizes = placement.num_stages, plan.num_microbatches

    def row(instruction: Instruction) -> _Row:
        rank = placement.rank_of(instruction.stage)
        inputs = tuple(
            (
                value.number(*sizes),
                0.0 if placement.rank_of(value.stage) == rank else costs.transfer,
            )
            for value in needs(instruction, placement)
        )
        outputs = tuple(value.number(*sizes) for value in makes(instruction))
        return costs.of(instruction), inputs, outputs

    return {op: [row(Instruction(op, stage, 0)) for stage in range(sizes[0])] for op in Op}


@dataclass(frozen=True)
class _Blocked:
    """A rank that waits for ever, and where the value it waits for would be made."""

    rank: int
    step: int
    instruction: Instruction
    value: Value
    maker: tuple[int, int, Instruction] | None  # rank, step, instruction

    @property
    def waits_for_itself(self) -> bool:
        return self.maker is not None and self.maker[0] == self.rank

    def __str__(self) -> str:
        text = f"rank {self.rank} step {self.step}: {self.instruction} waits for {self.value}"
        if self.maker is None:
            return f"{text}, which no instruction makes"
        rank, step, instruction = self.maker
        where = "later on the same rank" if self.waits_for_itself else f"on rank {rank}"
        return f"{text}, made by {instruction} {where} (step {step})"


def _deadlock_message(plan: Plan, steps: list[int]) -> str:
    """Names the first bad instruction, then every blocked rank (`steps` is where each stands)."""
    makers = {
        value: (rank, step, instruction)
        for rank, program in enumerate(plan.programs)
        for step, instruction in enumerate(program)
        for value in makes(instruction)
    }
    done = {value for value, (rank, step, _) in makers.items() if step < steps[rank]}
    blocked = []
    for rank, program in enumerate(plan.programs):
        if steps[rank] < len(program):
            instruction = program[steps[rank]]
            value = next(v for v in needs(instruction, plan.placement) if v not in done)
            blocked.append(_Blocked(rank, steps[rank], instruction, value, makers.get(value)))
    first = next((b for b in blocked if b.maker is None or b.waits_for_itself), blocked[0])
    others = "".join(f"\n  {b}" for b in blocked)
    return f"no rank can proceed; the first bad instruction is {first}\nblocked ranks:{others}"
