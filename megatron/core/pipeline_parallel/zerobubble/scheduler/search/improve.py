"""Improving orders: double justification, and small moves on the critical path.

Everything here is deterministic and counts its work in instructions placed, never in seconds, so
that the same request gives the same plan on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from .justify import Stuck, Timed, Times, cost_of, justify, retime
from .network import NO_LANE, Network, Orders

GAIN = 1e-9  # relative: what counts as better
_RETIME = 0.4  # work of retiming an instruction, in instructions placed

# Delays allowed to the late and the early pass of a bold round (see justify.py).
COOLING = ((0.8, 0.4), (0.4, 0.2), (0.0, 0.0))
POLISHING = ((0.0, 0.0), (0.5, 0.2), (0.8, 0.4), None)  # drawn from; None: a guarded round


@dataclass
class Budget:
    """Work left, in instructions placed by `justify`."""

    left: float

    def spend(self, work: float) -> None:
        self.left -= work


def timed(network: Network, orders: Orders, budget: Budget) -> Timed:
    """The orders as they are. Raises Stuck."""
    budget.spend(_RETIME * network.num_instructions)
    return retime(network, orders)


def bold_round(
    network: Network, orders: Orders, budget: Budget, delays: tuple[float, float]
) -> Timed:
    """Late, then early, bold."""
    later = _late(network, orders, budget, delay=delays[0])
    return _early(network, _reversed(later.orders), budget, delay=delays[1])


def guarded_round(network: Network, before: Timed, budget: Budget) -> Timed:
    """Late, then early, each guarded by the starts in the plan before: never slower."""
    horizon = cost_of(network, before) + max(network.origin)
    later = _late(network, before.orders, budget, due=_mirrored(before.ends, horizon))
    due = _mirrored(later.ends, max(later.last))
    return _early(network, _reversed(later.orders), budget, due=due)


def guarded_rounds(network: Network, found: Timed, budget: Budget, most: int) -> Timed:
    """Guarded rounds until two in a row do not help."""
    idle = 0
    for _ in range(most):
        before = cost_of(network, found)
        found = guarded_round(network, found, budget)
        idle = 0 if cost_of(network, found) < before * (1 - GAIN) else idle + 1
        if idle == 2 or budget.left < 0:
            break
    return found


def settle_bold(network: Network, orders: Orders, budget: Budget, hopeless: float = inf) -> Timed:
    """The best of an early pass and of bold rounds with shrinking delays. Gives up after the first
    round if its cost is above `hopeless`."""
    best = found = _early(network, orders, budget)
    for delays in COOLING:
        found = bold_round(network, found.orders, budget, delays)
        best = min(best, found, key=lambda t: cost_of(network, t))
        if cost_of(network, best) > hopeless:
            break
    return best


def settle_guarded(
    network: Network, orders: Orders, budget: Budget, hopeless: float = inf
) -> Timed:
    """A few guarded rounds: never slower than the orders. Gives up like `settle_bold`."""
    found = guarded_round(network, timed(network, orders, budget), budget)
    if cost_of(network, found) > hopeless:
        return found
    return guarded_rounds(network, found, budget, most=4)


def settle_undisturbed(
    network: Network, orders: Orders, budget: Budget, hopeless: float = inf
) -> Timed:
    """Guarded rounds as if transfers took no time, then for real: short transfers can hide how well
    an order's instructions fit into each other."""
    found = settle_guarded(network.without_transfers, orders, budget)
    return settle_guarded(network, found.orders, budget, hopeless)


def finish(network: Network, found: Timed, budget: Budget) -> Timed:
    """Guarded rounds to the end, then a bold one: never slower."""
    found = guarded_rounds(network, found, budget, most=25)
    bold = bold_round(network, found.orders, budget, (0.0, 0.0))
    return min(found, bold, key=lambda t: cost_of(network, t))


def _early(
    network: Network, orders: Orders, budget: Budget, delay: float = 0.0, due: Times | None = None
) -> Timed:
    budget.spend(network.num_instructions)
    m = network.num_microbatches
    return justify(network.forward, orders, network.limits, m, delay=delay, due=due)


