"""Justification: run programs as early as possible, filling idle time out of order.

`justify` is a list scheduler. Each rank runs the head of its list; while the head's input has not
arrived, the rank may pull a later instruction forward if that passes no memory limit on the way to
the place it came from, and if it ends in time. The head stays runnable, so the result never
deadlocks where the given lists do not, and stays within the limits where they do.

Running everything early, then (time reversed) late, then early again is the *double justification*
of project scheduling (Valls, Ballestin, Quintanilla, EJOR 165, 2005): each pass uses the order of
the one before, and the pair shortens plans far below what either rule reaches alone. For pipelines
the late pass postpones F and W to where they are needed; the early pass then finds the idle time
that this frees.

"In time" is the choice that shapes a pass:

- *bold*: before the head's input arrives, as far as that is known; a pulled instruction may end
  late by `delay` times its duration. Finds the most, but may lose.
- *guarded*: before the head is due, which is when it starts in the plan that the pass begins with.
  Every instruction then starts when it is due or before: the result is never slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from .network import NO_LANE, Network, Orders, View

NEVER = float("inf")
WINDOW = 24  # how far ahead an instruction may be pulled from
_TOLERANCE = 1e-9

Times = list[list[float]]  # per lane, of micro-batch 0, 1, ...


class Stuck(Exception):
    """The given orders deadlock."""


class Timed(NamedTuple):
    """Orders that run, with the end of each instruction and of each rank."""

    orders: Orders
    ends: Times
    last: list[float]  # per rank


def cost_of(network: Network, timed: Timed) -> float:
    """The cost under the network's objective."""
    return max(end - origin for end, origin in zip(timed.last, network.origin, strict=True))


def retime(network: Network, orders: Orders) -> Timed:
    """The orders as they are, with every start as soon as possible. Raises Stuck."""
    view = network.forward
    arrivals = _arrivals(view, network.num_microbatches)
    ends: Times = [[] for _ in arrivals]
    last = [0.0] * len(orders)
    places = [0] * len(orders)
    stack = list(range(len(orders)))
    duration, rank, local, feeds = view.duration, view.rank, view.local, view.feeds
    while stack:
        r = stack.pop()
        order, time, place = orders[r], last[r], places[r]
        while place < len(order):
            lane = order[place]
            j = len(ends[lane])
            known = arrivals[lane]
            if j >= len(known) or (local[lane] != NO_LANE and len(ends[local[lane]]) <= j):
                break
            time = max(time, known[j]) + duration[lane]
            ends[lane].append(time)
            place += 1
            for fed, lag in feeds[lane]:
                arrivals[fed].append(time + lag)
                if rank[fed] != r:
                    stack.append(rank[fed])
        last[r], places[r] = time, place
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise Stuck
    return Timed(orders, ends, last)


def justify(
    view: View,
    orders: Orders,
    limits: Sequence[float],
    num_microbatches: int,
    *,
    delay: float = 0.0,
    due: Times | None = None,
) -> Timed:
    """The orders after pulling instructions forward into idle time: guarded by the starts `due`
    if they are given, else bold. Raises Stuck."""
    found = _Pass(view, orders, limits, num_microbatches, delay, due)
    found.run()
    if any(found.rest):
        raise Stuck
    return Timed(found.order, found.ends, found.free)


def _arrivals(view: View, num_microbatches: int) -> Times:
    """When the input of each instruction is there, as far as known."""
    return [[0.0] * num_microbatches if source == NO_LANE else [] for source in view.source]


