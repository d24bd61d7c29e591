"""One instruction of a pipeline plan, and its text form.

>>> str(Instruction(Op.F, 2, 0)), Instruction.parse("1BW3").op
('2F0', <Op.BW: 'BW'>)
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class ScheduleError(ValueError):
    """A plan that cannot run, or a request no planner can meet; the message says which and why."""


class Op(enum.Enum):
    """What an instruction does with one micro-batch in one stage (arXiv:2401.10241, section 2).

    AR is optional and not part of that paper: it fixes the point at which the reduction of a
    stage's weight gradients over the data-parallel ranks starts. It names the last micro-batch,
    whose W (or BW) completes them. A plan without it starts each reduction right after that W.

    PV is optional too (section 4 of that paper): in the warm-up of an iteration, the check of the
    optimizer step that a rank took at the end of the iteration before. It names the rank's first
    stage and micro-batch 0.
    """

    F = "F"  # forward
    B = "B"  # backward with respect to the stage's input
    W = "W"  # backward with respect to the stage's weights
    BW = "BW"  # both backwards at once
    AR = "AR"  # start reducing the stage's weight gradients; takes no time on the rank
    PV = "PV"  # validate the rank's last optimizer step; takes no time if it was right

    # Members are singletons. Enum's own hash runs in Python and made large plans slow.
    __hash__ = object.__hash__

    @property
    def is_mark(self) -> bool:
        """Whether it only fixes a moment: it computes nothing of a micro-batch."""
        return self is Op.AR or self is Op.PV


class Instruction(NamedTuple):
    """`op` on `microbatch` in `stage`; written `<stage><op><microbatch>`, such as `2F0`."""

    op: Op
    stage: int  # virtual stage; stage 0 holds the embedding
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        match = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", text)
        if match is None or match[2] not in Op.__members__:
            raise ScheduleError(
                f"{text!r} is not an instruction; "
                f"write it as <stage><{'|'.join(Op.__members__)}><microbatch>, such as 2F0"
            )
        return cls(Op[match[2]], int(match[1]), int(match[3]))
