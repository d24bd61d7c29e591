"""From few micro-batches to many: repeat the steady part of a plan.

In the middle of a good plan for enough micro-batches every rank repeats a pattern of q micro-batches.
Cut each rank's program just before the first stage's F of micro-batch J, and again before that of
J + q. If every rank has, relative to J and J + q, done exactly the same at both cuts, then what lies
between is such a pattern: it can be repeated any number of times without a change of memory peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .justify import retime
from .network import Network, Orders


def extended(
    network: Network, orders: Sequence[Sequence[int]], num_microbatches: int
) -> Iterator[Orders]:
    """Orders for `num_microbatches`, from those of `network`, the fastest pattern first.

    Whether they run, and how fast, is for the caller to try: the time of a pattern is estimated
    from its time in the given orders.
    """
    added = num_microbatches - network.num_microbatches
    cuts = _cuts(network, orders)
    ends = retime(network, orders)
    patterns = []
    for first, last in _equal_states(network, orders, cuts):
        if added % (last - first) == 0:
            time = max(
                row[cut[last]] - row[cut[first]] for row, cut in zip(ends, cuts)
            ) / (last - first)
            patterns.append((time, last - first, abs(first + last - network.num_microbatches), first))
    for _, length, _, first in sorted(patterns):
        copies = added // length
        yield [
            list(order[: cut[first]])
            + list(order[cut[first] : cut[first + length]]) * (copies + 1)
            + list(order[cut[first + length] :])
            for order, cut in zip(orders, cuts)
        ]


def _cuts(network: Network, orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per rank, the place of each F of its first stage."""
    firsts = [lanes[0] for lanes in network.lanes_by_rank]
    return [
        [place for place, lane in enumerate(order) if lane == first]
        for order, first in zip(orders, firsts)
    ]


def _equal_states(
    network: Network, orders: Sequence[Sequence[int]], cuts: list[list[int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of cuts between which every rank runs each of its lanes equally often; for each cut
    the next few equal ones."""
    states: list[list[int]] = [[] for _ in range(network.num_microbatches)]
    for order, cut, lanes in zip(orders, cuts, network.lanes_by_rank):
        done = dict.fromkeys(lanes, 0)
        before = 0
        for j, place in enumerate(cut):
            for lane in order[before:place]:
                done[lane] += 1
            before = place
            states[j] += [count - j for count in done.values()]
    seen: dict[tuple[int, ...], list[int]] = {}
    for j, state in enumerate(states):
        earlier = seen.setdefault(tuple(state), [])
        for i in earlier[-4:]:
            yield i, j
        earlier.append(j)
