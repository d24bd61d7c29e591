"""How figures are written: the same in grids, tables and titles."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeUnit:
    """The unit that times are shown in, given the one that they are in."""

    name: str  # "" where times have no unit
    divisor: float = 1.0  # a time in the costs' unit over this is in the shown unit

    @classmethod
    def fit(cls, unit: str, longest: float) -> TimeUnit:
        """The same unit, or milliseconds for microseconds that would have five digits or more."""
        return cls("ms", 1000.0) if unit == "us" and longest >= 10_000 else cls(unit)

    def text(self, time: float) -> str:
        """The number with its unit."""
        return f"{compact(time / self.divisor)} {self.name}".rstrip()


def compact(value: float) -> str:
    """Up to 5 significant digits, or all those before the point: 27, 0.5, 8.125, 1234567."""
    return f"{value:.0f}" if 1e5 <= abs(value) < 1e9 else f"{value:.5g}"


def percent(share: float) -> str:
    """A share as percent with one decimal."""
    return f"{100 * share:.1f} %".replace("-0.0 %", "0.0 %")


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`: axis ticks."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
