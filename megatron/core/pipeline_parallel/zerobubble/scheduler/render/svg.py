"""A timeline as an SVG picture, like the figures of the schedule papers.

One row per rank, one rectangle per instruction, its micro-batch number inside where it fits. Every
rectangle carries `data-i="<instruction>"`, so that a picture can be checked against a timeline.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from ..instruction import Instruction, Op
from ..simulate import Timeline
from .colours import IDLE, INK, MEANING, MUTED, PAPER, shade
from .numbers import TimeUnit, compact, percent, round_step
from .text import heading

_MARGIN = 16
_LABELS = 52  # width of the rank names
_CHART_TOP = 66
_ROW, _ROW_GAP = 24, 5
_AXIS, _LEGEND_LINE = 34, 22
_DIGIT = 6.2  # width of a digit at font size 11
_TICKS_WANTED = 12
_NARROWEST, _WIDEST = 900, 2800  # pixels, where the width is ours to choose
_FONT = "font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\""


def to_svg(
    timeline: Timeline,
    *,
    unit: str = "",
    width: int | None = None,
    title: str | None = None,
    subtitle: str | None = None,
) -> str:
    """The whole picture as SVG text; `unit` is that of the times.

    `title` and `subtitle` stand in place of the plan's name and sizes, and of its figures.
    `width` is in pixels; None takes what the numbers need, within limits. Operations that are too
    short for the widest micro-batch number are drawn without numbers.
    """
    width = width or _fitting_width(timeline)
    shown = TimeUnit.fit(unit, timeline.makespan)
    subtitle = subtitle or _figures(timeline, shown)
    legend = _legend(timeline, width)
    chart_height = timeline.plan.num_ranks * (_ROW + _ROW_GAP)
    legend_top = _CHART_TOP + chart_height + _AXIS
    height = legend_top + _LEGEND_LINE * len(legend) + _MARGIN
    title = title or heading(timeline)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" {_FONT} font-size="11">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(subtitle)}</desc>",
        f'<rect class="paper" width="{width}" height="{height}" fill="{PAPER}"/>',
        f'<text x="{_MARGIN}" y="28" font-size="17" font-weight="bold" fill="{INK}">'
        f"{escape(title)}</text>",
        f'<text x="{_MARGIN}" y="48" font-size="12.5" fill="{MUTED}">{escape(subtitle)}</text>',
        *_chart(timeline, width - _LABELS - 2 * _MARGIN, shown),
        *(
            f'<g transform="translate({_MARGIN + _LABELS} {legend_top + _LEGEND_LINE * k})">'
            + "".join(items)
            + "</g>"
            for k, items in enumerate(legend)
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _fitting_width(timeline: Timeline) -> int:
    """Wide enough for the numbers of the shortest operation, between _NARROWEST and _WIDEST."""
    shortest = min((time for time in _durations(timeline).values() if time > 0), default=0.0)
    if not shortest:
        return _NARROWEST
    needed = timeline.makespan / shortest * (_number_width(timeline) + 2)
    return round(min(max(needed + _LABELS + 2 * _MARGIN, _NARROWEST), _WIDEST))


def _durations(timeline: Timeline) -> dict[tuple[Op, int], float]:
    """The time of each operation of each stage in the plan."""
    kinds = {(instruction.op, instruction.stage) for instruction in timeline.plan.instructions()}
    return {(op, stage): timeline.costs.of(Instruction(op, stage, 0)) for op, stage in kinds}


def _number_width(timeline: Timeline) -> float:
    return len(str(timeline.plan.num_microbatches - 1)) * _DIGIT + 1


def _figures(timeline: Timeline, unit: TimeUnit) -> str:
    peaks = " ".join(map(compact, timeline.peaks)) if timeline.plan.num_ranks <= 16 else ""
    return (
        f"makespan {unit.text(timeline.makespan)} (bubble rate "
        f"{percent(timeline.bubble_rate('makespan'))}), longest span "
        f"{unit.text(timeline.longest_span)} (bubble rate "
        f"{percent(timeline.bubble_rate('span'))}), peak memory {compact(max(timeline.peaks))}"
        + (f" (by rank: {peaks})" if peaks else "")
    )


def _chart(timeline: Timeline, width: float, unit: TimeUnit) -> list[str]:
    """Rows, bars and time axis; its origin is the start of rank 0's row."""
    plan = timeline.plan
    scale = width / timeline.makespan if timeline.makespan else 0.0
    lines = [f'<g transform="translate({_MARGIN + _LABELS} {_CHART_TOP})">']
    lines += _axis(timeline, scale, plan.num_ranks * (_ROW + _ROW_GAP), unit)
    for rank in range(plan.num_ranks):
        lines.append(f'<g class="rank" transform="translate(0 {rank * (_ROW + _ROW_GAP)})">')
        lines.append(
            f'<text x="-8" y="{_ROW / 2 + 4:g}" text-anchor="end" fill="{INK}">rank {rank}</text>'
        )
        lines.append(f'<rect class="idle" width="{width:g}" height="{_ROW}" fill="{IDLE}"/>')
        lines += _bars(timeline, rank, scale)
        lines.append("</g>")
    return [*lines, "</g>"]


