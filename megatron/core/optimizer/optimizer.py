"""The optimizer step: unscale, norm, overflow check, clip, AdamW or SGD, write back.

`torch.optim` does the arithmetic on fp32 main parameters; this module decides whether and on what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.entries import OptimizerEntry, build_entries
from megatron.core.optimizer.grad_norm import GradNorm, main_parameter_slices
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class StepResult(NamedTuple):
    """What one optimizer step did."""

    applied: bool  # False: skipped on all ranks because a gradient was not finite
    grad_norm: float  # before clipping
    num_zeros: int | None
    rolled_back: bool = False  # post-validation found the early step wrong


class MegatronOptimizer:
    """AdamW or SGD on the main parameters of this rank's stages.

    `norm_group` joins the ranks that share one gradient norm and one decision to skip;
    `data_parallel_group` the replicas (used by the distributed optimizer).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: Sequence[DistributedDataParallel],
        *,
        norm_group: dist.ProcessGroup | None,
        data_parallel_group: dist.ProcessGroup | None,
        no_weight_decay_cond: Callable[[str, torch.nn.Parameter], bool] | None = None,
    ) -> None:
        self.config = config
        self.model = list(model)
        self._norm_group = norm_group
        self._data_parallel_group = data_parallel_group
        size = model[0].data_parallel_size if model else 1
        sliced = config.use_distributed_optimizer and size > 1
        self.entries = build_entries(model, sliced=sliced)
        self.grad_norm = GradNorm(self.entries, norm_group, size)
        self.grad_scaler = build_grad_scaler(config)
        self.inner = _inner_optimizer(
            config, self.entries, no_weight_decay_cond or _is_bias_or_norm
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return [entry.parameter for entry in self.entries]

    def get_loss_scale(self) -> float:
        return self.grad_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward should see it: scaled once, never the accumulated gradients."""
        return loss * self.grad_scaler.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()

    @torch.no_grad()
    def step(self) -> StepResult:
        """One step on complete main gradients, or a skip on all ranks if one is not finite."""
        self.unscale()
        return self.step_with_norm(self.grad_norm())

    @torch.no_grad()
    def step_with_norm(self, norm: float) -> StepResult:
        """What is left of a step once gradients are unscaled and their global norm is known."""
        applied = math.isfinite(norm)
        self.grad_scaler.update(found_inf=not applied)
        if not applied:
            return StepResult(False, norm, None)
        num_zeros = self._count_zeros() if self.config.log_num_zeros_in_grad else None
        coefficient = self.clip_coefficient(norm)
        if coefficient < 1.0:
            for entry in self.entries:
                entry.grad.mul_(coefficient)
        self.step_unclipped()
        return StepResult(True, norm, num_zeros)

    def clip_coefficient(self, norm: float) -> float:
        """What gradients of this global norm are multiplied by; 1 or above: they are left alone."""
        return self.config.clip_grad / (norm + 1.0e-6) if self.config.clip_grad > 0 else 1.0

    @torch.no_grad()
    def params_norm(self) -> float:
        """Global L2 norm of the main parameters, formed like the gradient norm. Collective."""
        return self.grad_norm(main_parameter_slices)

    def reload_model_params(self) -> None:
        """Take the main parameters anew from the model's, after weights were loaded."""
        for entry in self.entries:
            entry.copy_parameter_to_main()

    def write_back_params(self) -> None:
        """Give the model the main parameters, after optimizer state was loaded."""
        for entry in self.entries:
            entry.copy_main_to_parameter()
        self._gather_parameters()

    def unscale(self) -> None:
        """Take the loss scale out of the main gradients."""
        if self.grad_scaler.scale != 1.0:
            factor = 1.0 / self.grad_scaler.scale
            for entry in self.entries:
                entry.grad.mul_(factor)

    @torch.no_grad()
    def step_unclipped(self) -> None:
        """Step on the main gradients as they are, and give the model the result."""
        for entry in self.entries:
            entry.main.grad = entry.grad
        self.inner.step()
        for entry in self.entries:
            entry.main.grad = None
            entry.copy_main_to_parameter()
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """Distributed optimizer: every replica gets the slices the others stepped."""
        for entry in self.entries:
            if entry.param_slices is not None:
                assert entry.slice_index is not None
                dist.all_gather_single(
                    entry.param_slices.view(-1),
                    entry.param_slices[entry.slice_index],
                    group=self._data_parallel_group,
                )

    def _count_zeros(self) -> int:
        """Elements of the global gradient that are exactly zero; padding does not count."""
        count = torch.zeros(1, dtype=torch.float64)
        for entry in self.entries:
            if not entry.is_tied_copy:
                count += float((entry.grad == 0).sum()) - _padding_of(entry)
        if self._norm_group is not None:
            count = count.to(self.model[0].buffer.data.device)
            dist.all_reduce(count, group=self._norm_group)
        return int(count)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[DistributedDataParallel],
    no_weight_decay_cond: Callable[[str, torch.nn.Parameter], bool] | None = None,
    *,
    norm_group: dist.ProcessGroup | None = None,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> MegatronOptimizer:
    """Megatron's name for building the optimizer."""
    return MegatronOptimizer(
        config,
        model_chunks,
        norm_group=norm_group,
        data_parallel_group=data_parallel_group,
        no_weight_decay_cond=no_weight_decay_cond,
    )


def _is_bias_or_norm(name: str, parameter: torch.nn.Parameter) -> bool:
    return name.endswith(".bias") or parameter.dim() == 1


def _padding_of(entry: OptimizerEntry) -> int:
    """Padding elements in a sliced entry's gradient; they are zero without being gradients."""
    if entry.slice_index is None:
        return 0
    used = entry.region.numel - entry.slice_index * entry.region.slice_numel
    return entry.region.slice_numel - min(max(used, 0), entry.region.slice_numel)


def _inner_optimizer(
    config: OptimizerConfig,
    entries: Sequence[OptimizerEntry],
    no_weight_decay: Callable[[str, torch.nn.Parameter], bool],
) -> torch.optim.Optimizer:
    """`torch.optim` over the main parameters.

    The state is made now, not at the first step, so that a checkpoint of a run whose first steps
    were all skipped is complete.
    """
    groups = _param_groups(config, entries, no_weight_decay)
    lr = config.lr or 0.0
    # The fused CPU kernels (torch 2.13) round the last few elements of a tensor, those that do not
    # fill a vector, unlike the others: a slice of a parameter would step unlike the whole.
    fused = any(entry.main.is_cuda for entry in entries)
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=betas, eps=config.adam_eps, fused=fused, foreach=False
        )
        make_state = _adam_state
    else:
        optimizer = torch.optim.SGD(
            groups, lr=lr, momentum=config.sgd_momentum, fused=fused, foreach=False
        )
        make_state = _sgd_state if config.sgd_momentum else _no_state
    for entry in entries:
        optimizer.state[entry.main] = make_state(entry.main)
    return optimizer


