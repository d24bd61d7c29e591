"""What one training step hands to the log line, the metrics file and the writers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One training step; `iteration` is 1-based, sample counts are totals since the run began.

    `losses` are the step's averages by name (`lm loss`); empty on ranks that do not hold the loss
    and on skipped steps. None is for what was not measured.
    """

    iteration: int
    consumed_samples: int
    skipped_samples: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    learning_rate: float | None
    decoupled_learning_rate: float | None = None
    global_batch_size: int
    loss_scale: float = 1.0
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped: bool = False  # no optimizer step was taken (overflow)
    timings_ms: dict[str, float] = field(default_factory=dict)  # what the step's time went into
    optimizer_rollbacks: int | None = None  # of this step; None without post-validation

    @property
    def has_nan(self) -> bool:
        """Whether a loss is not finite."""
        return not all(map(math.isfinite, self.losses.values()))
