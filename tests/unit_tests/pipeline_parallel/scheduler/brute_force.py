"""What a plan does, worked out the slow and plain way, to hold the library against.

Nothing here uses the library's data flow, execution or simulation: the rules of a pipeline are
written out once more, from the cost model's wording.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction, Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

Key = tuple[str, int, int]  # "F", "B" (B or BW), "W" (W or BW) or "V" (PV), stage, micro-batch


def done_by(instruction: Instruction) -> list[Key]:
    """What has happened once the instruction has ended."""
    op, stage, microbatch = instruction
    passes = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "BW", Op.AR: "", Op.PV: "V"}[op]
    return [(letter, stage, microbatch) for letter in passes]


def required(instruction: Instruction, placement: Placement) -> list[Key]:
    """What must have happened before the instruction starts."""
    op, s, j = instruction
    if op is Op.F:
        return [("F", s - 1, j)] if s > 0 else []
    if op is Op.W:
        return [("B", s, j)]
    if op is Op.AR:
        return []
    if op is Op.PV:
        behind = [t for t, slot in enumerate(placement.slots) if slot.chunk == 0]
        behind = [t for t in behind if placement.slots[t].rank == placement.slots[s].rank + 1]
        return [("V", t, j) for t in behind]
    return [("F", s, j)] + ([("B", s + 1, j)] if s + 1 < placement.num_stages else [])


def is_complete(plan: Plan) -> bool:
    """Each pass of each stage and micro-batch once, on the right rank, in micro-batch order."""
    stages, m = plan.placement.num_stages, plan.num_microbatches
    if m < 1 or len(plan.programs) != plan.num_ranks:
        return False
    passes = "F" if all(i.op is Op.F for p in plan.programs for i in p) else "FBW"
    seen: Counter[Key] = Counter()
    for rank, program in enumerate(plan.programs):
        for instruction in program:
            s, j = instruction.stage, instruction.microbatch
            if not (0 <= s < stages and 0 <= j < m and plan.placement.slots[s].rank == rank):
                return False
            seen.update(key for key in done_by(instruction) if key[0] != "V")
    expected = {(k, s, j): 1 for k in passes for s in range(stages) for j in range(m)}
    if seen != expected:
        return False
    for program in plan.programs:
        order = [key for instruction in program for key in done_by(instruction)]
        for letter in passes:
            for s in range(stages):
                mine = [j for k, t, j in order if (k, t) == (letter, s)]
                if mine != sorted(mine):
                    return False
    return all(_reduces_last(program, m) for program in plan.programs) and _checks_early(plan)


def _checks_early(plan: Plan) -> bool:
    """No PV, or one on every rank, before its first step that a wrong step would spoil."""
    last = plan.placement.num_stages - 1
    checks = [[i for i in program if i.op is Op.PV] for program in plan.programs]
    for rank, program in enumerate(plan.programs):
        first = plan.placement.slots.index((rank, 0))  # type: ignore[arg-type]
        if any(checks) and checks[rank] != [Instruction(Op.PV, first, 0)]:
            return False
        for i in program[: program.index(checks[rank][0])] if checks[rank] else ():
            if i.op is not Op.F or i.stage == last:
                return False
    return True


def _reduces_last(program: tuple[Instruction, ...], m: int) -> bool:
    for step, instruction in enumerate(program):
        if instruction.op is Op.AR:
            later = program[step + 1 :]
            if instruction.microbatch != m - 1:
                return False
            if any(i.stage == instruction.stage and i.op in (Op.W, Op.BW, Op.AR) for i in later):
                return False
    return True


def runs_to_the_end(plan: Plan) -> bool:
    """Execute with real FIFO queues: a receive takes the oldest message of its channel."""
    rank_of = [slot.rank for slot in plan.placement.slots]
    queues: dict[tuple[int, int, str], deque[Key]] = {}
    happened: list[set[Key]] = [set() for _ in plan.programs]  # as each rank knows it
    position = [0] * len(plan.programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(plan.programs):
            while position[rank] < len(program):
                instruction = program[position[rank]]
                for key in required(instruction, plan.placement):
                    source = rank_of[key[1]]
                    queue = queues.setdefault((source, rank, key[0]), deque())
                    while source != rank and key not in happened[rank] and queue:
                        happened[rank].add(queue.popleft())
                if not all(key in happened[rank] for key in required(instruction, plan.placement)):
                    break
                for key in done_by(instruction):
                    happened[rank].add(key)
                    letter, s, _ = key
                    consumer = {"F": s + 1, "B": s - 1}.get(letter, -1)
                    target = rank_of[consumer] if 0 <= consumer < len(rank_of) else rank
                    if letter == "V":
                        target = max(rank - 1, 0)
                    if target != rank:
                        queues.setdefault((rank, target, letter), deque()).append(key)
                position[rank] += 1
                moved = True
    return all(at == len(program) for at, program in zip(position, plan.programs, strict=True))


def times(plan: Plan, costs: Costs) -> dict[Instruction, tuple[float, float]]:
    """Start and end of every instruction, by pushing starts later until nothing changes."""
    rank_of = [slot.rank for slot in plan.placement.slots]
    instructions = [i for program in plan.programs for i in program]
    length = {
        i: {
            Op.F: costs.forward[i.stage],
            Op.B: costs.input_grad[i.stage],
            Op.W: costs.weight_grad[i.stage],
            Op.BW: costs.input_grad[i.stage] + costs.weight_grad[i.stage],
            Op.AR: 0.0,
            Op.PV: 0.0,
        }[i.op]
        for i in instructions
    }
    maker = {key: i for i in instructions for key in done_by(i)}
    start = dict.fromkeys(instructions, 0.0)
    changed = True
    while changed:
        changed = False
        for program in plan.programs:
            for step, i in enumerate(program):
                bounds = [start[program[step - 1]] + length[program[step - 1]]] if step else [0.0]
                for key in required(i, plan.placement):
                    delay = 0.0 if rank_of[key[1]] == rank_of[i.stage] else costs.transfer
                    bounds.append(start[maker[key]] + length[maker[key]] + delay)
                if max(bounds) > start[i]:
                    start[i] = max(bounds)
                    changed = True
    return {i: (start[i], start[i] + length[i]) for i in instructions}


@dataclass
class RandomPlans:
    """Valid plans in no sensible order: at each point any instruction that may come next."""

    rng: random.Random

    def placement(self, max_ranks: int = 4, max_chunks: int = 3) -> Placement:
        ranks, chunks = self.rng.randint(1, max_ranks), self.rng.randint(1, max_chunks)
        kind = self.rng.choice(["looped", "v", "custom"])
        if kind == "v":
            return Placement.v_shape(ranks)
        looped = Placement.looped(ranks, chunks)
        if kind == "looped":
            return looped
        return Placement(tuple(self.rng.sample(looped.slots, len(looped.slots))))

    def plan(self, placement: Placement, m: int, split: float) -> Plan:
        """`split` is the probability that a backward is a B and a W instead of a BW."""
        stages = placement.num_stages
        todo: dict[tuple[int, str], list[Instruction]] = {}
        for s in range(stages):
            ops = [Op.B if self.rng.random() < split else Op.BW for _ in range(m)]
            todo[s, "F"] = [Instruction(Op.F, s, j) for j in range(m)]
            todo[s, "B"] = [Instruction(op, s, j) for j, op in enumerate(ops)]
            todo[s, "W"] = [Instruction(Op.W, s, j) for j, op in enumerate(ops) if op is Op.B]
        happened: set[Key] = set()
        programs: list[list[Instruction]] = [[] for _ in range(placement.num_ranks)]
        while any(todo.values()):
            ready = [
                row
                for (s, kind), row in todo.items()
                if row
                and all(key in happened for key in required(row[0], placement))
                and not (
                    kind == "B" and row[0].op is Op.BW and self._w_before(todo[s, "W"], row[0])
                )
            ]
            instruction = self.rng.choice(ready).pop(0)
            happened.update(done_by(instruction))
            programs[placement.slots[instruction.stage].rank].append(instruction)
        return Plan.of("random", placement, m, programs)

    @staticmethod
    def _w_before(pending: list[Instruction], backward: Instruction) -> bool:
        """Whether an earlier micro-batch's W is still to come: a BW must not overtake it."""
        return bool(pending) and pending[0].microbatch < backward.microbatch

    def costs(self, placement: Placement) -> Costs:
        def per_stage(least: float) -> tuple[float, ...]:
            return tuple(self.rng.uniform(least, 2.0) for _ in range(placement.num_stages))

        return Costs(
            forward=per_stage(0.1),
            input_grad=per_stage(0.0),
            weight_grad=per_stage(0.0),
            transfer=self.rng.choice([0.0, 0.05, 0.7]),
            held_f_to_b=per_stage(0.0),
            held_b_to_w=per_stage(0.0),
        )
