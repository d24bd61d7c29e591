"""A timeline as one JSON object, for other programs."""

from __future__ import annotations

from typing import Any

from ..simulate import Timeline


def as_json(timeline: Timeline) -> dict[str, Any]:
    """Plan and figures; lists are per rank unless named otherwise, times in the costs' unit.

    `programs` holds the compute instructions in order (`3B12`: stage, op, micro-batch), so neither
    AR nor PV;
    `placement` is [rank, chunk] per stage in model order; `costs` is per stage.
    """
    plan = timeline.plan
    return {
        "schedule": plan.schedule,
        "p": plan.num_ranks,
        "m": plan.num_microbatches,
        "placement": [list(slot) for slot in plan.placement.slots],
        "programs": [
            [str(instruction) for instruction in program if not instruction.op.is_mark]
            for program in plan.programs
        ],
        "makespan": timeline.makespan,
        "longest_span": timeline.longest_span,
        "bubble_rate_makespan": timeline.bubble_rate("makespan"),
        "bubble_rate_span": timeline.bubble_rate("span"),
        "spans": list(timeline.spans),
        "work": list(timeline.work),
        "peak_memory": list(timeline.peaks),
        "messages_sent": list(timeline.messages_sent),
        "costs": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(timeline.costs).items()
        },
    }
