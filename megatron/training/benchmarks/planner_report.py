"""Answers of the planner's benchmark as lines, summary and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.training.benchmarks.planner_cases import (
    BETTER,
    EQUAL,
    FAILURES,
    Answer,
)
from megatron.training.benchmarks.planner_speed import SpeedRow

ROW_HEADS = (
    f"{'against':<25} {'ours':<14} {'p':>2} {'m':>3} {'TF,TB,TW,Tc':<27} {'limit':>9} "
    f"{'peak':>6} {'cost':>10} {'theirs':>10} {'excess':>8} {'bubble':>6} {'theirs':>6} "
    f"{'gap':>7} {'s':>6}  verdict"
)

SUMMARY_HEADS = (
    f"{'against':<25} {'ours':<14} {'rows':>5} {'better':>6} {'equal':>6} {'worse':>6} "
    f"{'worst excess':>12} {'mean excess':>11} {'worst gap':>9} {'mean gap':>8} {'longest s':>9}"
)


def row_line(answer: Answer) -> str:
    """One answer; under ROW_HEADS."""
    case, costs = answer.case, answer.case.costs
    times = f"{costs.forward:g},{costs.input_grad:g},{costs.weight_grad:g},{costs.transfer:g}"
    return (
        f"{case.name:<25} {_ours(answer):<14} {case.num_ranks:>2} {case.num_microbatches:>3} "
        f"{times:<27} {_limit(answer):>9} {_figure(answer.peak_memory, '.2f'):>6} "
        f"{_figure(answer.cost, '.3f'):>10} {case.cost:>10.3f} {answer.excess:>+8.3%} "
        f"{_figure(answer.bubble_rate, '.4f'):>6} {case.bubble_rate:>6.4f} "
        f"{_figure(answer.gap, '.2%'):>7} {answer.plan_s:>6.2f}  {answer.verdict}"
        + (f": {answer.refusal}" if answer.refusal else "")
    )


def _ours(answer: Answer) -> str:
    chunks = answer.case.num_chunks
    short = answer.case.schedule.replace("zb-interleaved", "zb-interl.")
    return short if chunks is None else f"{short}/{chunks}"


def _limit(answer: Answer) -> str:
    limits = answer.case.memory_limits
    return "none" if limits is None else f"{max(limits):.3f}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary(answers: Sequence[Answer]) -> str:
    """By contestant and schedule of ours: rows, verdicts, the worst and the mean gaps."""
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((group_of(answer), _ours(answer)), []).append(answer)
    lines = [SUMMARY_HEADS]
    for (name, ours), group in [*groups.items(), (("all", ""), list(answers))]:
        gaps = [a.gap for a in group if a.gap is not None]
        excesses = [a.excess for a in group]
        better, equal = (sum(a.verdict == word for a in group) for word in (BETTER, EQUAL))
        worse = sum(a.verdict in FAILURES for a in group)
        lines.append(
            f"{name:<25} {ours:<14} {len(group):>5} {better:>6} {equal:>6} {worse:>6} "
            f"{max(excesses):>+12.4%} {sum(excesses) / len(excesses):>+11.3%} "
            f"{_figure(max(gaps, default=None), '.2%'):>9} "
            f"{_figure(sum(gaps) / len(gaps) if gaps else None, '.2%'):>8} "
            f"{max(a.plan_s for a in group):>9.2f}"
        )
    return "\n".join(lines)


def group_of(answer: Answer) -> str:
    """The contestant without the model or limit that tells its rows apart."""
    words = answer.case.name.split()
    return " ".join(words[:3]) if words[0] in ("table", "figure") else answer.case.name


def speed_line(row: SpeedRow) -> str:
    word = "reached" if row.reached else "NOT reached"
    return (
        f"{row.schedule:<14} p={row.num_ranks:<3} m={row.num_microbatches:<4}"
        f" plan {row.plan_s:7.3f} s  validate {row.validate_s:6.3f} s  communication "
        f"{row.lower_s:6.3f} s  together {row.total_s:7.3f} s = {row.over_simulate:5.1f} simulator"
        f" passes  {word} (at most {row.limit_s:g} s)"
    )


def answer_json(answer: Answer) -> dict[str, Any]:
    """Every figure of an answer, for machines."""
    case = answer.case
    return {
        "against": case.name,
        "schedule": case.schedule,
        "p": case.num_ranks,
        "m": case.num_microbatches,
        "chunks": case.num_chunks,
        "costs": vars(case.costs),
        "memory_limits": case.memory_limits,
        "stated_limit": case.stated_limit,
        "their_longest_span": case.cost,
        "their_bubble_rate": case.bubble_rate,
        "longest_span": answer.cost,
        "bubble_rate": answer.bubble_rate,
        "peak_memory": answer.peak_memory,
        "excess": None if answer.cost is None else answer.excess,
        "lower_bound": answer.bound,
        "gap": answer.gap,
        "plan_s": answer.plan_s,
        "verdict": answer.verdict,
        "refusal": answer.refusal,
    }


def speed_json(row: SpeedRow) -> dict[str, Any]:
    return {
        **vars(row),
        "total_s": row.total_s,
        "over_simulate": row.over_simulate,
        "reached": row.reached,
    }
