"""Greedy seeds: a rank takes the F or B that it can start first, and W where it fills a wait.

The ideas are those of the heuristic of arXiv:2401.10241, section 3.1, as an event-driven list
scheduler for any placement: as many F as memory allows before the first B, then F and B in turn; W
when there is nothing else to do, when memory is full, or in a wait for the next F or B. With
several chunks per rank, a chunk's F keep so close to the next chunk's that memory is left for
those.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .improve import Budget
from .network import NO_LANE, B, F, Network, Orders, W

_NEVER = float("inf")
_EPS = 1e-9
_EFFORT = 3.0  # work of placing an instruction, in instructions placed by `justify`


class Rule(NamedTuple):
    """How a rank chooses between F and B, and when W fills a wait. Times are in units of the
    instruction's own duration."""

    turn: float  # how much later a rank takes what ran last, F or B, to start than it could
    handicap: float  # the same for F, besides
    fill: Literal["fits", "due", "always"]  # whether W may fill a wait that is too short for it


PLAIN_RULES = (
    Rule(1.0, 0.0, "due"),
    Rule(1.0, 0.3, "due"),
    Rule(0.5, 0.6, "due"),
    Rule(0.5, 0.3, "due"),
    Rule(0.5, -0.3, "due"),
    Rule(0.25, 0.0, "due"),
    Rule(1.0, 0.0, "always"),
)
CHUNK_RULES = (
    Rule(0.5, -0.3, "due"),
    Rule(0.0, -0.3, "due"),
    Rule(1.0, 0.0, "due"),
    Rule(0.5, 0.3, "fits"),
    Rule(0.0, 0.0, "due"),
    Rule(0.5, 0.0, "always"),
)


def rules_for(network: Network) -> Sequence[Rule]:
    """Rules that work well for the placement, the most useful first."""
    return PLAIN_RULES if network.placement.max_chunks == 1 else CHUNK_RULES


def greedy_orders(network: Network, rules: Iterable[Rule], budget: Budget) -> Iterator[Orders]:
    """The orders that the rules lead to, where they do not run into a dead end."""
    for rule in rules:
        budget.spend(_EFFORT * network.num_instructions)
        orders = _Greedy(network, rule).run()
        if orders is not None:
            yield orders


@dataclass
class _Rank:
    """Where a rank stands."""

    stages: list[int]
    free: float  # end of its last instruction
    used: float = 0.0
    idle: float = 0.0  # since its first instruction
    last: int = B  # the kind that ran last, W aside
    order: list[int] = field(default_factory=list)


