"""Building blocks: one micro-batch placed on circles, repeated (arXiv:2405.15362, section 3).

A block fixes when one micro-batch passes each stage; micro-batch j follows j periods later. Every
rank is a circle one period long, on which its instructions must not overlap. The paper draws its
blocks by hand for equal times; here each is *computed from the costs*: the chain F(0) .. F(last),
B(last) .. B(0) is walked once, each instruction taking the first free place on its rank's circle.
A few numbers shape the block, and with them its memory and its warm-up: extra waits per hop
(the paper's offsets), a stretch of the period, and whether W waits for a free place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .network import B, F, Network, Orders, W

_EPS = 1e-9


class Shape(NamedTuple):
    """The numbers that shape a block; waits in units of the mean time of an instruction."""

    wait_down: float = 0.0  # extra wait per hop to the next rank
    wait_up: float = 0.0  # ... to the previous rank
    wait_turn: float = 0.0  # ... on the same rank, or around from the last rank to the first
    stretch: float = 0.0  # how much longer than the busiest rank's work the period is
    real: float = 1.0  # 1: real times; 0: every instruction takes the mean time; between: mixed
    late_w: float = 0.0  # 0: W right behind B; else the part of W that must fit into a free place


class Block(NamedTuple):
    start: list[float]  # per lane, for micro-batch 0
    period: float


class _Circle:
    """A rank's period: places taken, as (phase, duration)."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.taken: list[tuple[float, float]] = []

    def first_free(self, time: float, duration: float) -> float | None:
        """The first start from `time` on without overlap, or None if there is none."""
        period = self.period
        moved, latest = True, time + period
        while moved:
            moved = False
            for phase, length in self.taken:
                into = (time - phase) % period
                if into > period - _EPS:
                    into = 0.0
                if into < length - _EPS:
                    time += length - into
                    moved = True
                elif period - into < duration - _EPS:
                    time += period - into + length
                    moved = True
            if time > latest:
                return None
        return time

    def take(self, time: float, duration: float) -> None:
        self.taken.append((time % self.period, duration))


def build_block(network: Network, shape: Shape) -> Block | None:
    """The block of that shape, or None where the instructions find no place in the period."""
    ahead = network.forward
    lanes = [lane for held in network.lanes_by_rank for lane in held]
    mean = sum(ahead.duration[lane] for lane in lanes) / len(lanes)
    times = [shape.real * t + (1 - shape.real) * mean for t in ahead.duration]
    busiest = max(sum(times[lane] for lane in held) for held in network.lanes_by_rank)
    period = busiest * (1 + shape.stretch)
    circles = [_Circle(period) for _ in network.limits]
    start = [0.0] * len(times)
    last = network.placement.last_stage
    chain = [3 * s + F for s in range(last + 1)] + [3 * s + B for s in range(last, -1, -1)]
    waits = {1: shape.wait_down, -1: shape.wait_up}
    time, before = 0.0, chain[0]
    for lane in chain:
        rank, hop = ahead.rank[lane], ahead.rank[lane] - ahead.rank[before]
        if lane != before:
            travel = shape.real * network.costs.transfer if hop else 0.0
            time += times[before] + travel + mean * waits.get(hop, shape.wait_turn)
        placed = circles[rank].first_free(time, times[lane])
        if placed is None:
            return None
        circles[rank].take(placed, times[lane])
        start[lane] = time = placed
        before = lane
    if network.split:
        _place_weight_grads(network, shape, times, circles, start)
    return Block(start, period)


def _place_weight_grads(
    network: Network,
    shape: Shape,
    times: list[float],
    circles: list[_Circle],
    start: list[float],
) -> None:
    for held in network.placement.stages_by_rank:
        for stage in reversed(held):
            lane = 3 * stage + W
            start[lane] = start[lane - 1] + times[lane - 1]
            if shape.late_w:
                circle = circles[network.forward.rank[lane]]
                placed = circle.first_free(start[lane], times[lane] * shape.late_w)
                if placed is not None:
                    start[lane] = placed
                    circle.take(placed, times[lane])


