"""Learning rate and weight decay as functions of the samples consumed (Megatron's scheduler)."""

from __future__ import annotations

import logging
import math
from typing import Any

logger = logging.getLogger(__name__)

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every parameter group.

    Steps are samples: `step(increment=global batch size)` after each applied optimizer step.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        if lr_decay_style not in DECAY_STYLES:
            raise ValueError(
                f"--lr-decay-style {lr_decay_style} is not known; use {', '.join(DECAY_STYLES)}"
            )
        if lr_warmup_steps >= lr_decay_steps:
            raise ValueError(
                f"learning-rate warm-up of {lr_warmup_steps} samples does not end before the decay "
                f"at {lr_decay_steps} samples; lower --lr-warmup-* or raise --lr-decay-*"
            )
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, max_lr, min_lr
        self.lr_warmup_steps, self.lr_decay_steps = lr_warmup_steps, lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self._use_checkpoint = use_checkpoint_opt_param_scheduler
        self._override = override_opt_param_scheduler
        self.num_steps = 0
        self.step(0)

    def get_wd(self) -> float:
        """Weight decay at this step: constant, or from start to end, linearly or on a cosine."""
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return self.end_wd
        ratio = self.num_steps / self.wd_incr_steps
        if self.wd_incr_style == "linear":
            share = ratio
        elif self.wd_incr_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        else:
            raise ValueError(
                f"--weight-decay-incr-style {self.wd_incr_style} is not known; "
                "use constant, linear or cosine"
            )
        return self.start_wd + share * (self.end_wd - self.start_wd)

    def get_lr(self, group: dict[str, Any]) -> float:
        """Learning rate of a parameter group at this step."""
        max_lr = _value_or(group.get("max_lr"), self.max_lr)
        min_lr = _value_or(group.get("min_lr"), self.min_lr)
        steps, warmup = self.num_steps, self.lr_warmup_steps
        if warmup > 0 and steps <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * steps / warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(steps, 1)))
        return min_lr + self._decay_share() * (max_lr - min_lr)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and write the new values into the groups."""
        self.num_steps += increment
        wd = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "max_lr": self.max_lr,
            "lr_warmup_steps": self.lr_warmup_steps,
            "num_steps": self.num_steps,
            "lr_decay_style": self.lr_decay_style,
            "lr_decay_steps": self.lr_decay_steps,
            "min_lr": self.min_lr,
            "start_wd": self.start_wd,
            "end_wd": self.end_wd,
            "wd_incr_style": self.wd_incr_style,
            "wd_incr_steps": self.wd_incr_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position; other values by the override / use-checkpoint flags.

        Raises ValueError when they differ and neither flag says which to take.
        """
        for name, stored in state.items():
            if name != "num_steps" and name not in self._without_effect():
                setattr(self, name, self._choose(name, getattr(self, name), stored))
        self.num_steps = 0
        self.step(int(state["num_steps"]))

    def _without_effect(self) -> set[str]:
        """Lengths that a constant value does not read; a longer run may change them."""
        names = set()
        if self.wd_incr_style == "constant":
            names.add("wd_incr_steps")
        if self.lr_decay_style == "constant":
            names |= {"lr_decay_steps", "min_lr"}
        return names

    def _choose(self, name: str, given: Any, stored: Any) -> Any:
        if self._override or given == stored:
            return given
        if self._use_checkpoint:
            logger.info("taking %s %s from the checkpoint instead of %s", name, stored, given)
            return stored
        raise ValueError(
            f"{name} is {given} on the command line but {stored} in the checkpoint; give "
            "--override-opt_param-scheduler (command line) or "
            "--use-checkpoint-opt_param-scheduler (checkpoint)"
        )

    def _decay_share(self) -> float:
        """1 at the start of the decay, 0 at its end."""
        if self.lr_decay_style == "WSD":
            return self._wsd_share()
        ratio = (self.num_steps - self.lr_warmup_steps) / (
            self.lr_decay_steps - self.lr_warmup_steps
        )
        return _shape(self.lr_decay_style, ratio)

    def _wsd_share(self) -> float:
        assert self.wsd_decay_steps is not None, "WSD needs a tail length"
        tail_start = self.lr_decay_steps - self.wsd_decay_steps
        if self.num_steps <= tail_start:
            return 1.0
        ratio = (self.num_steps - tail_start) / self.wsd_decay_steps
        return _shape(self.lr_wsd_decay_style or "exponential", ratio)


def _shape(style: str, ratio: float) -> float:
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**ratio - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    raise ValueError(
        f"--lr-wsd-decay-style {style} is not known; use exponential, linear, cosine or minus_sqrt"
    )


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value