def _late(
    network: Network, orders: Orders, budget: Budget, delay: float = 0.0, due: Times | None = None
) -> Timed:
    """In reversed time: the last instruction first, and its start as its end."""
    budget.spend(network.num_instructions)
    m = network.num_microbatches
    back = _reversed(orders)
    return justify(network.backward, back, network.limits, m, delay=delay, due=due)


def _reversed(orders: Orders) -> Orders:
    return [order[::-1] for order in orders]


def _mirrored(ends: Times, horizon: float) -> Times:
    """Starts in reversed time, from ends."""
    return [[horizon - end for end in reversed(row)] for row in ends]


def polish(
    network: Network,
    best: Timed,
    budget: Budget,
    value: Callable[[Timed], float],
    bound: float,
    *,
    seed: int = 0,
) -> Timed:
    """Iterated local search: move one instruction of the critical path, then justify both ways.

    `value` is what to lower. Moves that leave it as it is are kept: they cross the plateaus between
    better plans. Stops at the budget, or at `bound`, which no plan can beat.
    """
    draw = random.Random(seed)
    path = critical_path(network, best)
    lowest = value(best)
    while budget.left > 0 and lowest > bound * (1 + GAIN):
        rank, place = path[draw.randrange(len(path))]
        distance = 1 + int(draw.random() ** 2 * 5)
        moved = _move(network, best.orders, rank, place, distance * draw.choice((-1, 1)))
        budget.spend(len(best.orders[rank]) / 4)
        if moved is None:
            continue
        delays = draw.choice(POLISHING)
        try:
            if delays is None:
                found = guarded_round(network, timed(network, moved, budget), budget)
            else:
                found = bold_round(network, moved, budget, delays)
        except Stuck:
            continue
        if cost_of(network, found) <= cost_of(network, best) * (1 + GAIN):
            reached = value(found)
            if reached <= lowest * (1 + GAIN):
                best, lowest = found, reached
                path = critical_path(network, best)
                budget.spend(_RETIME * network.num_instructions)
    return best


def critical_path(network: Network, timed: Timed) -> list[tuple[int, int]]:
    """(rank, place) of a chain of instructions that sets the cost, last first."""
    ahead = network.forward
    microbatch: list[list[int]] = []
    places: list[list[tuple[int, int]]] = [[] for _ in ahead.duration]
    for rank, order in enumerate(timed.orders):
        microbatch.append([])
        for place, lane in enumerate(order):
            microbatch[rank].append(len(places[lane]))
            places[lane].append((rank, place))
    lateness = [end - o for end, o in zip(timed.last, network.origin, strict=True)]
    rank = lateness.index(max(lateness))
    place = len(timed.orders[rank]) - 1
    path = []
    while True:
        path.append((rank, place))
        lane, j = timed.orders[rank][place], microbatch[rank][place]
        start = timed.ends[lane][j] - ahead.duration[lane]
        if place > 0:
            before = timed.orders[rank][place - 1]
            end = timed.ends[before][microbatch[rank][place - 1]]
            if end >= start - GAIN * (1 + start):
                place -= 1
                continue
        if ahead.source[lane] == NO_LANE:
            return path
        rank, place = places[ahead.source[lane]][j]


def _move(network: Network, orders: Orders, rank: int, place: int, distance: int) -> Orders | None:
    """The orders with one instruction moved, or None if its rank could not run them."""
    target = place + distance
    order = orders[rank]
    if not 0 <= target < len(order):
        return None
    moved = order[:place] + order[place + 1 :]
    moved.insert(target, order[place])
    first, last = min(place, target), max(place, target) + 1
    if moved[first:last] == order[first:last] or not _runs(network, rank, moved, last):
        return None
    return [*orders[:rank], moved, *orders[rank + 1 :]]


def _runs(network: Network, rank: int, order: list[int], stop: int) -> bool:
    """Whether a rank's order keeps F, B, W of each micro-batch in turn and the memory limit, as far
    as `stop` (behind it nothing has changed)."""
    ahead, limit = network.forward, network.limits[rank]
    done = [0] * len(ahead.duration)
    level = 0.0
    for lane in order[:stop]:
        done[lane] += 1
        if lane % 3 and done[lane] > done[lane - 1]:
            return False
        level += ahead.take[lane]
        if level > limit:
            return False
        level += ahead.give[lane]
        if level > limit:
            return False
    return True
