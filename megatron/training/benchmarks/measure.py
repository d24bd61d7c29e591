"""Times contestants against each other: in turns, from a common start, on one machine's clock.

All figures of one run are taken in turns (A B C, C B A, A B C, ...), so that noise of the machine
hits every contestant alike.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

_WAKE_UP_S = 50e-6  # by how much a sleep usually ends too late
_LEAD_S = 0.004  # between agreeing on a start and starting
_PR_SET_TIMERSLACK = 29  # linux/prctl.h


@dataclass(frozen=True)
class Contestant:
    """Something to time; on every rank of a pipeline its own part of it."""

    name: str
    step: Callable[[], None]
    prepare: Callable[[], None] = lambda: None  # before each step, outside the timing


class RankTime(NamedTuple):
    """One measurement on one rank; seconds of `time.perf_counter`, which all processes share."""

    start: float  # the same on all ranks
    ends: tuple[float, ...]  # of each step, in a row
    cpu_s: float  # used by all threads of this process


@dataclass(frozen=True)
class Times:
    """What measurements of one contestant say, all ranks together."""

    step_s: tuple[float, ...]  # per repeat: from the common start until the last rank has ended
    cpu_s: tuple[float, ...]  # per repeat: processor time of one step, summed over ranks

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)

    def over(self, other: Times) -> float:
        """The median of the ratios to another contestant's step of the same turn.

        Steps of one turn follow each other closely, so slow changes of the machine cancel.
        """
        pairs = zip(self.step_s, other.step_s, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    @property
    def spread(self) -> float:
        """How noisy the repeats were: (third quartile - first quartile) / median."""
        if len(self.step_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return (high - low) / self.median_s


def measure(
    contestants: Sequence[Contestant], *, repeats: int, warm_up: int = 1, in_a_row: int = 1
) -> dict[str, list[RankTime]]:
    """Run each contestant `repeats` times, in turns. Collective over the default group.

    With `in_a_row` above 1 a measurement is so many steps without a meeting of the ranks between
    them, after a first one that counts only as the start.
    """
    times: dict[str, list[RankTime]] = {contestant.name: [] for contestant in contestants}
    for turn in range(-warm_up, repeats):
        order = contestants if turn % 2 == 0 else contestants[::-1]
        for contestant in order:
            taken = _time_once(contestant, in_a_row if turn >= 0 else 1)
            if turn >= 0:
                times[contestant.name].append(taken)
    return times


def join(per_rank: Sequence[dict[str, list[RankTime]]]) -> dict[str, Times]:
    """The results of `measure` on every rank, put together."""
    return {
        name: Times(
            step_s=tuple(_step_s(repeat) for repeat in zip(*taken, strict=True)),
            cpu_s=tuple(
                sum(rank.cpu_s / len(rank.ends) for rank in repeat)
                for repeat in zip(*taken, strict=True)
            ),
        )
        for name in per_rank[0]
        if (taken := [rank[name] for rank in per_rank])
    }


def sleep_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` shows `moment`, at most a microsecond or two longer.

    The last moments are spent awake: a device does not end late because its host wakes up slowly.
    """
    left = moment - time.perf_counter() - _WAKE_UP_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def sharpen_sleep() -> None:
    """Have Linux wake this thread when asked to, and not up to 50 µs later; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))


def sleep_overshoot_s(length_s: float = 0.005, repeats: int = 21) -> float:
    """By how much a sleep of this length is too long; the median."""
    late = []
    for _ in range(repeats):
        moment = time.perf_counter() + length_s
        sleep_until(moment)
        late.append(time.perf_counter() - moment)
    return statistics.median(late)


def transfer_s(shape: Sequence[int], dtype: torch.dtype, repeats: int = 21) -> float:
    """The time of one message of this shape from rank 0 to rank 1 of the default group.

    As in a pipeline the receive is posted before the message is sent; the median from the start
    of the send to the end of the receive. Collective; ranks above 1 only meet.
    """
    rank = dist.get_rank()
    tensor = torch.zeros(*shape, dtype=dtype)
    moments = []
    for _ in range(repeats):
        start = _meet()
        if rank == 0:
            sleep_until(start)
            moments.append(time.perf_counter())
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            moments.append(time.perf_counter())
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, moments)
    sent, received = gathered[:2]
    return statistics.median(end - begin for begin, end in zip(sent, received, strict=True))


def _time_once(contestant: Contestant, in_a_row: int) -> RankTime:
    contestant.prepare()
    start = _meet()
    sleep_until(start)
    cpu = time.process_time()
    ends = []
    for _ in range(in_a_row + 1 if in_a_row > 1 else 1):
        contestant.step()
        ends.append(time.perf_counter())
    return RankTime(start, tuple(ends), time.process_time() - cpu)


def _meet() -> float:
    """A moment shortly ahead, the same on all ranks."""
    now = time.perf_counter()
    if not dist.is_initialized():
        return now
    latest = torch.tensor(now, dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    return float(latest) + _LEAD_S


def _step_s(ranks: Sequence[RankTime]) -> float:
    last = max(rank.ends[-1] for rank in ranks)
    steps = len(ranks[0].ends)
    if steps == 1:
        return last - ranks[0].start
    return (last - max(rank.ends[0] for rank in ranks)) / (steps - 1)
