"""The search for plans: from a placement, costs and memory limits to the fastest plan found.

    hand-made orders      ─┐
    greedy.py: list rules  ├─▶ settle each ──▶ polish the best ──▶ repeat its steady part
    blocks.py: blocks     ─┘   (improve.py)    (improve.py)        (extend.py)

For many micro-batches all but the last step work on a plan for a few, which has the same warm-up,
steady part and cool-down. The work is bounded by a count of instructions placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, zip_longest
from math import inf

from ..instruction import ScheduleError
from ..memory import ROUNDING
from ..placement import Placement
from ..plan import Plan
from ..request import PlanRequest
from .blocks import blocks_within, unroll
from .bounds import least_limits, lower_bound
from .extend import Pattern, patterns, repeated
from .greedy import Rule, greedy_orders, rules_for
from .improve import (
    GAIN,
    Budget,
    finish,
    guarded_rounds,
    polish,
    settle_bold,
    settle_guarded,
    settle_undisturbed,
    timed,
)
from .justify import Stuck, Timed, cost_of
from .network import B, F, Network, Orders, W, peaks

Planner = Callable[[PlanRequest], Plan]
Settle = Callable[[Network, Orders, Budget, float], Timed]

# Work, in instructions placed: so much for 8 ranks, growing with their number ...
WORK = 120_000
GROWTH = 1.3  # power
# ... but each instruction of the small plan at least and at most so often.
LEAST_EFFORT, MOST_EFFORT = 25, 1000
SEED_SHARE = 0.5  # of the work, for trying seeds; the rest goes into polishing
# How much slower than the best so far, relatively, a seed may be after its first round and still be
# settled: in a search for the whole plan, and for a small plan, of which the period counts as well.
HOPELESS, HOPELESS_SMALL = 0.005, 0.03


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
    small = replace(network, num_microbatches=_small_size(network))
    budget = Budget(_work_for(small))
    greedy = _greedy_plans(small, budget) if _greedy_does_well(small) else []
    whole = small.num_microbatches == network.num_microbatches
    hand_made = [
        timed(small, orders, budget) for orders in _hand_made(small, request, seeds, memory_limits)
    ]
    starts = [*hand_made, *(found for _, found in greedy)]
    pool = _settled_seeds(small, starts, budget, HOPELESS if whole else HOPELESS_SMALL)
    if whole:
        best = _polish_best(network, pool, budget, lambda t: cost_of(network, t))
    else:
        found = [
            *_hand_made(network, request, seeds, memory_limits),
            *greedy_orders(network, [rule for rule, _ in greedy[:3]], budget),
        ]  # which need not have a steady part
        best = min(
            [_extend(network, small, pool, budget), *(timed(network, o, budget) for o in found)],
            key=lambda t: cost_of(network, t),
        )
    return network.to_plan(schedule, best.orders)


def _work_for(network: Network) -> float:
    """The budget: 8 ranks take well under half a second for it, 64 well under half a minute."""
    size = network.num_instructions
    work = WORK * max(1.0, network.placement.num_ranks / 8) ** GROWTH
    return max(LEAST_EFFORT * size, min(MOST_EFFORT * size, work))


def _refuse_if_too_low(schedule: str, network: Network, memory_limits: Sequence[float]) -> None:
    for rank, (least, limit) in enumerate(zip(least_limits(network), memory_limits, strict=True)):
        if least > limit * (1 + ROUNDING):
            raise ScheduleError(
                f"the memory limit of rank {rank} is {limit:g}, but {schedule} needs at least "
                f"{least:g} there to pass a single micro-batch; raise the limit"
            )


def _small_size(network: Network) -> int:
    """How many micro-batches to search with: all, or where they are many enough for a steady part
    between warm-up and cool-down, and such that patterns of most lengths fill up the rest."""
    m, num_ranks = network.num_microbatches, network.placement.num_ranks
    least = num_ranks + 2 * max(num_ranks, _in_flight(network))
    multiple = num_ranks if network.placement.name == "looped" else 12
    return m if m <= 2 * least else least + (m - least) % multiple


def _in_flight(network: Network) -> int:
    """How many micro-batches the memory holds at once, counting up to twice the ranks."""
    take = network.forward.take
    each = max(sum(take[lane] for lane in lanes) for lanes in network.lanes_by_rank)
    return int(min(2 * network.placement.num_ranks, max(network.limits) / max(each, 1e-12)))


# ---- seeds -----------------------------------------------------------------


def _hand_made(
    network: Network,
    request: PlanRequest,
    seeds: Sequence[Planner],
    memory_limits: Sequence[float],
) -> Iterator[Orders]:
    """The orders of the hand-made planners that fit."""
    asked = replace(
        request,
        num_microbatches=network.num_microbatches,
        memory_limits=tuple(memory_limits),
    )
    for plan in seeds:
        try:
            orders = network.orders_of(plan(asked))
        except ScheduleError:  # it needs more memory
            continue
        if _within(network, orders):
            yield orders


def _settled_seeds(
    network: Network, starts: Sequence[Timed], budget: Budget, hopeless: float
) -> list[Timed]:
    """The starts as they are, and seeds after double justification. At least one."""
    keep = budget.left * (1 - SEED_SHARE)
    bound = lower_bound(network) * (1 + GAIN)
    pool = sorted(starts, key=lambda t: cost_of(network, t))
    best = cost_of(network, pool[0]) if pool else inf
    tried: set[tuple[Settle, int]] = set()
    for settle, orders in _seeds(network, [t.orders for t in pool[:3]], budget):
        if pool and (budget.left < keep or best <= bound):
            break
        key = (settle, hash(tuple(map(tuple, orders))))
        if key in tried or not _within(network, orders):
            continue
        tried.add(key)
        margin = hopeless if settle is settle_bold else 10 * hopeless
        pool.append(settle(network, orders, budget, best * (1 + margin)))
        best = min(best, cost_of(network, pool[-1]))
    return pool or [settle_guarded(network, _one_at_a_time(network), budget)]


def _seeds(
    network: Network, leaders: Sequence[Orders], budget: Budget
) -> Iterator[tuple[Settle, Orders]]:
    """Orders, and how to settle them: the leaders, then others made for the costs."""
    settles = [settle_bold, settle_guarded]
    if network.costs.transfer > 0:
        settles.append(settle_undisturbed)
    for settle in settles:
        yield from ((settle, orders) for orders in leaders)
    blocks = (
        (settle, unroll(network, block))
        for settle, block in zip(cycle(settles), blocks_within(network))
    )
    if _greedy_does_well(network):  # the leaders have been chosen from its orders
        yield from blocks
        return
    greedy = (
        (settle_guarded, orders) for orders in greedy_orders(network, rules_for(network), budget)
    )
    yield from islice(blocks, 4)
    for seeds in zip_longest(greedy, blocks, blocks):
        yield from (seed for seed in seeds if seed is not None)


def _greedy_does_well(network: Network) -> bool:
    """With one chunk per rank, and where memory hardly binds. Elsewhere building blocks do better,
    which know how to share it."""
    enough = min(network.num_microbatches, network.placement.num_ranks + 1)
    return network.placement.max_chunks == 1 or _in_flight(network) >= enough


def _greedy_plans(network: Network, budget: Budget) -> list[tuple[Rule, Timed]]:
    """What each rule leads to, best first."""
    found = [
        (rule, timed(network, orders, budget))
        for rule in rules_for(network)
        for orders in greedy_orders(network, [rule], budget)
    ]
    return sorted(found, key=lambda pair: cost_of(network, pair[1]))


def _within(network: Network, orders: Orders) -> bool:
    return all(p <= limit for p, limit in zip(peaks(network, orders), network.limits, strict=True))


def _one_at_a_time(network: Network) -> Orders:
    """Each micro-batch all the way before the next: what any limits allow that allow a plan."""
    kinds = (B, W) if network.split else (B,)
    return [
        [
            *(3 * stage + F for stage in sorted(held)),
            *(3 * stage + kind for stage in sorted(held, reverse=True) for kind in kinds),
        ]
        * network.num_microbatches
        for held in network.placement.stages_by_rank
    ]


# ---- the best of them ------------------------------------------------------


def _polish_best(
    network: Network, pool: list[Timed], budget: Budget, value: Callable[[Timed], float]
) -> Timed:
    """Polish the four best of the pool for a while, then the two best of them, then the best."""
    bound = lower_bound(network)
    pool = _distinct(sorted(pool, key=value))[:6]
    if value(pool[0]) <= bound * (1 + GAIN):
        return pool[0]
    pool = [min(t, finish(network, t, budget), key=value) for t in pool]
    pool = sorted(pool, key=value)[:4]
    total = budget.left
    for number in (4, 2, 1):
        share = Budget(0)
        for k, leader in enumerate(pool[:number]):
            share.left += total / 3 / number
            pool[k] = polish(network, leader, share, value, bound, seed=10 * number + k)
        pool.sort(key=value)
    budget.spend(total)
    return pool[0]


def _distinct(pool: Sequence[Timed]) -> list[Timed]:
    found: list[Timed] = []
    for candidate in pool:
        if all(candidate.orders != other.orders for other in found):
            found.append(candidate)
    return found


# ---- from few micro-batches to many ----------------------------------------


def _extend(network: Network, small: Network, pool: list[Timed], budget: Budget) -> Timed:
    """The best plan for all micro-batches that repeats the steady part of a small one."""

    def estimate(candidate: Timed) -> float:
        """The cost with the fastest usable pattern repeated."""
        usable = _usable(network, small, candidate)
        added = network.num_microbatches - small.num_microbatches
        return cost_of(small, candidate) + added * usable[0].time if usable else inf

    pool = [candidate for candidate in pool if estimate(candidate) < inf]
    if pool:
        pool.append(_polish_best(small, pool, budget, estimate))
    pool.sort(key=estimate)
    extended = [
        found
        for leader in pool[:4]
        if (found := _extended(network, small, leader, budget)) is not None
    ]
    if not extended:
        extended = [timed(network, _one_at_a_time(network), budget)]
    best = min(extended, key=lambda t: cost_of(network, t))
    return guarded_rounds(network, best, budget, most=4)


def _usable(network: Network, small: Network, candidate: Timed) -> list[Pattern]:
    added = network.num_microbatches - small.num_microbatches
    return [p for p in patterns(small, candidate) if added % p.length == 0]


def _extended(network: Network, small: Network, candidate: Timed, budget: Budget) -> Timed | None:
    """The candidate with a pattern repeated: the best of the three fastest patterns."""
    added = network.num_microbatches - small.num_microbatches
    found = []
    for pattern in _usable(network, small, candidate)[:3]:
        orders = repeated(small, candidate.orders, pattern, added // pattern.length)
        try:
            found.append(timed(network, orders, budget))
        except Stuck:
            continue
    return min(found, key=lambda t: cost_of(network, t), default=None)
