"""From few micro-batches to many: repeat the steady part of a plan.

In the middle of a good plan for enough micro-batches, every rank repeats a pattern of q
micro-batches. Cut each rank's program just before its first stage's F of micro-batch J, and again
before that of J + q. If every rank has done, relative to J and J + q, the same at both cuts,
then what lies between is such a pattern: it can be repeated without a change of memory peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .justify import Timed
from .network import Network, Orders


class Pattern(NamedTuple):
    """What all ranks repeat, and the time that one micro-batch of it takes."""

    time: float
    length: int  # in micro-batches
    first: int  # the micro-batch at whose F it begins


def patterns(network: Network, timed: Timed) -> list[Pattern]:
    """The patterns in the orders, fastest first."""
    orders = timed.orders
    cuts = _cuts(network, orders)
    firsts = [timed.ends[lanes[0]] for lanes in network.lanes_by_rank]
    found = []
    for first, last in _equal_states(network, orders, cuts):
        time = max(ends[last] - ends[first] for ends in firsts)
        found.append(Pattern(time / (last - first), last - first, first))
    return sorted(found)


def repeated(
    network: Network, orders: Sequence[Sequence[int]], pattern: Pattern, copies: int
) -> Orders:
    """The orders with `copies` more of the pattern."""
    stop = pattern.first + pattern.length
    return [
        list(order[: cut[stop]])
        + list(order[cut[pattern.first] : cut[stop]]) * copies
        + list(order[cut[stop] :])
        for order, cut in zip(orders, _cuts(network, orders), strict=True)
    ]


def _cuts(network: Network, orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per rank, the place of each F of its first stage."""
    return [
        [place for place, lane in enumerate(order) if lane == lanes[0]]
        for order, lanes in zip(orders, network.lanes_by_rank, strict=True)
    ]


def _equal_states(
    network: Network, orders: Sequence[Sequence[int]], cuts: list[list[int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of cuts between which every rank runs each of its lanes equally often; for each cut
    the nearest few."""
    states: list[list[int]] = [[] for _ in range(network.num_microbatches)]
    for order, cut, lanes in zip(orders, cuts, network.lanes_by_rank, strict=True):
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
