"""Options of the optimizer, under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class OptimizerConfig:
    """AdamW or SGD, gradient clipping, loss scaling, sharding over data-parallel ranks."""

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None  # of the input embedding and the output layer
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    loss_scale: float | None = None  # None with fp16: dynamic
    initial_loss_scale: float = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    clip_grad: float = 1.0  # global norm; 0 does not clip
    log_num_zeros_in_grad: bool = False
    timers: Any = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"--optimizer {self.optimizer} is not known; use adam or sgd")
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 exclude each other; give one")
