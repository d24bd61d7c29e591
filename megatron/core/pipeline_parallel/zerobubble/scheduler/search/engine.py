"""The search for plans: from a placement, costs and memory limits to the fastest plan found.

    hand-made orders, building blocks ──▶ settle each ──▶ polish the best ──▶ repeat its steady part
    (seeds)               (blocks.py)     (justify.py)    (improve.py)        (extend.py)

For many micro-batches all but the last step work on a plan for a few, which has the same warm-up,
steady part and cool-down. The work is bounded by a count of instructions placed, about
proportional to the size of that small plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..instruction import ScheduleError
from ..memory import ROUNDING
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from .blocks import blocks_within, unroll
from .bounds import least_limits, lower_bound
from .extend import Pattern, patterns, repeated
from .improve import Budget, Candidate, justify_both, polish, settle
from .justify import Stuck, cost_of_ends, retime
from .network import Network, Orders, peaks

Planner = Callable[[PlanRequest], Plan]

EFFORT = 80  # how often, on average, each instruction of the small plan is placed
LEAST_WORK = 80_000  # instructions placed, however small the plan
SMALL = 1600  # instructions; plans up to this size are searched as they are
SEED_SHARE = 0.5  # of the work, for trying seeds; the rest goes into polishing
_RETIME = 0.4  # work of retiming an instruction, in instructions placed


def search_plan(
    schedule: str,
    placement: Placement,
    request: PlanRequest,
    *,
    split: bool,
    memory_limits: Sequence[float],
    seeds: Sequence[Planner] = (),
) -> Plan:
    """The fastest plan found whose ranks stay within `memory_limits`.

    `split` says whether B and W are apart. `seeds` plan hand-made orders on the same placement:
    the result is never slower than one of them that fits. The request's objective is the cost.
    Deterministic. Raises ScheduleError if the limits are too low for any plan.
    """
    costs = request.costs_for(placement)
    limits = tuple(limit * (1 + ROUNDING) for limit in memory_limits)
    network = Network(placement, costs, request.num_microbatches, split, limits, request.objective)
    _refuse_if_too_low(schedule, network, memory_limits)
    small = network.with_microbatches(_small_size(network))
    budget = Budget(max(LEAST_WORK, EFFORT * small.num_instructions))
    pool = _settled_seeds(small, request, seeds, budget)
    if small.num_microbatches == network.num_microbatches:
        best = _polish_best(small, pool, budget)
    else:
        best = _extend(network, small, pool, budget)
        full = _hand_made(network, request, seeds)
        best = min([best, *(_timed(network, o) for o in full)], key=lambda c: c.cost)
    return network.to_plan(schedule, best.orders)


def _refuse_if_too_low(schedule: str, network: Network, memory_limits: Sequence[float]) -> None:
    for rank, (least, limit) in enumerate(zip(least_limits(network), memory_limits, strict=True)):
        if least > limit * (1 + ROUNDING):
            raise ScheduleError(
                f"the memory limit of rank {rank} is {limit:g}, but {schedule} needs at least "
                f"{least:g} there to pass a single micro-batch; raise the limit"
            )


def _small_size(network: Network) -> int:
    """How many micro-batches to search with: enough for a steady part, and such that patterns of
    most lengths fill up the rest."""
    m = network.num_microbatches
    if network.num_instructions <= SMALL:
        return m
    num_ranks = network.placement.num_ranks
    groups = network.placement.name == "looped"
    multiple = num_ranks if groups else 12
    least = 3 * num_ranks
    return m if m <= least + multiple else least + (m - least) % multiple


def _hand_made(
    network: Network, request: PlanRequest, seeds: Sequence[Planner]
) -> Iterator[Orders]:
    """The orders of the hand-made planners that fit."""
    asked = replace(request, num_microbatches=network.num_microbatches, memory_limits=None)
    for plan in seeds:
        try:
            orders = network.orders_of(plan(asked))
        except ScheduleError:
            continue
        if _within(network, orders):
            yield orders


def _within(network: Network, orders: Orders) -> bool:
    return all(p <= limit for p, limit in zip(peaks(network, orders), network.limits, strict=True))


def _timed(network: Network, orders: Orders) -> Candidate:
    return Candidate(cost_of_ends(network, retime(network, orders)), orders)


def _settled_seeds(
    network: Network, request: PlanRequest, seeds: Sequence[Planner], budget: Budget
) -> list[Candidate]:
    """Seeds after double justification, best first. At least one."""
    keep = budget.left * (1 - SEED_SHARE)
    pool: list[Candidate] = []
    tried: set[int] = set()
    for orders in _hand_made(network, request, seeds):
        pool.append(settle(network, orders, budget))
    for block in blocks_within(network):
        if budget.left < keep and pool:
            break
        orders = unroll(network, block)
        key = hash(tuple(map(tuple, orders)))
        if key in tried or not _within(network, orders):
            continue
        tried.add(key)
        pool.append(settle(network, orders, budget))
    return sorted(pool, key=lambda c: c.cost)


def _polish_best(network: Network, pool: list[Candidate], budget: Budget) -> Candidate:
    """Polish the four best seeds for a while, then the two best of them, then the best."""
    bound = lower_bound(network)
    total = budget.left
    for number in (4, 2, 1):
        leaders = _distinct(pool)[:number]
        share = Budget(0)
        for k, leader in enumerate(leaders):
            share.left += total / 3 / len(leaders)
            pool.append(polish(network, leader, share, bound, seed=10 * number + k))
        pool.sort(key=lambda c: c.cost)
    budget.spend(total)
    return pool[0]


def _distinct(pool: Sequence[Candidate]) -> list[Candidate]:
    found: list[Candidate] = []
    for candidate in pool:
        if all(candidate.orders != other.orders for other in found):
            found.append(candidate)
    return found


def _extend(network: Network, small: Network, pool: list[Candidate], budget: Budget) -> Candidate:
    """The best plan for all micro-batches that repeats the steady part of a small one."""
    leaders = sorted(
        (estimate, index)
        for index, candidate in enumerate(pool)
        if (estimate := _estimate(network, small, candidate)) is not None
    )
    chosen = [pool[index] for _, index in leaders[:4]]
    if chosen:
        chosen.append(_polish_best(small, chosen[:2], budget))
    extended = [candidate for leader in chosen if (candidate := _extended(network, small, leader))]
    if not extended:
        first = next(iter(blocks_within(network)))
        extended = [settle(network, unroll(network, first), budget)]
    best = min(extended, key=lambda c: c.cost)
    again = justify_both(network, best.orders, budget)
    return min(best, again, key=lambda c: c.cost)


def _usable(network: Network, small: Network, candidate: Candidate) -> list[Pattern]:
    added = network.num_microbatches - small.num_microbatches
    return [p for p in patterns(small, candidate.orders) if added % p.length == 0]


def _estimate(network: Network, small: Network, candidate: Candidate) -> float | None:
    """The cost with the fastest usable pattern repeated, or None without one."""
    usable = _usable(network, small, candidate)
    added = network.num_microbatches - small.num_microbatches
    return candidate.cost + added * usable[0].time if usable else None


def _extended(network: Network, small: Network, candidate: Candidate) -> Candidate | None:
    """The candidate with a pattern repeated: the best of the three fastest patterns."""
    added = network.num_microbatches - small.num_microbatches
    found = []
    for pattern in _usable(network, small, candidate)[:3]:
        orders = repeated(small, candidate.orders, pattern, added // pattern.length)
        try:
            found.append(_timed(network, orders))
        except Stuck:
            continue
    return min(found, key=lambda c: c.cost, default=None)
