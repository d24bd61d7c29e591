"""What an instruction needs and what it makes: the one statement of a pipeline's data flow.

The validator, the simulator, the communication pass and the runtime's buffers all derive from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .instruction import Instruction, Op
from .placement import Placement

KINDS = ("act", "grad", "wctx", "verdict")


class Value(NamedTuple):
    """Something one instruction leaves for another.

    `kind` is "act" (a stage's output), "grad" (the gradient of a stage's input), "wctx" (what a
    stage's W needs: layer inputs and output gradients) or "verdict" (what the optimizer step should
    have been, on its way from the last rank to the first; `stage` is its sender's first stage).
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.microbatch})"

    def number(self, num_stages: int, num_microbatches: int) -> int:
        """A dense number from 0, for lists in place of dictionaries.

        The next micro-batch's value of the same kind and stage has the next number.
        """
        row = KINDS.index(self.kind) * num_stages + self.stage
        return row * num_microbatches + self.microbatch


def needs(instruction: Instruction, placement: Placement) -> Iterator[Value]:
    """The values that must exist before `instruction` can start."""
    op, stage, microbatch = instruction
    if op is Op.F and stage > 0:
        yield Value("act", stage - 1, microbatch)
    if op in (Op.B, Op.BW):
        yield Value("act", stage, microbatch)
        if stage < placement.last_stage:
            yield Value("grad", stage + 1, microbatch)
    if op is Op.W:
        yield Value("wctx", stage, microbatch)
    if op is Op.PV:
        next_rank = placement.rank_of(stage) + 1
        if next_rank < placement.num_ranks:
            yield Value("verdict", placement.stages_by_rank[next_rank][0], microbatch)


def makes(instruction: Instruction) -> Iterator[Value]:
    """The values that exist once `instruction` has ended."""
    op, stage, microbatch = instruction
    if op is Op.F:
        yield Value("act", stage, microbatch)
    if op in (Op.B, Op.BW):
        yield Value("grad", stage, microbatch)
    if op is Op.B:
        yield Value("wctx", stage, microbatch)
    if op is Op.PV:
        yield Value("verdict", stage, microbatch)


def receivers(placement: Placement) -> dict[tuple[str, int], tuple[int, ...]]:
    """For each (kind, stage) whose values must travel: the other ranks that need them."""
    found: dict[tuple[str, int], list[int]] = {}
    for stage in range(placement.num_stages):
        target = placement.rank_of(stage)
        for op in Op:
            for value in needs(Instruction(op, stage, 0), placement):
                ranks = found.setdefault((value.kind, value.stage), [])
                if target != placement.rank_of(value.stage) and target not in ranks:
                    ranks.append(target)
    return {key: tuple(ranks) for key, ranks in found.items() if ranks}
