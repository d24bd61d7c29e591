"""Justification: run programs as early as possible, filling idle time out of order.

`justify` is a list scheduler. Each rank runs the head of its list; while the head's input has not
arrived, the rank may pull a later instruction forward if that fits into the wait and no memory
limit is passed on the way to the place it came from. The head stays runnable, so the result never
deadlocks where the given lists do not, and stays within the limits where they do.

Pulling everything early, then (time reversed) late, then early again is the *double justification*
of project scheduling (Valls, Ballestin, Quintanilla, EJOR 165, 2005): each pass uses the order of
the one before, and the pair shortens schedules far below what either rule reaches alone. For
pipelines the backward pass postpones F and W to where they are needed, the forward pass then
finds the idle time that this frees.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .network import Network, Orders, View

NEVER = float("inf")
TOLERANCE = 1e-9


class Stuck(Exception):
    """The given orders deadlock."""


def retime(network: Network, orders: Sequence[Sequence[int]]) -> list[list[float]]:
    """Ends of all instructions, per rank in program order, with every start as soon as possible."""
    view = network.forward
    arrivals = _arrivals(view, network.num_microbatches)
    done = [0] * len(arrivals)
    clock = [0.0] * len(orders)
    ends: list[list[float]] = [[] for _ in orders]
    stack = list(range(len(orders)))
    duration, rank, local, feeds = view.duration, view.rank, view.local, view.feeds
    while stack:
        r = stack.pop()
        order, time, out = orders[r], clock[r], ends[r]
        for position in range(len(out), len(order)):
            lane = order[position]
            j = done[lane]
            known = arrivals[lane]
            if j >= len(known) or (local[lane] >= 0 and done[local[lane]] <= j):
                break
            if known[j] > time:
                time = known[j]
            time += duration[lane]
            out.append(time)
            done[lane] = j + 1
            for fed, lag in feeds[lane]:
                arrivals[fed].append(time + lag)
                if rank[fed] != r:
                    stack.append(rank[fed])
        clock[r] = time
    if any(len(out) < len(order) for out, order in zip(ends, orders, strict=False)):
        raise Stuck
    return ends


def cost_of_ends(network: Network, ends: Sequence[Sequence[float]]) -> float:
    return max(e[-1] - o for e, o in zip(ends, network.origin, strict=False))


def _arrivals(view: View, num_microbatches: int) -> list[list[float]]:
    """Per lane, when the input of micro-batch 0, 1, ... is there, as far as known."""
    return [[0.0] * num_microbatches if source < 0 else [] for source in view.source]


def justify(
    view: View,
    orders: Sequence[Sequence[int]],
    limits: Sequence[float],
    num_microbatches: int,
    window: int,
    delay: float = 0.0,
) -> tuple[Orders, list[float]]:
    """The orders after pulling instructions forward into idle time, and each rank's last end."""
    arrivals = _arrivals(view, num_microbatches)
    done = [0] * (len(arrivals) + 1)
    done[-1] = num_microbatches + 1  # what a lane without a local need looks at
    used = [0.0] * len(orders)
    free = list(view.release)  # when each rank ends its last instruction
    wake = list(view.release)
    todo = [list(order)[::-1] for order in orders]
    result: Orders = [[] for _ in orders]
    heap = [(time, r) for r, time in enumerate(wake)]
    heapq.heapify(heap)
    duration, rank, local, feeds = view.duration, view.rank, view.local, view.feeds
    take, give = view.take, view.give
    while heap:
        time, r = heapq.heappop(heap)
        if wake[r] != time:
            continue
        wake[r] = NEVER
        rest, out = todo[r], result[r]
        fresh = True
        while rest:
            lane = rest[-1]
            j = done[lane]
            known = arrivals[lane]
            if j < len(known) and known[j] <= time and done[local[lane]] > j:
                rest.pop()
            elif not fresh:
                wake[r] = time
                heapq.heappush(heap, (time, r))
                break
            else:
                head_at = known[j] if j < len(known) and done[local[lane]] > j else NEVER
                place, following = _pull(
                    view, rest, arrivals, done, time, head_at, used[r], limits[r], window, delay
                )
                if place == 0:
                    if following < NEVER:
                        wake[r] = following
                        heapq.heappush(heap, (following, r))
                    break
                lane = rest[-place]
                j = done[lane]
                del rest[-place]
            fresh = False
            used[r] += take[lane] + give[lane]
            time += duration[lane]
            done[lane] = j + 1
            out.append(lane)
            free[r] = time
            for fed, lag in feeds[lane]:
                at = time + lag
                arrivals[fed].append(at)
                q = rank[fed]
                if q != r:
                    if at < free[q]:
                        at = free[q]
                    if at < wake[q]:
                        wake[q] = at
                        heapq.heappush(heap, (at, q))
    if any(todo):
        raise Stuck
    return result, free


def _pull(
    view: View,
    rest: list[int],
    arrivals: list[list[float]],
    done: list[int],
    time: float,
    head_at: float,
    used: float,
    limit: float,
    window: int,
    delay: float,
) -> tuple[int, float]:
    """Place (from the end of `rest`) of an instruction to run before the head, else 0 and the
    time at which to look again."""
    duration, local, take, give = view.duration, view.local, view.take, view.give
    following = head_at
    head = rest[-1]
    level = used + take[head]
    peak = level
    level += give[head]
    if level > peak:
        peak = level
    seen = {head}
    for place in range(2, min(len(rest), window) + 1):
        lane = rest[-place]
        if lane not in seen:
            seen.add(lane)
            j = done[lane]
            known = arrivals[lane]
            if j < len(known) and done[local[lane]] > j:
                at = known[j] if known[j] > time else time
                if at < following and at + duration[lane] * (1 - delay) <= head_at + TOLERANCE:
                    extra = take[lane] + give[lane]
                    if used + take[lane] <= limit and (extra <= 0 or peak + extra <= limit):
                        if at <= time:
                            return place, time
                        following = at
        level += take[lane]
        if level > peak:
            peak = level
        level += give[lane]
        if level > peak:
            peak = level
    return 0, following