def _bars(timeline: Timeline, rank: int, scale: float) -> list[str]:
    """The rectangles of one rank, grouped by colour, then their numbers, then marks (AR, PV)."""
    plan = timeline.plan
    bars: dict[str, list[str]] = {}
    numbers, marks = [], []
    number_width = _number_width(timeline)
    steps = zip(plan.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for instruction, start, end in steps:
        x, width = start * scale, (end - start) * scale
        if instruction.op.is_mark:
            marks.append(_mark(instruction, x))
            continue
        chunk = plan.placement.slots[instruction.stage].chunk
        colour = shade(instruction.op, chunk, plan.placement.max_chunks)
        bars.setdefault(colour, []).append(
            f'<rect x="{x:.7g}" width="{width:.7g}" height="{_ROW}" data-i="{instruction}"/>'
        )
        if width >= number_width:
            middle = f"{x + width / 2:.5g}"
            numbers.append(f'<text x="{middle}" y="16">{instruction.microbatch}</text>')
    lines = [
        f'<g fill="{colour}" stroke="{PAPER}" stroke-width=".8">' + "".join(rects) + "</g>"
        for colour, rects in bars.items()
    ]
    if numbers:
        lines.append(f'<g fill="{INK}" text-anchor="middle">' + "".join(numbers) + "</g>")
    return lines + marks


def _mark(instruction: Instruction, x: float) -> str:
    """A small flag: the instruction takes no time."""
    flag = f"M{x:.5g} {_ROW}v-{_ROW + 3}l5 3-4 3V{_ROW}z"
    return f'<path d="{flag}" fill="{shade(instruction.op, 0, 1)}" data-i="{instruction}"/>'


def _axis(timeline: Timeline, scale: float, height: float, unit: TimeUnit) -> list[str]:
    """A line and a number at round times, and what the times are."""
    lines = [f'<g fill="{MUTED}" text-anchor="middle">']
    longest = timeline.makespan / unit.divisor
    step = round_step(longest / _TICKS_WANTED) if longest else 1.0
    label = f"time, {unit.name}" if unit.name else "time"
    lines.append(f'<text x="-8" y="{height + 12:g}" text-anchor="end">{label}</text>')
    for k in range(int(longest / step + 1e-9) + 1):
        x = k * step * unit.divisor * scale
        lines.append(f'<path d="M{x:.6g} 0V{height:g}" stroke="#c9ced6" stroke-width="1"/>')
        lines.append(f'<text x="{x:.6g}" y="{height + 12:g}">{compact(k * step)}</text>')
    return [*lines, "</g>"]


def _legend(timeline: Timeline, width: int) -> list[list[str]]:
    """Lines of legend entries; each entry is a swatch per chunk and its meaning."""
    chunks = timeline.plan.placement.max_chunks
    used = {instruction.op for instruction in timeline.plan.instructions()}
    entries: list[tuple[list[str], str]] = []
    for op in Op:
        if op in used:
            swatches = range(1 if op.is_mark else chunks)
            colours = [shade(op, chunk, chunks) for chunk in swatches]
            entries.append((colours, f"{op.value}: {MEANING[op]}"))
    if chunks == 2:
        entries.append(([], "full shade: first chunk of a rank, light: second"))
    elif chunks > 2:
        entries.append(([], f"from full to light: chunks 0 to {chunks - 1} of a rank"))
    entries += [([IDLE], "idle"), ([], "numbers: micro-batches")]
    return _placed(entries, width - 2 * _MARGIN - _LABELS)


def _placed(entries: list[tuple[list[str], str]], width: float) -> list[list[str]]:
    """Entries side by side, on as many lines as they need."""
    lines: list[list[str]] = [[]]
    x = 0.0
    for colours, words in entries:
        swatches = 13 * len(colours) + (5 if colours else 0)
        needed = swatches + _text_width(words) + 20
        if x + needed > width and lines[-1]:
            lines.append([])
            x = 0.0
        for k, colour in enumerate(colours):
            edge = f' stroke="{MUTED}" stroke-width=".5"' if colour == IDLE else ""
            lines[-1].append(
                f'<rect class="key" x="{x + 13 * k:.4g}" width="13" height="13" '
                f'fill="{colour}"{edge}/>'
            )
        lines[-1].append(
            f'<text x="{x + swatches:.4g}" y="10.5" fill="{INK}">{escape(words)}</text>'
        )
        x += needed
    return lines


def _text_width(words: str) -> float:
    """About what Helvetica needs at font size 11; no font is at hand to measure with."""
    return sum(3.2 if letter in "fijlrtI:;,.'- " else 6.2 for letter in words)
