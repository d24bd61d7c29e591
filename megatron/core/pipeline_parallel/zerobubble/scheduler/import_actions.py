"""Turns the per-rank action lists of `torch.distributed.pipelining` into a `Plan`.

torch writes an action as `<stage><type><micro-batch>`, as we do, but names types differently: its
`I` (gradient of the input) is our B, its `W` our W, and its `B` (both) our BW. Lists come from its
schedule classes, its CSV files, or (private API)
`torch.distributed.pipelining._schedule_visualizer.get_schedule_ops(name, p, m)`. Torch itself is
not needed here: an action is anything whose `str` is its text.

    >>> plan_from_actions("gpipe", Placement.plain(1), [["0F0", None, "0B0"]]).programs[0]
    (Instruction(op=<Op.F: 'F'>, ...), Instruction(op=<Op.BW: 'BW'>, ...))
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .instruction import Instruction, Op, ScheduleError
from .placement import Placement
from .plan import Plan

_OPS = {"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}


def plan_from_actions(
    schedule: str, placement: Placement, actions: Sequence[Sequence[object | None]]
) -> Plan:
    """The plan that runs `actions` (one list per rank); `validate` says whether it is a good one.

    None and empty text are idle slots in torch's lists and are left out. The pairs of its
    DualPipeV, `(0F3;3B1)OVERLAP_F_B`, run one after the other. Anything else that is not a
    computation (sends, receives, unshards) is refused: our communication pass adds what is needed.
    """
    programs = [
        [
            _instruction(text, rank, step)
            for step, action in enumerate(row)
            if action is not None
            for text in _parts(str(action))
        ]
        for rank, row in enumerate(actions)
    ]
    last = max((i.microbatch for program in programs for i in program), default=-1)
    return Plan.of(schedule, placement, last + 1, programs)


def _parts(action: str) -> list[str]:
    pair = re.fullmatch(r"\((.*)\)OVERLAP_F_B", action.strip())
    return pair[1].split(";") if pair else action.split()


def _instruction(text: str, rank: int, step: int) -> Instruction:
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", text)
    if match is None or match[2] not in _OPS or not match[3]:
        raise ScheduleError(
            f"rank {rank} step {step}: {text!r} is not a computation; "
            f"import lists of <stage><{'|'.join(_OPS)}><micro-batch>, before communication is added"
        )
    return Instruction(_OPS[match[2]], int(match[1]), int(match[3]))