def _param_groups(
    config: OptimizerConfig,
    entries: Sequence[OptimizerEntry],
    no_weight_decay: Callable[[str, torch.nn.Parameter], bool],
) -> list[dict[str, Any]]:
    """One group of main parameters per (decay or not, decoupled learning rate or not)."""
    groups: dict[tuple[float, bool], list[torch.Tensor]] = {}
    for entry in entries:
        decoupled = config.decoupled_lr is not None and _is_embedding_or_head(entry.name)
        wd_mult = 0.0 if no_weight_decay(entry.name, entry.parameter) else 1.0
        groups.setdefault((wd_mult, decoupled), []).append(entry.main)
    if not groups:  # a rank all of whose parameters are frozen; torch wants one group
        return [{"params": [torch.zeros(0)], "wd_mult": 0.0, "lr_mult": 1.0}]
    return [
        {
            "params": mains,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_decoupled_lr": decoupled,
            "is_expert_parallel": False,
            "max_lr": config.decoupled_lr if decoupled else config.lr,
            "min_lr": config.decoupled_min_lr if decoupled else config.min_lr,
            "weight_decay": config.weight_decay * wd_mult,
        }
        for (wd_mult, decoupled), mains in sorted(groups.items(), key=lambda item: item[0])
    ]


def _is_embedding_or_head(name: str) -> bool:
    return name.startswith(("embedding.", "output_layer."))


def _adam_state(main: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=main.device),
        "exp_avg": torch.zeros_like(main),
        "exp_avg_sq": torch.zeros_like(main),
    }


def _sgd_state(main: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"momentum_buffer": torch.zeros_like(main)}


def _no_state(main: torch.Tensor) -> dict[str, torch.Tensor]:
    return {}
