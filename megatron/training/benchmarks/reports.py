"""From the ranks' times to rows of figures, their verdicts and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Objective, simulate
from megatron.training.benchmarks import compute, emulated, split, torch_peer
from megatron.training.benchmarks.measure import Times, join
from megatron.training.benchmarks.verdicts import (
    FASTER_THAN_PEER,
    HOST_US_LIMIT,
    LOSS_TOLERANCE,
    PEER_SHARE_LIMIT,
    REALISED_GAIN_LIMIT,
    SMALLEST_GAIN,
    SPLIT_COST_LIMITS,
    Verdict,
    over_ideal_limit,
)

BASELINE = "1f1b"
Runtime = Literal["ours", "torch"]


@dataclass(frozen=True, kw_only=True)
class EmulatedRow:
    """One schedule on one runtime with passes of given length."""

    where: str  # the case, as text
    num_ranks: int
    num_microbatches: int
    pass_ms: float  # T_F per rank and pass
    schedule: str
    runtime: Runtime
    step_ms: float  # median
    spread: float  # quartile distance over median: the noise
    repeats_ms: tuple[float, ...]
    ideal_ms: float  # the simulator's, transfers taking no time
    over_ideal: float
    over_ideal_with_transfer: float  # the simulator told the measured transfer
    over_bound: float  # over m (T_F + T_B + T_W)


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """One schedule on one runtime with passes of length zero: microseconds per instruction."""

    num_ranks: int
    num_microbatches: int
    schedule: str
    runtime: Runtime
    wall_us: float  # median step over the longest program
    cpu_us: float  # processor time of all threads, gloo's among them; mean over ranks
    spread: float


@dataclass(frozen=True, kw_only=True)
class ComputeRow:
    """One schedule on one runtime on the real model."""

    where: str  # the case, as text
    num_ranks: int
    num_microbatches: int
    schedule: str
    runtime: Runtime
    step_ms: float
    spread: float
    repeats_ms: tuple[float, ...]
    tokens_per_s: float
    gain: float  # over our 1F1B
    ours_over_torch: float | None  # of torch's rows: our tokens/s over its
    predicted_ms: float | None  # by the simulator, from passes measured in the same run
    predicted_gain: float | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class SplitRow:
    """One layer: milliseconds of F, B and W, and of F and BW."""

    case: str
    runtime: Runtime
    split_ms: float
    fused_ms: float
    ratio: float
    spread: float  # the larger of the two


def emulated_rows(
    case: emulated.EmulatedCase, results: Sequence[emulated.RankResult], objective: Objective
) -> list[EmulatedRow]:
    """A torch schedule is held against the simulated time of the order that it ran itself."""
    times = join([result.times for result in results])
    transfer = results[0].transfer_s

    def row(plan: Plan, runtime: Runtime, taken: Times) -> EmulatedRow:
        def ideal_s(transfer_s: float) -> float:
            costs = emulated.costs_of(case.rank_seconds, plan.placement, transfer_s)
            return simulate(plan, costs).cost(objective)

        step = taken.median_s
        return EmulatedRow(
            where=case.where,
            num_ranks=case.num_ranks,
            num_microbatches=case.num_microbatches,
            pass_ms=1e3 * case.rank_seconds.forward,
            schedule=plan.schedule,
            runtime=runtime,
            step_ms=1e3 * step,
            spread=taken.spread,
            repeats_ms=tuple(1e3 * s for s in taken.step_s),
            ideal_ms=1e3 * ideal_s(0.0),
            over_ideal=step / ideal_s(0.0),
            over_ideal_with_transfer=step / ideal_s(transfer),
            over_bound=step / case.work_s,
        )

    return [row(*contestant) for contestant in _contestants(case.plans, times, results[0])]


def host_rows(case: emulated.EmulatedCase, results: Sequence[emulated.RankResult]) -> list[HostRow]:
    times = join([result.times for result in results])
    return [
        HostRow(
            num_ranks=case.num_ranks,
            num_microbatches=case.num_microbatches,
            schedule=plan.schedule,
            runtime=runtime,
            wall_us=1e6 * taken.median_s / max(len(program) for program in plan.programs),
            cpu_us=1e6 * taken.median_cpu_s / sum(len(program) for program in plan.programs),
            spread=taken.spread,
        )
        for plan, runtime, taken in _contestants(case.plans, times, results[0])
    ]


def _contestants(
    plans: Sequence[Plan], times: dict[str, Times], result: emulated.RankResult
) -> list[tuple[Plan, Runtime, Times]]:
    """Ours and torch's, schedule by schedule, each with the plan that it ran."""
    found: list[tuple[Plan, Runtime, Times]] = []
    for plan in plans:
        found.append((plan, "ours", times[plan.schedule]))
        if plan.schedule in result.peer_plans:
            taken = times[torch_peer.contestant_name(plan.schedule)]
            found.append((result.peer_plans[plan.schedule], "torch", taken))
    return found


def emulated_remarks(
    case: emulated.EmulatedCase, results: Sequence[emulated.RankResult]
) -> list[str]:
    """The conditions of a measurement, and what was not measured."""
    size = 4 * math.prod(case.shape)
    late = max(result.overshoot_s for result in results)
    conditions = (
        f"{case.where}: sleeps end {1e6 * late:.0f} us late, "
        f"a message of {size / 1024:.0f} KiB takes {1e6 * results[0].transfer_s:.0f} us"
    )
    return [conditions, *refusal_remarks(case.where, results[0].refusals)]


