"""Targets of the benchmarks, and whether a figure reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Measured step over the simulator's, by pass length: (shortest pass in ms, limit).
OVER_IDEAL_LIMITS = ((60.0, 1.03), (20.0, 1.05))
PEER_SHARE_LIMIT = 0.5  # our overhead over torch's on the same schedule
HOST_US_LIMIT = 250.0  # per instruction, with passes of length zero
REALISED_GAIN_LIMIT = 0.8  # measured gain over 1F1B as a share of the predicted one
SMALLEST_GAIN = 0.02  # a smaller predicted gain drowns in noise and is not judged
FASTER_THAN_PEER = 1.0  # our tokens/s over torch's
LOSS_TOLERANCE = 1e-4  # relative; contestants that differ more did not train the same model
SPLIT_COST_LIMITS = {"compute": 1.02, "tiny": 1.2, "recompute": 1.05}


@dataclass(frozen=True)
class Verdict:
    """One claim, the figure that was measured and the limit it is held against."""

    claim: str
    value: float
    limit: float
    at_least: bool = False  # the limit is a lower one

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        word = "reached    " if self.reached else "NOT reached"
        bound = "at least" if self.at_least else "at most"
        return f"{word}  {self.claim}: {self.value:.4g} ({bound} {self.limit:g})"

    def as_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "value": self.value,
            "limit": self.limit,
            "at_least": self.at_least,
            "reached": self.reached,
        }


def over_ideal_limit(pass_ms: float) -> float | None:
    """The limit for passes of this length; None for passes too short for one."""
    for shortest, limit in OVER_IDEAL_LIMITS:
        if pass_ms >= shortest:
            return limit
    return None