class _Pass:
    """One pass over all programs: the innermost loop of the search, hence its long methods."""

    def __init__(
        self,
        view: View,
        orders: Orders,
        limits: Sequence[float],
        num_microbatches: int,
        delay: float,
        due: Times | None,
    ) -> None:
        self.limits, self.delay, self.due = limits, delay, due
        self.duration, self.rank, self.local, self.feeds = (
            view.duration,
            view.rank,
            view.local,
            view.feeds,
        )
        self.take, self.give = view.take, view.give
        self.arrivals = _arrivals(view, num_microbatches)
        # How many instructions of each lane have run; NO_LANE, the last one, is always ahead.
        self.done = [0] * len(self.arrivals) + [num_microbatches + 1]
        self.ends: Times = [[] for _ in self.arrivals]
        self.used = [0.0] * len(orders)
        self.free = list(view.release)  # per rank, the end of its last instruction
        self.rest = [order[::-1] for order in orders]
        self.order: Orders = [[] for _ in orders]
        self.num_lanes = [len(set(order)) for order in orders]
        self.wake = list(view.release)  # per rank, when to look at it next
        self.heap = [(time, r) for r, time in enumerate(self.wake)]
        heapq.heapify(self.heap)

    def run(self) -> None:
        """Look at the rank that is due next; run what it can run; wake the ranks that wait for it.

        All other ranks stand at the same time or later only when a rank begins, so only its first
        instruction then may be one that is pulled forward."""
        heap, wake, free, used = self.heap, self.wake, self.free, self.used
        arrivals, done, ends = self.arrivals, self.done, self.ends
        duration, rank, local, feeds = self.duration, self.rank, self.local, self.feeds
        while heap:
            time, r = heapq.heappop(heap)
            if wake[r] != time:
                continue
            wake[r] = again = NEVER
            rest, order, fresh = self.rest[r], self.order[r], True
            while rest:
                lane = rest[-1]
                j = done[lane]
                known = arrivals[lane]
                if j < len(known) and known[j] <= time and done[local[lane]] > j:
                    rest.pop()
                elif not fresh:
                    again = time
                    break
                else:
                    head_at = known[j] if j < len(known) and done[local[lane]] > j else NEVER
                    until = head_at if self.due is None else self.due[lane][j]
                    place, chance_at = self._pull(r, time, until)
                    if place == 0:
                        again = chance_at if chance_at < head_at else head_at
                        break
                    lane = rest[-place]
                    del rest[-place]
                fresh = False
                used[r] += self.take[lane] + self.give[lane]
                time += duration[lane]
                done[lane] += 1
                order.append(lane)
                ends[lane].append(time)
                free[r] = time
                for fed, lag in feeds[lane]:
                    at = time + lag
                    arrivals[fed].append(at)
                    q = rank[fed]
                    at = at if at > free[q] else free[q]
                    if q != r and at < wake[q]:
                        wake[q] = at
                        heapq.heappush(heap, (at, q))
            if again < wake[r]:
                wake[r] = again
                heapq.heappush(heap, (again, r))

    def _pull(self, r: int, time: float, until: float) -> tuple[int, float]:
        """Place (from the end of `rest`) of an instruction to run before the head, that ends by
        `until`; else 0, and when one may come up."""
        arrivals, done, rest = self.arrivals, self.done, self.rest[r]
        duration, local, take, give = self.duration, self.local, self.take, self.give
        used, limit, on_time = self.used[r], self.limits[r], 1 - self.delay
        until += _TOLERANCE
        again = NEVER
        head = rest[-1]
        peak = used + max(take[head], take[head] + give[head])
        level = used + take[head] + give[head]
        unseen = self.num_lanes[r] - 1
        seen = {head}
        for place in range(2, min(len(rest), WINDOW) + 1):
            lane = rest[-place]
            if lane not in seen:
                seen.add(lane)
                unseen -= 1
                j = done[lane]
                known = arrivals[lane]
                if j < len(known) and done[local[lane]] > j:
                    at = known[j] if known[j] > time else time
                    if at < again and at + duration[lane] * on_time <= until:
                        extra = take[lane] + give[lane]
                        if used + take[lane] <= limit and (extra <= 0 or peak + extra <= limit):
                            if at <= time:
                                return place, time
                            again = at
                if unseen == 0:
                    break
            level += take[lane]
            if level > peak:
                peak = level
            level += give[lane]
            if level > peak:
                peak = level
        return 0, again
