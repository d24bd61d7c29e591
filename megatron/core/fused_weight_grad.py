"""NVIDIA apex's kernels that add a linear layer's weight gradient straight to its main gradient.

    accumulate = linear_accumulation(allow_fused=config.gradient_accumulation_fusion)

The extension `fused_weight_gradient_mlp_cuda` is built with apex (from source, with `--cpp_ext
--cuda_ext`; the package index's `apex` is another project). It is never needed: without it, or
where it cannot take what a layer has, torch does the same sum (`accumulate_linear_weight_grad`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.core.weight_grad_store import (
    GradTarget,
    accumulate_linear_weight_grad,
    gradient_of,
)

EXTENSION = "fused_weight_gradient_mlp_cuda"

# (target, inputs (..., in), grad_output (..., out)): adds to the target's gradient (out, in).
Accumulation = Callable[[torch.nn.Parameter | GradTarget, torch.Tensor, torch.Tensor], None]

_HALVES = (torch.float16, torch.bfloat16)


class FusedAccumulation:
    """Adds `grad_output^T @ inputs` by the extension's kernels, or by torch where they do not fit.

    The kernels form the product and the sum in fp32, without rounding to 16 bits in between. They
    take contiguous matrices on `device_type`.
    """

    def __init__(self, extension: Any, device_type: str = "cuda") -> None:
        self._extension, self._device_type = extension, device_type

    def __call__(
        self,
        target: torch.nn.Parameter | GradTarget,
        inputs: torch.Tensor,
        grad_output: torch.Tensor,
    ) -> None:
        grad = gradient_of(target)
        kernel = self._kernel_for(grad, inputs, grad_output)
        if kernel is None:
            accumulate_linear_weight_grad(target, inputs, grad_output)
            return
        rows, grad_rows = (x.reshape(-1, x.shape[-1]).contiguous() for x in (inputs, grad_output))
        kernel(rows, grad_rows, grad)

    def _kernel_for(
        self, grad: torch.Tensor, inputs: torch.Tensor, grad_output: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
        tensors = (grad, inputs, grad_output)
        if any(tensor.device.type != self._device_type for tensor in tensors):
            return None
        if inputs.dtype != grad_output.dtype or not grad.is_contiguous():
            return None
        if grad.dtype == torch.float32 and inputs.dtype in (torch.float32, *_HALVES):
            return self._extension.wgrad_gemm_accum_fp32
        if grad.dtype in _HALVES and inputs.dtype == grad.dtype:
            return self._extension.wgrad_gemm_accum_fp16
        return None


class Extension(NamedTuple):
    """apex's extension as it was found: the module, or None and why."""

    module: Any | None
    problem: str = ""


def find_extension() -> Extension:
    """Import the extension; one that was built for another torch or CUDA counts as missing."""
    try:
        return Extension(importlib.import_module(EXTENSION))
    except ModuleNotFoundError:
        return Extension(None, f"NVIDIA apex's {EXTENSION} is not installed")
    except (ImportError, OSError) as error:
        first_line = str(error).partition("\n")[0]
        return Extension(None, f"NVIDIA apex's {EXTENSION} cannot be loaded: {first_line}")


def linear_accumulation(*, allow_fused: bool) -> Accumulation:
    """How linear layers add their weight's gradient: by apex's kernels if allowed and there."""
    extension = find_extension().module if allow_fused else None
    return accumulate_linear_weight_grad if extension is None else FusedAccumulation(extension)
