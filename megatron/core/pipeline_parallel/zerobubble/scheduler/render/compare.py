"""Every schedule at the same p, m and model: one table, with why some cannot run.

    >>> print(comparison_table(compare(list(SCHEDULES), question)))

The cost model is that of simulate.py for all of them, so the figures can be held side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..instruction import ScheduleError
from ..simulate import Objective, Timeline
from .export import as_json
from .numbers import TimeUnit, compact, percent
from .question import Question

BASELINE = "1f1b"  # what speed-ups are measured against
SMALL_GAIN = 0.05  # below this a schedule's gain is easily lost to what is not modelled


@dataclass(frozen=True)
class Entry:
    """One schedule's answer: a timeline, or the reason why there is none."""

    name: str
    timeline: Timeline | None
    refusal: str = ""


@dataclass(frozen=True)
class Comparison:
    """Entries in the order they were asked for, and the 1F1B they are compared with."""

    baseline: Timeline  # 1F1B, whether or not it keeps the memory limits
    entries: tuple[Entry, ...]

    @property
    def runnable(self) -> dict[str, Timeline]:
        return {entry.name: entry.timeline for entry in self.entries if entry.timeline}

    def speed_up(self, timeline: Timeline, objective: Objective) -> float:
        """Iteration cost of 1F1B over that of `timeline`, both counted the same way."""
        return speed_up(self.baseline, timeline, objective)

    def fastest(self, objective: Objective) -> str | None:
        """The name with the smallest cost; among equals the smallest peak, the fewest messages."""

        def rank(name: str) -> tuple[float, ...]:
            timeline = self.runnable[name]
            cost = _rounded(timeline.cost(objective))
            return cost, _rounded(max(timeline.peaks)), sum(timeline.messages_sent)

        return min(self.runnable, key=rank, default=None)

    def dominators(self, name: str) -> list[str]:
        """The schedules that are no worse than this one in cost, peak memory and messages, and
        better in one of these."""
        scores = {other: _score(timeline) for other, timeline in self.runnable.items()}
        mine = scores[name]
        return [
            other
            for other, score in scores.items()
            if score != mine and all(a <= b for a, b in zip(score, mine, strict=True))
        ]


def compare(names: Iterable[str], question: Question) -> Comparison:
    """Ask every named schedule the same question."""
    entries = []
    for name in names:
        try:
            entries.append(Entry(name, question.suited_to(name).answer(name)))
        except ScheduleError as error:
            entries.append(Entry(name, None, str(error).splitlines()[0]))
    return Comparison(baseline_of(question), tuple(entries))


def baseline_of(question: Question) -> Timeline:
    """1F1B at the same sizes and costs, without the memory limits."""
    return replace(question.suited_to(BASELINE), memory_limits=None).answer(BASELINE)


def speed_up(baseline: Timeline, timeline: Timeline, objective: Objective) -> float:
    return baseline.cost(objective) / timeline.cost(objective)


def gain_over_baseline(baseline: Timeline, timeline: Timeline) -> str:
    """The predicted speed-up over 1F1B in both costs, and a warning where it is small."""
    makespan = speed_up(baseline, timeline, "makespan")
    span = speed_up(baseline, timeline, "span")
    text = f"speed-up      over 1F1B: {makespan:.3f} by makespan, {span:.3f} by longest span"
    if timeline.plan.schedule != BASELINE and min(makespan, span) < 1 + SMALL_GAIN:
        both = max(makespan, span) < 1 + SMALL_GAIN
        text += (
            f"\nwarning       the gain {'' if both else 'by one of them '}is under "
            f"{SMALL_GAIN:.0%}; what is not modelled here may well take it away"
        )
    return text


def _score(timeline: Timeline) -> tuple[float, ...]:
    figures = (timeline.makespan, timeline.longest_span, max(timeline.peaks))
    return (*map(_rounded, figures), sum(timeline.messages_sent))


