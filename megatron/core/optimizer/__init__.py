"""Optimizers: `torch.optim` on fp32 main parameters, global norm, clipping, loss scaling."""

from .optimizer import MegatronOptimizer, StepResult, get_megatron_optimizer
from .optimizer_config import OptimizerConfig
from .post_validation import PostValidation

__all__ = [
    "MegatronOptimizer",
    "OptimizerConfig",
    "PostValidation",
    "StepResult",
    "get_megatron_optimizer",
]
