"""A timeline for the terminal: the grid, the legend and the figures.

    rank 0 |F0 F1 F2 F3          BW0-- F4 BW1-- ...
    rank 1 |   F0 F1 F2    BW0-- F3 BW1-- ...

Columns are proportional to time. A grid wider than the terminal continues in further panels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ..instruction import Instruction, Op
from ..simulate import Timeline
from .colours import INK, MEANING, rgb, shade
from .numbers import TimeUnit, compact, percent, round_step

_NUMBERED_PANELS = 6  # a grid that would need more panels drops the micro-batch numbers
_LONGEST_CELL = 14  # columns; keeps a tiny W from stretching everything else
_TICK_EVERY = 10  # columns

_Cell = tuple[str, str]  # a character and the colour behind it ("" for none)


def text_grid(timeline: Timeline, *, width: int = 120, colour: bool = False, unit: str = "") -> str:
    """The timeline as text at most `width` columns wide; `colour` adds ANSI colours."""
    shown = TimeUnit.fit(unit, timeline.makespan)
    labels = [f"rank {rank} |" for rank in range(timeline.plan.num_ranks)]
    margin = max(map(len, labels))
    panel_width = max(20, width - margin)
    scale = _columns_per_time(timeline, numbered=True)
    numbered = timeline.makespan * scale <= _NUMBERED_PANELS * panel_width
    if not numbered:
        scale = _columns_per_time(timeline, numbered=False)
    rows = [_row(timeline, rank, scale, numbered) for rank in range(len(labels))]
    total = max(map(len, rows))
    panels = []
    num_panels = max(1, math.ceil(total / panel_width))
    panel_width = max(1, math.ceil(total / num_panels))  # all panels about equally wide
    for left in range(0, num_panels * panel_width, panel_width):
        right = min(left + panel_width, total)
        lines = [" " * margin + _ruler(left, right, scale * shown.divisor)]
        for label, row in zip(labels, rows, strict=True):
            lines.append(label.rjust(margin) + _painted(row[left:right], colour))
        panels.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(panels) + "\n\n" + text_legend(timeline, numbered)


def text_legend(timeline: Timeline, numbered: bool = True) -> str:
    """What the letters of the grid mean."""
    used = {instruction.op for instruction in timeline.plan.instructions()}
    words = [f"{op.value}: {MEANING[op]}" for op in Op if op in used and not op.is_mark]
    chunks = timeline.plan.placement.max_chunks
    if chunks == 2:
        words.append("capitals: first chunk of a rank, small letters: second")
    elif chunks > 2 and numbered:
        words.append("digits before the letter: stage")
    words.append("digits after it: micro-batch" if numbered else "too long to number micro-batches")
    return "; ".join(words)


def figures(timeline: Timeline, *, unit: str = "") -> str:
    """The figures of one plan, one per line; `unit` is that of the times, such as "us"."""
    shown = TimeUnit.fit(unit, timeline.makespan)
    work = " ".join(compact(time / shown.divisor) for time in timeline.work)
    peaks = " ".join(map(compact, timeline.peaks))
    messages = " ".join(map(str, timeline.messages_sent))
    return "\n".join(
        [
            heading(timeline),
            f"makespan      {shown.text(timeline.makespan)}, "
            f"bubble rate {percent(timeline.bubble_rate('makespan'))} "
            "(ranks meet at the optimizer step)",
            f"longest span  {shown.text(timeline.longest_span)}, "
            f"bubble rate {percent(timeline.bubble_rate('span'))} "
            "(they do not: optimizer post-validation)",
            f"work          {shown.text(max(timeline.work))} on the busiest rank; by rank: {work}",
            f"peak memory   {compact(max(timeline.peaks))}; by rank: {peaks}",
            f"messages sent {sum(timeline.messages_sent)}; by rank: {messages}",
        ]
    )


def heading(timeline: Timeline) -> str:
    """Name, sizes and placement of the plan: the title of every rendering."""
    plan = timeline.plan
    chunks = plan.placement.max_chunks
    text = f"{plan.schedule}: p = {plan.num_ranks}, m = {plan.num_microbatches}"
    return f"{text}, {plan.placement.name} placement" + (f", {chunks} chunks" if chunks > 1 else "")


def cell_label(instruction: Instruction, chunk: int, num_chunks: int) -> str:
    """How the grid names an instruction: F0; with two chunks F0 and f0; with more 5F0."""
    op, _, microbatch = instruction
    if num_chunks > 2:
        return str(instruction)
    return f"{op.value.lower() if chunk else op.value}{microbatch}"


def _columns_per_time(timeline: Timeline, *, numbered: bool) -> float:
    """Wide enough for every label and a space after it, within reason."""
    plan, costs = timeline.plan, timeline.costs
    chunks = plan.placement.max_chunks
    wanted, longest = 0.0, 0.0
    last = plan.num_microbatches - 1  # has the widest number
    for op, stage in {(ins.op, ins.stage) for ins in plan.instructions()}:
        instruction = Instruction(op, stage, last)
        duration = costs.of(instruction)
        longest = max(longest, duration)
        if duration > 0:
            label = cell_label(instruction, plan.placement.slots[stage].chunk, chunks)
            columns = len(label) + 1 if numbered else len(op.value)
            wanted = max(wanted, columns / duration)
    limit = _LONGEST_CELL if numbered else _LONGEST_CELL / 2
    return min(wanted, limit / longest) if longest else 1.0


def _row(timeline: Timeline, rank: int, scale: float, numbered: bool) -> list[_Cell]:
    """One rank's cells, as long as its last instruction reaches."""
    placement = timeline.plan.placement
    row: list[_Cell] = []
    steps = zip(
        timeline.plan.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    )
    for instruction, start, end in steps:
        left, right = round(start * scale), round(end * scale)
        if right <= left:
            continue  # takes no time, or less than a column shows
        chunk = placement.slots[instruction.stage].chunk
        label = cell_label(instruction, chunk, placement.max_chunks)
        behind = shade(instruction.op, chunk, placement.max_chunks)
        row += [(" ", "")] * (left - len(row))
        row += [(letter, behind) for letter in _fitted(label, right - left, numbered)]
    return row


