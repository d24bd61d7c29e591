"""LayerNorm and RMSNorm over the last dim. Their weights' gradients are cheap and stay in B."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from megatron.core.tensor_parallel.layers import mark, set_init_method
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class _Norm(MegatronModule):
    """What both norms share: the weight, stored minus one if the config says so.

    A residual stream in fp32 is normalised in fp32; the result has the weight's dtype.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config)
        self.eps = eps
        self.weight = self._new_parameter(
            hidden_size, 0.0 if config.layernorm_zero_centered_gamma else 1.0
        )

    def _new_parameter(self, size: int, value: float) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(size, dtype=self.config.params_dtype))
        mark(parameter, sequence_parallel=self.config.sequence_parallel)
        init_method = torch.nn.init.ones_ if value else torch.nn.init.zeros_
        set_init_method(parameter, init_method, self.config)
        return parameter

    def _scale(self) -> torch.Tensor:
        return self.weight + 1.0 if self.config.layernorm_zero_centered_gamma else self.weight


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = self._new_parameter(hidden_size, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden_size) -> the same shape."""
        weight, bias = self._scale(), self.bias
        if x.dtype == weight.dtype:
            return functional.layer_norm(x, weight.shape, weight, bias, self.eps)
        y = functional.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), self.eps)
        return y.to(weight.dtype)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden_size) -> the same shape."""
        weight = self._scale()
        if x.device.type == "cpu":
            return _CpuRMSNorm.apply(x, weight, self.eps).to(weight.dtype)
        if x.dtype == weight.dtype:
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps).to(weight.dtype)


class _CpuRMSNorm(torch.autograd.Function):
    """RMSNorm in few passes over memory: torch fuses its own only on accelerators.

    With g = grad * weight and xhat = x / rms, the gradient of x is (g - xhat mean(g xhat)) / rms.
    LayerNorm's backward kernel, told that the mean was zero, computes the same less mean(g) / rms,
    and the weight's gradient beside it; so mean(g) / rms is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        wide, size = inverse_rms.dtype, x.shape[-1]
        grad_wide, weight_wide = grad.to(wide), weight.to(wide)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad_wide,
            x.to(wide),
            [size],
            torch.zeros_like(inverse_rms),
            inverse_rms,
            weight_wide,
            None,
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False],
        )
        if grad_x is not None:
            mean = grad_wide.matmul(weight_wide).unsqueeze(-1).div_(size)
            grad_x = grad_x.add_(mean.mul_(inverse_rms)).to(x.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, None


class WrappedTorchNorm:
    """Builds the norm that `config.normalization` names."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> LayerNorm | RMSNorm:
        """Further keywords of Megatron's norms repeat what the config says and are not read."""
        norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
        return norm(config, hidden_size, eps)
