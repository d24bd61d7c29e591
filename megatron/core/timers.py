"""Named timers of one process, and their report over all ranks.

    timers = Timers(log_level=1, log_option="minmax", device=device)
    timers("forward-backward", log_level=1).start()
    ...
    timers("forward-backward").stop()
    timers.log(["forward-backward"], normalizer=log_interval)

prints, on one rank,

    (min, max) time across ranks (ms):
        forward-backward ...............................: (123.45, 130.00)

`log`, `report` and `write` gather over the ranks: every rank of the group must call them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch.distributed as dist

from megatron.core.device import Device

logger = logging.getLogger(__name__)

_HEADINGS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}
MAX_LOG_LEVEL = 2  # 0 coarse, 1 per phase of an iteration, 2 per operation
_NAME_WIDTH = 48


class ScalarWriter(Protocol):
    """What `Timers.write` writes to; TensorBoard's `SummaryWriter` is one."""

    def add_scalar(self, name: str, value: float, step: int, /) -> object: ...


class Timer:
    """A stopwatch that can be started and stopped many times; its unit is seconds."""

    def __init__(
        self,
        name: str,
        *,
        device: Device | None = None,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._device = device
        self._group = group
        self._clock = clock
        self._started_at: float | None = None
        self._elapsed = 0.0
        self._active = 0.0

    def start(self, barrier: bool = False) -> None:
        """Start; with `barrier`, once every rank of the group has come here.

        Raises RuntimeError if the timer runs already.
        """
        if self._started_at is not None:
            raise RuntimeError(
                f"timer {self.name!r} is started, but it runs already; stop it first"
            )
        self._settle(barrier)
        self._started_at = self._clock()

    def stop(self, barrier: bool = False) -> None:
        """Stop once the device has done what was queued; raises RuntimeError if not running."""
        if self._started_at is None:
            raise RuntimeError(
                f"timer {self.name!r} is stopped, but it does not run; start it first"
            )
        self._settle(barrier)
        passed = self._clock() - self._started_at
        self._started_at = None
        self._elapsed += passed
        self._active += passed

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds run since the last reset. A timer that runs goes on running."""
        running = self._started_at is not None
        if running:
            self.stop(barrier)
        elapsed = self._elapsed
        if reset:
            self._elapsed = 0.0
        if running:
            self.start()
        return elapsed

    def active_time(self) -> float:
        """Seconds run since the timer was made, up to its last stop; no reset touches it."""
        return self._active

    def _settle(self, barrier: bool) -> None:
        """Wait for the other ranks if asked to, then for this rank's device."""
        if barrier:
            _barrier(self._group)
        if self._device is not None:
            self._device.synchronize()


class _NullTimer(Timer):
    """Stands in for a timer above the log level: takes no time and has none to tell."""

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise ValueError(
            f"timer {self.name!r} is above --timing-log-level, so it measures nothing; "
            "raise the level to read it"
        )

    def active_time(self) -> float:
        return self.elapsed()


class Timers:
    """The timers of one process, made when first asked for.

    `device` is waited for at each start and stop; without one (or on CPU) there is no wait.
    `group` is what barriers and reports span: all ranks if None, this process alone when
    torch.distributed is not initialised.
    """

    def __init__(
        self,
        log_level: int,
        log_option: str,
        *,
        device: Device | None = None,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= log_level <= MAX_LOG_LEVEL:
            raise ValueError(f"--timing-log-level {log_level} is not a level; use 0, 1 or 2")
        if log_option not in _HEADINGS:
            raise ValueError(
                f"--timing-log-option {log_option} is not known; use {', '.join(_HEADINGS)}"
            )
        self._log_level = log_level
        self._log_option = log_option
        self._device = device
        self._group = group
        self._clock = clock
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer `name`; one that does nothing if its level is above the log level.

        The first call sets the level (2 if it says none). Raises ValueError if a later one states
        another, or if there is no such level.
        """
        level = self._levels.get(name)
        if level is None:
            return self._make(name, MAX_LOG_LEVEL if log_level is None else log_level)
        if log_level is not None and log_level != level:
            raise ValueError(f"timer {name!r} has level {level}, but is asked for with {log_level}")
        return self._timers[name]

    def report(
        self,
        names: Iterable[str] | None = None,
        *,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """The text of `log`, on every rank; None if no timer ran. Collective."""
        lines = self._lines(self._gather(names, reset=reset, barrier=barrier), 1000 / normalizer)
        return "\n".join([_HEADINGS[self._log_option], *lines]) if lines else None

    def log(
        self,
        names: Iterable[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Log milliseconds divided by `normalizer`, on `rank` of the group (None: its last).

        Timers that ran on no rank are left out; `names` None means all. Collective.
        """
        text = self.report(names, normalizer=normalizer, reset=reset, barrier=barrier)
        own_rank, size = self._place()
        if text is not None and own_rank == (size - 1 if rank is None else rank):
            logger.info(text)

    def write(
        self,
        names: Iterable[str] | None,
        writer: ScalarWriter | None,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write `<name>-time`: the slowest rank's seconds divided by `normalizer`. Collective;
        the ranks that write nothing pass `writer` None."""
        times = self._gather(names, reset=reset, barrier=barrier)
        for name, by_rank in times.items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(by_rank.values()) / normalizer, iteration)

    def _make(self, name: str, level: int) -> Timer:
        if not 0 <= level <= MAX_LOG_LEVEL:
            raise ValueError(f"timer {name!r} asks for level {level}; levels are 0, 1 and 2")
        kind = Timer if level <= self._log_level else _NullTimer
        timer = kind(name, device=self._device, group=self._group, clock=self._clock)
        self._levels[name], self._timers[name] = level, timer
        return timer

    def _gather(
        self, names: Iterable[str] | None, *, reset: bool, barrier: bool
    ) -> dict[str, dict[int, float]]:
        """Name -> rank -> seconds, for the ranks on which the timer ran.

        Whole dictionaries travel, since ranks may hold different timers.
        """
        wanted = None if names is None else list(names)
        if barrier:
            _barrier(self._group)
        own = {
            name: timer.elapsed(reset=reset)
            for name, timer in self._timers.items()
            if not isinstance(timer, _NullTimer) and (wanted is None or name in wanted)
        }
        _, size = self._place()
        gathered: list[dict[str, float]] = [own] * size
        if size > 1:
            dist.all_gather_object(gathered, own, group=self._group)
        seen = [name for held in gathered for name in held]
        order = dict.fromkeys(seen if wanted is None else wanted)
        times = {
            name: {rank: held[name] for rank, held in enumerate(gathered) if held.get(name)}
            for name in order
        }
        return {name: by_rank for name, by_rank in times.items() if by_rank}

    def _lines(self, times: dict[str, dict[int, float]], scale: float) -> list[str]:
        lines = []
        for name, by_rank in times.items():
            scaled = {rank: seconds * scale for rank, seconds in by_rank.items()}
            low, high = min(scaled.values()), max(scaled.values())
            label = f"    {name + ' ':.<{_NAME_WIDTH}}: "
            if self._log_option == "max":
                lines.append(f"{label}{high:.2f}")
            elif self._log_option == "minmax":
                lines.append(f"{label}({low:.2f}, {high:.2f})")
            else:
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in scaled.items()]
        return lines

    def _place(self) -> tuple[int, int]:
        """This process's rank in the group, and the group's size."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier(group)
