"""Iterations with their optimizer step: from the ranks' times to rows of figures and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate
from megatron.training.benchmarks import steps, torch_peer
from megatron.training.benchmarks.emulated import EmulatedCase, costs_of
from megatron.training.benchmarks.measure import Times, join
from megatron.training.benchmarks.reports import Runtime
from megatron.training.benchmarks.steps import StepCounts, StepKind, StepsResult
from megatron.training.benchmarks.verdicts import Verdict, over_ideal_limit


@dataclass(frozen=True, kw_only=True)
class StepsRow:
    """One schedule with one kind of optimizer step, iterations back to back."""

    where: str  # the case, as text
    num_ranks: int
    num_microbatches: int
    pass_ms: float  # T_F per rank and pass
    schedule: str
    runtime: Runtime
    step: StepKind
    period_ms: float  # median, of an iteration and its step
    spread: float  # quartile distance over median: the noise
    repeats_ms: tuple[float, ...]
    span_ms: float  # the plan's longest span; the simulator's, transfers taking no time
    makespan_ms: float
    over_span: float
    over_bound: float  # over m (T_F + T_B + T_W)
    over_no_step: float | None  # over our iterations of the same turn that have no step
    # Of all steps, also those that started the clock; None where there are none.
    steps: int | None
    early_steps: int | None  # taken before ranks agreed, on every rank
    rollbacks: int | None


def rows(case: EmulatedCase, results: Sequence[StepsResult]) -> list[StepsRow]:
    """Schedule by schedule: ours with each kind of step, torch's without a step."""
    times = join([result.measured.times for result in results])
    peer_plans = results[0].measured.peer_plans

    def row(plan: Plan, runtime: Runtime, kind: StepKind, name: str) -> StepsRow:
        timeline = simulate(plan, costs_of(case.rank_seconds, plan.placement))
        taken: Times = times[name]
        no_step = times[steps.contestant_name(plan.schedule, "none")]
        counts = None
        if kind != "none":
            counts = _all_ranks([result.counts[name] for result in results])
        return StepsRow(
            where=case.where,
            num_ranks=case.num_ranks,
            num_microbatches=case.num_microbatches,
            pass_ms=1e3 * case.rank_seconds.forward,
            schedule=plan.schedule,
            runtime=runtime,
            step=kind,
            period_ms=1e3 * taken.median_s,
            spread=taken.spread,
            repeats_ms=tuple(1e3 * s for s in taken.step_s),
            span_ms=1e3 * timeline.longest_span,
            makespan_ms=1e3 * timeline.makespan,
            over_span=taken.median_s / timeline.longest_span,
            over_bound=taken.median_s / case.work_s,
            over_no_step=taken.over(no_step) if counts else None,
            steps=counts.steps if counts else None,
            early_steps=counts.early if counts else None,
            rollbacks=counts.rollbacks if counts else None,
        )

    found = []
    for plan in case.plans:
        for kind in steps.KINDS:
            found.append(row(plan, "ours", kind, steps.contestant_name(plan.schedule, kind)))
        if plan.schedule in peer_plans:
            peer = torch_peer.contestant_name(plan.schedule)
            found.append(row(peer_plans[plan.schedule], "torch", "none", peer))
    return found


def verdicts(rows: Sequence[StepsRow]) -> list[Verdict]:
    """Periods with an early step against the longest span; that every one was early, and right."""
    judged = [row for row in rows if row.step == "early"]
    found = []
    for row in judged:
        limit = over_ideal_limit(row.pass_ms)
        if limit is not None:
            claim = f"{row.where} {row.schedule}: period with post-validation / longest span"
            found.append(Verdict(claim, row.over_span, limit))
    met = sum((row.steps or 0) - (row.early_steps or 0) for row in judged)
    found.append(Verdict("steps not taken early", met, 0))
    rollbacks = sum(row.rollbacks or 0 for row in judged)
    found.append(Verdict("steps rolled back", rollbacks, 0))
    return found


def _all_ranks(counts: Sequence[StepCounts]) -> StepCounts:
    """A step is early if it was on every rank, and rolled back if it was on any."""
    return StepCounts(
        steps=counts[0].steps,
        early=min(count.early for count in counts),
        rollbacks=max(count.rollbacks for count in counts),
    )