def _rounded(figure: float) -> float:
    """Sums of floats in another order must not count as better or worse."""
    return float(f"{figure:.9g}")


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as one object: each schedule as export.py gives it, or why it cannot run."""
    schedules: list[dict[str, Any]] = []
    for entry in comparison.entries:
        if entry.timeline is None:
            schedules.append({"schedule": entry.name, "refusal": entry.refusal})
        else:
            gains = {
                "speed_up_makespan": comparison.speed_up(entry.timeline, "makespan"),
                "speed_up_span": comparison.speed_up(entry.timeline, "span"),
                "dominated_by": comparison.dominators(entry.name),
            }
            schedules.append({**as_json(entry.timeline), "schedule": entry.name, **gains})
    return {
        "baseline": BASELINE,
        "fastest_makespan": comparison.fastest("makespan"),
        "fastest_span": comparison.fastest("span"),
        "schedules": schedules,
    }


# Two lines over each column; "UNIT" stands for the unit of the times.
_HEADINGS = (
    ("schedule", ""),
    ("placement", ""),
    ("makespan", "UNIT"),
    ("longest", "span UNIT"),
    ("bubble rate", "of makespan"),
    ("bubble rate", "of span"),
    ("speed-up", "makespan"),
    ("speed-up", "span"),
    ("messages", "sent"),
    ("peak", "memory"),
    ("peak memory of each rank", ""),
)
_LEFT_ALIGNED = (0, 1, 10)


def comparison_table(comparison: Comparison, *, unit: str = "") -> str:
    """The comparison as text: one line a schedule, then what cannot run, then remarks."""
    shown = TimeUnit.fit(unit, comparison.baseline.makespan)
    headings = [
        [heading[line].replace("UNIT", shown.name).strip() for heading in _HEADINGS]
        for line in (0, 1)
    ]
    runnable = comparison.runnable.items()
    rows = [_row(comparison, name, timeline, shown) for name, timeline in runnable]
    plan = comparison.baseline.plan
    title = f"p = {plan.num_ranks}, m = {plan.num_microbatches}"
    lines = [f"{title}: no schedule can run"]
    if rows:
        lines = _aligned([*headings, *rows])
        lines.insert(len(headings), "-" * max(map(len, lines)))
        lines = [title, "", *lines]
    refused = [entry for entry in comparison.entries if entry.timeline is None]
    if refused:
        lines += ["", "cannot run:"]
        width = max(len(entry.name) for entry in refused)
        lines += [f"  {entry.name:<{width}}  {entry.refusal}" for entry in refused]
    return "\n".join([*lines, "", *_remarks(comparison)]).rstrip()


def _row(comparison: Comparison, name: str, timeline: Timeline, unit: TimeUnit) -> tuple[str, ...]:
    chunks = timeline.plan.placement.max_chunks
    return (
        name,
        timeline.plan.placement.name + (f" x{chunks}" if chunks > 1 else ""),
        compact(timeline.makespan / unit.divisor),
        compact(timeline.longest_span / unit.divisor),
        percent(timeline.bubble_rate("makespan")),
        percent(timeline.bubble_rate("span")),
        f"{comparison.speed_up(timeline, 'makespan'):.3f}",
        f"{comparison.speed_up(timeline, 'span'):.3f}",
        str(sum(timeline.messages_sent)),
        compact(max(timeline.peaks)),
        " ".join(compact(peak) for peak in timeline.peaks),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in _LEFT_ALIGNED else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _remarks(comparison: Comparison) -> list[str]:
    lines = []
    kinds: tuple[tuple[Objective, str], ...] = (
        ("makespan", "ranks meet at the optimizer step (makespan)"),
        ("span", "they do not: optimizer post-validation (longest span)"),
    )
    for objective, words in kinds:
        name = comparison.fastest(objective)
        if name is not None:
            gain = comparison.speed_up(comparison.runnable[name], objective)
            lines.append(f"fastest where {words}: {name}, {gain:.3f} times 1F1B's speed")
    for name in comparison.runnable:
        better = comparison.dominators(name)
        if better:
            lines.append(
                f"{name} is no better than {', '.join(better)} in any column, worse in one"
            )
    return lines
