"""Improving orders: double justification, and small moves on the critical path.

Everything here is deterministic and counts its work in instructions placed, never in seconds, so
that the same request gives the same plan on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .justify import Stuck, justify, retime
from .network import Network, Orders

WINDOW = 24  # how far ahead an instruction may be pulled from
# Delays allowed to the late and the early pass, per round: two ways to settle.
COOLING = (((0.0, 0.0),), ((0.8, 0.4), (0.0, 0.0)))
_GAIN = 1e-9  # relative: what counts as better


@dataclass
class Budget:
    """Work left, in instructions placed by `justify` or `retime`."""

    left: float

    def spend(self, work: float) -> None:
        self.left -= work


@dataclass(frozen=True)
class Candidate:
    """Orders within the memory limits, and their cost under the network's objective."""

    cost: float
    orders: Orders


def reverse(orders: Sequence[Sequence[int]]) -> Orders:
    return [list(order)[::-1] for order in orders]


def justify_early(
    network: Network, orders: Sequence[Sequence[int]], budget: Budget, delay: float = 0.0
) -> Candidate:
    budget.spend(network.num_instructions)
    m = network.num_microbatches
    earlier, ends = justify(network.forward, orders, network.limits, m, WINDOW, delay)
    return Candidate(max(e - o for e, o in zip(ends, network.origin, strict=False)), earlier)


def justify_both(
    network: Network,
    orders: Sequence[Sequence[int]],
    budget: Budget,
    delays: tuple[float, float] = (0.0, 0.0),
) -> Candidate:
    """Late, then early (see justify.py)."""
    budget.spend(network.num_instructions)
    m = network.num_microbatches
    later, _ = justify(network.backward, reverse(orders), network.limits, m, WINDOW, delays[0])
    return justify_early(network, reverse(later), budget, delays[1])


def settle(network: Network, orders: Sequence[Sequence[int]], budget: Budget) -> Candidate:
    """The best of double justification without delays, and with delays that shrink (COOLING)."""
    early = best = justify_early(network, orders, budget)
    for rounds in COOLING:
        found = early
        for delays in rounds:
            found = justify_both(network, found.orders, budget, delays)
            if found.cost < best.cost:
                best = found
    return best


def polish(
    network: Network, best: Candidate, budget: Budget, bound: float, *, seed: int = 0
) -> Candidate:
    """Iterated local search: move one instruction of the critical path, then justify both ways.

    Moves that leave the cost as it is are kept: they cross the plateaus between better plans.
    Stops at the budget, or at `bound`, which no plan can beat.
    """
    draw = random.Random(seed)
    path = critical_path(network, best.orders)
    misses = 0
    while budget.left > 0 and best.cost > bound * (1 + _GAIN) and misses < 1000:
        rank, place = path[draw.randrange(len(path))]
        distance = 1 + int(draw.random() ** 2 * 5)
        moved = _move(network, best.orders, rank, place, distance * draw.choice((-1, 1)))
        misses += 1
        if moved is None:
            continue
        try:
            found = justify_both(network, moved, budget)
        except Stuck:
            continue
        if found.cost <= best.cost * (1 + _GAIN):
            if found.cost < best.cost * (1 - _GAIN):
                misses = 0
            best = found
            path = critical_path(network, best.orders)
            budget.spend(network.num_instructions)
    return best


def critical_path(network: Network, orders: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(rank, place) of a chain of instructions that sets the cost, last first."""
    ahead = network.forward
    ends = retime(network, orders)
    microbatch: list[list[int]] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        counts: dict[int, int] = {}
        microbatch.append([])
        for place, lane in enumerate(order):
            j = counts[lane] = counts.get(lane, -1) + 1
            microbatch[rank].append(j)
            places[lane, j] = (rank, place)
    lateness = [e[-1] - o for e, o in zip(ends, network.origin, strict=False)]
    rank = lateness.index(max(lateness))
    place = len(orders[rank]) - 1
    path = []
    while True:
        path.append((rank, place))
        lane = orders[rank][place]
        start = ends[rank][place] - ahead.duration[lane]
        if place > 0 and ends[rank][place - 1] >= start - _GAIN * (1 + start):
            place -= 1
        elif ahead.source[lane] >= 0:
            rank, place = places[ahead.source[lane], microbatch[rank][place]]
        else:
            return path


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