class _Greedy:
    def __init__(self, network: Network, rule: Rule) -> None:
        self.network, self.rule, self.ahead = network, rule, network.forward
        self.ranks = [
            _Rank(sorted(held), start)
            for held, start in zip(
                network.placement.stages_by_rank, network.first_start, strict=True
            )
        ]
        m = network.num_microbatches
        self.arrivals: list[list[float]] = [
            [0.0] * m if source == NO_LANE else [] for source in self.ahead.source
        ]
        self.done = [0] * len(self.arrivals)
        self.most_ahead = _most_ahead(network)

    def run(self) -> Orders | None:
        """The orders, or None where the rule runs into a dead end."""
        wake = [rank.free for rank in self.ranks]
        heap = [(time, r) for r, time in enumerate(wake)]
        while heap:
            time, r = heapq.heappop(heap)
            if wake[r] != time:
                continue
            wake[r] = _NEVER
            lane, at = self._choose(r, time)
            told = [(r, at)]
            if lane != NO_LANE and at <= time:
                told = [*self._execute(r, lane, time), (r, self.ranks[r].free)]
            for q, again in told:
                if again < wake[q]:
                    wake[q] = again
                    heapq.heappush(heap, (again, q))
        orders = [rank.order for rank in self.ranks]
        placed = sum(map(len, orders))
        return orders if placed == self.network.num_instructions else None

    def _choose(self, r: int, time: float) -> tuple[int, float]:
        """The lane that the rank runs next, and when; NO_LANE if it must hear from others first."""
        rank = self.ranks[r]
        late = [3 * s + W for s in rank.stages if self._pending(s)]
        idle_memory = sum(self._pending(s) * -self.ahead.give[3 * s + W] for s in rank.stages)
        best, wanted, at = NO_LANE, _NEVER, _NEVER
        for lane in [3 * s + kind for kind in (B, F) for s in rank.stages]:
            start = self._start(rank, lane, time)
            if (
                start < _NEVER
                and not self._too_far_ahead(lane)
                and self._fits_after_w(r, lane, idle_memory)
            ):
                wish = start + self._handicap(rank, lane)
                if wish < wanted - _EPS or (wish < wanted + _EPS and lane % 3 == F):
                    best, wanted, at = lane, wish, start
        if best == NO_LANE:
            return (late[0], time) if late else (NO_LANE, _NEVER)
        if late and (
            rank.used + self._extra(best) > self.network.limits[r]
            or self._fills(rank, late[0], at - time)
        ):
            return late[0], time
        return best, at

    def _pending(self, stage: int) -> int:
        """How many micro-batches of the stage wait for their W."""
        return self.done[3 * stage + B] - self.done[3 * stage + W] if self.network.split else 0

    def _start(self, rank: _Rank, lane: int, time: float) -> float:
        known, j = self.arrivals[lane], self.done[lane]
        local = self.ahead.local[lane]
        if j >= len(known) or (local != NO_LANE and self.done[local] <= j):
            return _NEVER
        return max(time, known[j])

    def _handicap(self, rank: _Rank, lane: int) -> float:
        kind = lane % 3
        turn = self.rule.turn if rank.last == kind else 0.0
        return (turn + (self.rule.handicap if kind == F else 0.0)) * self.ahead.duration[lane]

    def _extra(self, lane: int) -> float:
        return self.ahead.take[lane] + self.ahead.give[lane]

    def _too_far_ahead(self, lane: int) -> bool:
        following, most = self.most_ahead.get(lane, (lane, 1))
        return self.done[lane] - self.done[following] >= most

    def _fits_after_w(self, r: int, lane: int, idle_memory: float) -> bool:
        """Whether there is memory for it once every pending W has run, and for the F that the
        oldest micro-batch still needs on this rank: that one can then always pass, so nothing locks
        up."""
        rank = self.ranks[r]
        need = self._extra(lane)
        oldest = min(self.done[3 * s + B] for s in rank.stages)
        if lane % 3 == F and self.done[lane] != oldest:
            need += sum(
                self.ahead.take[3 * s + F] for s in rank.stages if self.done[3 * s + F] <= oldest
            )
        return rank.used - idle_memory + need <= self.network.limits[r]

    def _fills(self, rank: _Rank, lane: int, wait: float) -> bool:
        """Whether to run W in a wait: if it fits; and, although it does not, always, or when the
        wait would make this rank the one that has idled longest."""
        if wait <= _EPS:
            return False
        if self.ahead.duration[lane] <= wait + _EPS or self.rule.fill == "always":
            return True
        most = max(other.idle for other in self.ranks)
        return self.rule.fill == "due" and rank.idle + wait > most + _EPS

    def _execute(self, r: int, lane: int, time: float) -> list[tuple[int, float]]:
        """Run it; the ranks that should look again, and when."""
        rank = self.ranks[r]
        if rank.order:
            rank.idle += time - rank.free
        rank.free = time + self.ahead.duration[lane]
        rank.used += self._extra(lane)
        rank.order.append(lane)
        self.done[lane] += 1
        if lane % 3 != W:
            rank.last = lane % 3
        told = []
        for fed, lag in self.ahead.feeds[lane]:
            self.arrivals[fed].append(rank.free + lag)
            other = self.ahead.rank[fed]
            if other != r:
                told.append((other, max(time, self.ranks[other].free)))
        return told


def _most_ahead(network: Network) -> dict[int, tuple[int, int]]:
    """For the F of a stage that is not its rank's last: the F of the rank's next stage, and by how
    many micro-batches it may be ahead of that: as many as enter while one is on its way between
    them. More would fill the memory that the next stage needs.
    """
    duration = network.forward.duration
    found = {}
    for held in network.placement.stages_by_rank:
        for stage, following in itertools.pairwise(sorted(held)):
            between = range(stage + 1, following)
            travel = sum(duration[3 * s + F] for s in between) + sum(network.hop[stage:following])
            most = 1 + round(travel / duration[3 * stage + F])
            found[3 * stage + F] = (3 * following + F, most)
    return found
