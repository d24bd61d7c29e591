"""Loss scales for fp16: constant, or following overflows (arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig


class ConstantGradScaler:
    """A loss scale that stays; 1.0 for bf16 and fp32."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, found_inf: bool) -> None:
        """Nothing follows an overflow here."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A constant comes from the command line, not from a checkpoint."""


class DynamicGradScaler:
    """Doubles after `growth_interval` clean steps in a row; halves on overflow.

    Each overflow lowers a counter that starts at `hysteresis`; once it has reached 0 every
    overflow halves the scale. Growth refills the counter (Megatron's rule).
    """

    def __init__(
        self, *, initial_scale: float, min_scale: float, growth_interval: float, hysteresis: int
    ) -> None:
        self.scale, self.min_scale = initial_scale, min_scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker >= self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._growth_tracker = int(state["growth_tracker"])
        self._hysteresis_tracker = int(state["hysteresis_tracker"])


GradScaler = ConstantGradScaler | DynamicGradScaler


def build_grad_scaler(config: OptimizerConfig) -> GradScaler:
    """Dynamic for fp16 without a given scale, otherwise constant."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return ConstantGradScaler()
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