def refusal_remarks(where: str, refusals: dict[str, str]) -> list[str]:
    return [f"{where}: torch refuses {name}: {why}" for name, why in refusals.items()]


def emulated_verdicts(rows: Sequence[EmulatedRow]) -> list[Verdict]:
    verdicts = []
    peers = {(row.where, row.schedule): row for row in rows if row.runtime == "torch"}
    for row in rows:
        limit = over_ideal_limit(row.pass_ms)
        if row.runtime == "torch" or limit is None:
            continue
        claim = f"{row.where} {row.schedule}: measured / ideal"
        verdicts.append(Verdict(claim, row.over_ideal, limit))
        peer = peers.get((row.where, row.schedule))
        if peer is not None and peer.over_ideal > 1:
            share = (row.over_ideal - 1) / (peer.over_ideal - 1)
            claim = f"{row.where} {row.schedule}: overhead / torch's overhead"
            verdicts.append(Verdict(claim, share, PEER_SHARE_LIMIT))
    return verdicts


def host_verdicts(rows: Sequence[HostRow]) -> list[Verdict]:
    return [
        Verdict(f"{row.schedule}: host us per instruction", row.wall_us, HOST_US_LIMIT)
        for row in rows
        if row.runtime == "ours"
    ]


def compute_rows(
    case: compute.ComputeCase,
    results: Sequence[compute.RankResult],
    splits_backward: dict[str, bool],
) -> list[ComputeRow]:
    """`splits_backward` says of each schedule whether its plans have B and W."""
    times = join([result.times for result in results])
    calibration = compute.merged([result.calibration for result in results])
    losses = {name: loss for result in results for name, loss in result.losses.items()}
    predicted_s = {}
    for plan in case.plans:
        splits = splits_backward[plan.schedule]
        costs: Costs = compute.costs_of(calibration, plan.placement, splits_backward=splits)
        predicted_s[plan.schedule] = simulate(plan, costs).makespan

    def row(schedule: str, runtime: Runtime, name: str) -> ComputeRow:
        predicted = predicted_s[schedule] if runtime == "ours" else None
        return ComputeRow(
            where=case.where,
            num_ranks=case.num_ranks,
            num_microbatches=case.num_microbatches,
            schedule=schedule,
            runtime=runtime,
            step_ms=1e3 * times[name].median_s,
            spread=times[name].spread,
            repeats_ms=tuple(1e3 * s for s in times[name].step_s),
            tokens_per_s=case.tokens_per_step / times[name].median_s,
            gain=times[BASELINE].over(times[name]) - 1,
            ours_over_torch=None if runtime == "ours" else times[name].over(times[schedule]),
            predicted_ms=1e3 * predicted if predicted else None,
            predicted_gain=predicted_s[BASELINE] / predicted - 1 if predicted else None,
            loss=losses[name],
        )

    rows = []
    for plan in case.plans:
        rows.append(row(plan.schedule, "ours", plan.schedule))
        peer = torch_peer.contestant_name(plan.schedule)
        if peer in times:
            rows.append(row(plan.schedule, "torch", peer))
    return rows


def compute_verdicts(rows: Sequence[ComputeRow]) -> list[Verdict]:
    verdicts = []
    for row in rows:
        if row.ours_over_torch is not None:
            claim = f"{row.where} {row.schedule}: tokens/s / torch's tokens/s"
            verdicts.append(Verdict(claim, row.ours_over_torch, FASTER_THAN_PEER, at_least=True))
        elif row.predicted_gain is not None and row.predicted_gain >= SMALLEST_GAIN:
            realised = row.gain / row.predicted_gain
            claim = f"{row.where} {row.schedule}: gain over 1f1b / predicted gain"
            verdicts.append(Verdict(claim, realised, REALISED_GAIN_LIMIT, at_least=True))
    for where in dict.fromkeys(row.where for row in rows):
        losses = [row.loss for row in rows if row.where == where]
        difference = (max(losses) - min(losses)) / min(losses)
        claim = f"{where}: largest relative difference of losses"
        verdicts.append(Verdict(claim, difference, LOSS_TOLERANCE))
    return verdicts


def split_rows(case: split.SplitCase, times: dict[str, Times]) -> list[SplitRow]:
    contestants: list[tuple[Runtime, str, str]] = [("ours", split.SPLIT, split.FUSED)]
    if case.with_peer:
        contestants.append(("torch", split.PEER_SPLIT, split.PEER_FUSED))
    return [
        SplitRow(
            case=case.name,
            runtime=runtime,
            split_ms=1e3 * times[name].median_s / case.passes_per_repeat,
            fused_ms=1e3 * times[fused].median_s / case.passes_per_repeat,
            ratio=times[name].over(times[fused]),
            spread=max(times[name].spread, times[fused].spread),
        )
        for runtime, name, fused in contestants
    ]


def split_verdicts(rows: Sequence[SplitRow]) -> list[Verdict]:
    return [
        Verdict(
            f"{row.case}: (T_F + T_B + T_W) / (T_F + T_BW)",
            row.ratio,
            SPLIT_COST_LIMITS[row.case],
        )
        for row in rows
        if row.runtime == "ours"
    ]
