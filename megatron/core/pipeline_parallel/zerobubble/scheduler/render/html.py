"""Timelines as one self-contained HTML page: no network, no libraries.

The page (`page/`) draws bars and memory, zooms and pans, names the cause of each gap, and computes
the times anew when a slider changes a cost. It gets everything as one JSON object from here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any
from xml.sax.saxutils import escape

from ..costs import Costs
from ..dataflow import Value, makes, needs
from ..instruction import Op
from ..memory import memory_levels
from ..simulate import Timeline
from . import colours
from .numbers import TimeUnit
from .text import heading
from .trace import TraceEvent, first_difference

_SCRIPTS = ("retime.js", "draw.js", "page.js")
_MEMORY_FILL = "#d5d0e5"
_RULE = "#8c959f"


def to_html(
    timelines: Sequence[Timeline],
    *,
    unit: str = "",
    memory_limits: Sequence[float] | None = None,
    measured: Sequence[TraceEvent] | None = None,
) -> str:
    """The page for one timeline, or for two, one above the other.

    `unit` is that of the times, `memory_limits` (per rank) are drawn into the memory curves, and
    `measured` is laid under the first timeline, whose costs must then be in microseconds.
    """
    plans = [_plan_data(timeline, memory_limits) for timeline in timelines]
    if measured is not None:
        plans[0]["measured"] = _measured_data(timelines[0], measured)
        difference = first_difference(timelines[0].plan, measured)
        plans[0]["note"] = (
            f"The measured order differs from the plan: {difference}."
            if difference
            else "The measured order is the planned one on every rank."
        )
    shown = TimeUnit.fit(unit, max(timeline.makespan for timeline in timelines))
    data = {
        "plans": plans,
        "base": _totals(timelines[0].costs, timelines[0].plan.num_ranks),
        "costUnit": unit,
        "unit": {"name": shown.name, "divisor": shown.divisor},
        "meaning": {op.value: meaning for op, meaning in colours.MEANING.items()},
        "style": _style_data({plan["numChunks"] for plan in plans}),
    }
    style = Template(_asset("page.css")).substitute(
        ink=colours.INK, muted=colours.MUTED, paper=colours.PAPER
    )
    return Template(_asset("page.html")).substitute(
        title=escape(" and ".join(heading(timeline) for timeline in timelines)),
        style=style,
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        scripts="\n".join(_asset(name) for name in _SCRIPTS),
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _plan_data(timeline: Timeline, limits: Sequence[float] | None) -> dict[str, Any]:
    """What page.js knows about one plan; retime.js says what `inputs` and `costs` mean."""
    plan, costs = timeline.plan, timeline.costs
    return {
        "heading": heading(timeline),
        "numChunks": plan.placement.max_chunks,
        "chunkOfStage": [slot.chunk for slot in plan.placement.slots],
        "programs": [" ".join(map(str, program)) for program in plan.programs],
        "inputs": _inputs_from_other_ranks(timeline),
        "costs": {
            "F": list(costs.forward),
            "B": list(costs.input_grad),
            "W": list(costs.weight_grad),
            "transfer": costs.transfer,
        },
        "levels": [memory_levels(program, costs) for program in plan.programs],
        "peaks": list(timeline.peaks),
        "limits": None if limits is None else list(limits),
        "messages": sum(timeline.messages_sent),
        "measured": None,
        "note": "",
    }


def _inputs_from_other_ranks(timeline: Timeline) -> list[list[list[int] | int]]:
    """Per rank and step: [rank, step, ...] of the instructions waited for, or 0 for none."""
    plan = timeline.plan
    makers: dict[Value, tuple[int, int]] = {
        value: (rank, step)
        for rank, program in enumerate(plan.programs)
        for step, instruction in enumerate(program)
        for value in makes(instruction)
    }
    inputs: list[list[list[int] | int]] = []
    for rank, program in enumerate(plan.programs):
        row: list[list[int] | int] = []
        for instruction in program:
            places = [makers[value] for value in needs(instruction, plan.placement)]
            row.append([number for place in places if place[0] != rank for number in place] or 0)
        inputs.append(row)
    return inputs


def _measured_data(
    timeline: Timeline, events: Sequence[TraceEvent]
) -> list[list[tuple[str, float, float]]]:
    """Per rank of the plan, (instruction, start, end) of what ran."""
    rows: list[list[tuple[str, float, float]]] = [[] for _ in timeline.plan.programs]
    for event in events:
        known = event.instruction.stage < timeline.plan.placement.num_stages
        if known and 0 <= event.rank < len(rows):
            end = event.start_us + event.duration_us
            rows[event.rank].append((str(event.instruction), event.start_us, end))
    return rows


def _totals(costs: Costs, num_ranks: int) -> dict[str, float]:
    """The mean over the ranks of one micro-batch's times: where the sliders start."""
    return {
        "F": sum(costs.forward) / num_ranks,
        "B": sum(costs.input_grad) / num_ranks,
        "W": sum(costs.weight_grad) / num_ranks,
        "transfer": costs.transfer,
    }


def _style_data(chunk_counts: set[int]) -> dict[str, Any]:
    """Colours; `shadesOf[number of chunks][op]` is a list over chunks."""
    return {
        "ink": colours.INK,
        "muted": colours.MUTED,
        "idle": colours.IDLE,
        "mark": colours.MARK,
        "memory": _MEMORY_FILL,
        "rule": _RULE,
        "shadesOf": {
            count: {
                op.value: [colours.shade(op, chunk, count) for chunk in range(count)] for op in Op
            }
            for count in chunk_counts
        },
    }