def _fitted(label: str, columns: int, numbered: bool) -> str:
    """The label cut or filled to a number of columns; a space ends it where there is room."""
    if not numbered or len(label) > columns:
        label = "".join(itertools.filterfalse(str.isdigit, label))[:columns]
    gap = " " if numbered and len(label) < columns else ""
    return label.ljust(columns - len(gap), "-") + gap


def _ruler(left: int, right: int, scale: float) -> str:
    """Times above the columns from `left` to `right`; `scale` is columns per shown unit."""
    step = round_step(_TICK_EVERY / scale)
    text = ""
    for tick in range(math.ceil(left / scale / step), math.ceil(right / scale / step)):
        text = text.ljust(round(tick * step * scale) - left) + "'" + compact(tick * step)
    return text[: right - left]


def _painted(cells: list[_Cell], colour: bool) -> str:
    if not colour:
        return "".join(letter for letter, _ in cells)
    return "".join(_runs(cells))


def _runs(cells: list[_Cell]) -> Iterator[str]:
    for behind, run in itertools.groupby(cells, key=lambda cell: cell[1]):
        text = "".join(letter for letter, _ in run)
        yield f"\x1b[48;5;{_ansi(behind)};38;5;{_ansi(INK)}m{text}\x1b[0m" if behind else text


def _ansi(colour: str) -> int:
    """The nearest entry of the 6 x 6 x 6 colour cube that terminals share."""
    levels = (0, 95, 135, 175, 215, 255)
    nearest = [min(range(6), key=lambda k: abs(levels[k] - value)) for value in rgb(colour)]
    return 16 + 36 * nearest[0] + 6 * nearest[1] + nearest[2]