def fits(network: Network, block: Block) -> bool:
    """Whether the repeated block stays within the memory limits, counted at each start of F."""
    ahead, m = network.forward, network.num_microbatches
    for held, limit in zip(network.placement.stages_by_rank, network.limits, strict=False):
        for at in held:
            now = block.start[3 * at + F] + 1000 * block.period
            level = 0.0
            for stage in held:
                f, b, w = 3 * stage, 3 * stage + 1, 3 * stage + 2
                begun = math.floor((now - block.start[f]) / block.period + _EPS) + 1
                ended = (
                    math.floor((now - block.start[b] - ahead.duration[b]) / block.period + _EPS) + 1
                )
                level += min(m, begun - ended) * ahead.take[f]
                if network.split:
                    gone = (
                        math.floor((now - block.start[w] - ahead.duration[w]) / block.period + _EPS)
                        + 1
                    )
                    level += min(m, ended - gone) * -ahead.give[w]
            if level > limit:
                return False
    return True


DIRECTIONS = (  # of the extra waits: down, up, turn
    (1.0, 1.0, 0.0),
    (0.0, 1.0, 0.0),
    (1.0, 0.0, 0.0),
    (0.0, 0.0, 1.0),
    (0.3, 1.0, 0.0),
    (1.0, 0.3, 0.0),
    (1.0, 1.0, 1.0),
    (0.0, 1.0, 1.0),
    (1.0, 0.0, 1.0),
)
MIXES = ((1.0, 0.6), (0.0, 0.0), (1.0, 0.0), (0.0, 0.6), (0.5, 0.0), (0.5, 0.6))  # real, late_w
STRETCHES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, *(1.5**k for k in range(12)))


def blocks_within(network: Network) -> Iterator[Block]:
    """Blocks of different shapes that use the memory limits well.

    Where a period of the busiest rank's work is long enough, the waits grow until the memory is
    used up: more micro-batches in flight fill the warm-up. Where memory is too short for that
    period, the waits are short and the period is stretched as little as possible.
    """
    mixes = MIXES if network.split else [(real, 0.0) for real in (1.0, 0.0, 0.5)]
    for direction in DIRECTIONS:
        for real, late_w in mixes:
            shape = Shape(real=real, late_w=late_w)
            roomy = _longest_waits(network, shape, direction)
            if roomy:
                yield from roomy
            else:
                yield from _shortest_periods(network, shape, direction)


def _scaled(shape: Shape, direction: tuple[float, float, float], scale: float) -> Shape:
    down, up, turn = (part * scale for part in direction)
    return shape._replace(wait_down=down, wait_up=up, wait_turn=turn)


def _block_that_fits(network: Network, shape: Shape) -> Block | None:
    block = build_block(network, shape)
    return block if block is not None and fits(network, block) else None


def _longest_waits(
    network: Network, shape: Shape, direction: tuple[float, float, float]
) -> list[Block]:
    first = _block_that_fits(network, shape)
    if first is None:
        return []
    found = [first]
    for scale in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        block = _block_that_fits(network, _scaled(shape, direction, scale))
        if block is None:
            break
        found.append(block)
    return found[-1:] + found[-3:-2]


def _shortest_periods(
    network: Network, shape: Shape, direction: tuple[float, float, float]
) -> Iterator[Block]:
    for scale in (0.3, 1.0, 0.0):
        for stretch in STRETCHES:
            stretched = _scaled(shape, direction, scale)._replace(stretch=stretch)
            block = _block_that_fits(network, stretched)
            if block is not None:
                yield block
                break


def unroll(network: Network, block: Block) -> Orders:
    """The orders of all micro-batches, each instruction at its place in the repeated block."""
    last = network.placement.last_stage

    def place_in_chain(lane: int) -> int:
        """Behind all that the lane's instruction needs: breaks ties where times are 0."""
        stage, kind = divmod(lane, 3)
        return stage if kind == F else 2 * (2 * last - stage) + kind

    orders: Orders = []
    for lanes in network.lanes_by_rank:
        timed = sorted(
            (block.start[lane] + j * block.period, j, place_in_chain(lane), lane)
            for lane in lanes
            for j in range(network.num_microbatches)
        )
        orders.append([lane for *_, lane in timed])
    return orders
