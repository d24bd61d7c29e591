"""Optimizer, and the schedules of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class OptimizerArguments(ArgumentGroup):
    """Optimizer."""

    optimizer: Literal["adam", "sgd"] = arg("adam", "AdamW, or SGD with momentum.")
    weight_decay: float = arg(0.01, "Weight decay of matrices; biases and norms have none.")
    start_weight_decay: float | None = arg(
        None, "First weight decay, if --weight-decay-incr-style is not constant.", at_least=0
    )
    end_weight_decay: float | None = arg(
        None, "Last weight decay, if --weight-decay-incr-style is not constant.", at_least=0
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg(
        "constant", "How weight decay goes from its first to its last value."
    )
    clip_grad: float = arg(1.0, "Largest global gradient norm; 0 does not clip.", at_least=0)
    adam_beta1: float = arg(0.9, "Decay of Adam's first moment.", at_least=0, at_most=1)
    adam_beta2: float = arg(0.999, "Decay of Adam's second moment.", at_least=0, at_most=1)
    adam_eps: float = arg(1e-8, "Added to the root of Adam's second moment.", at_least=0)
    sgd_momentum: float = arg(0.9, "Momentum of SGD.", at_least=0, at_most=1)
    use_distributed_optimizer: bool = arg(
        False, "Shard optimizer state over the data-parallel ranks."
    )

    def problems(self) -> Iterator[str]:
        """Both ends of a weight-decay schedule, or neither."""
        ends = {
            "--start-weight-decay": self.start_weight_decay,
            "--end-weight-decay": self.end_weight_decay,
        }
        if self.weight_decay_incr_style == "constant":
            for flag, value in ends.items():
                if value is not None and value != self.weight_decay:
                    yield (
                        f"{flag} {value} differs from --weight-decay {self.weight_decay} while "
                        "--weight-decay-incr-style is constant; choose linear or cosine, or drop it"
                    )
        elif None in ends.values():
            yield (
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs both "
                "--start-weight-decay and --end-weight-decay"
            )
        elif self.start_weight_decay > self.end_weight_decay:  # type: ignore[operator]
            yield (
                f"--start-weight-decay {self.start_weight_decay} is above --end-weight-decay "
                f"{self.end_weight_decay}; weight decay can only rise"
            )


@dataclass(frozen=True, kw_only=True)
class LearningRateArguments(ArgumentGroup):
    """Learning rate."""

    lr: float | None = arg(None, "Peak learning rate.", at_least=0)
    min_lr: float = arg(0.0, "Learning rate at the end of the decay.", at_least=0)
    decoupled_lr: float | None = arg(
        None, "Peak learning rate of the input embedding and the output layer.", at_least=0
    )
    decoupled_min_lr: float | None = arg(
        None, "Final learning rate of the input embedding and the output layer.", at_least=0
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = arg(
        "linear", "Shape of the decay; WSD holds the peak and decays in a short tail."
    )
    lr_decay_iters: int | None = arg(
        None, "Iterations until the decay ends. Without it: --train-iters.", at_least=1
    )
    lr_decay_samples: int | None = arg(
        None, "Samples until the decay ends. Without it: --train-samples.", at_least=1
    )
    lr_warmup_fraction: float | None = arg(
        None, "Warm-up as a share of the decay.", at_least=0, at_most=1
    )
    lr_warmup_iters: int = arg(0, "Warm-up in iterations.", at_least=0)
    lr_warmup_samples: int = arg(0, "Warm-up in samples.", at_least=0)
    lr_warmup_init: float = arg(0.0, "Learning rate at which the warm-up starts.", at_least=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = arg(
        "exponential", "Shape of the tail of WSD."
    )
    lr_wsd_decay_iters: int | None = arg(None, "Length of the tail in iterations.", at_least=1)
    lr_wsd_decay_samples: int | None = arg(None, "Length of the tail in samples.", at_least=1)
    use_checkpoint_opt_param_scheduler: bool = arg(
        False,
        "Take the schedule from the checkpoint, whatever the command line says.",
        flags=(
            "--use-checkpoint-opt_param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
        ),
    )
    override_opt_param_scheduler: bool = arg(
        False,
        "Take the schedule from the command line, whatever the checkpoint says.",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )

    def problems(self) -> Iterator[str]:
        """Rates in order, one unit of warm-up, a tail for WSD."""
        if self.lr is not None and self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} is above --lr {self.lr}; lower it"
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            yield f"--decoupled-min-lr {self.decoupled_min_lr} needs --decoupled-lr"
        elif self.decoupled_lr is not None and self.decoupled_lr < (self.decoupled_min_lr or 0):
            yield (
                f"--decoupled-min-lr {self.decoupled_min_lr} is above --decoupled-lr "
                f"{self.decoupled_lr}; lower it"
            )
        if self.lr is not None and self.lr_warmup_init > self.lr:
            yield f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}; lower it"
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            yield (
                f"--lr-warmup-fraction {self.lr_warmup_fraction} and "
                "--lr-warmup-iters or --lr-warmup-samples both state the warm-up; give one"
            )
        if self.use_checkpoint_opt_param_scheduler and self.override_opt_param_scheduler:
            yield (
                "--use-checkpoint-opt_param-scheduler and --override-opt_param-scheduler "
                "contradict each other; give one"
            )
