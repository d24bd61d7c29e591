"""Which kernels a model will use, and why: for the banner at the start of a run."""

from __future__ import annotations

import importlib.util

import torch

from megatron.core.device import Device
from megatron.core.fused_weight_grad import EXTENSION, find_extension
from megatron.core.transformer.transformer_config import TransformerConfig

# What torch._fused_sdp_choice answers (torch.nn.attention.SDPBackend).
_ATTENTION_KERNELS = {
    0: "unfused, keeps the attention probabilities",
    1: "flash",
    2: "memory-efficient",
    3: "cuDNN",
}


def kernel_choices(config: TransformerConfig, device: Device) -> dict[str, str]:
    """Attention, norm, linear and weight-gradient kernel, each with the reason."""
    return {
        "attention": _attention(config, device),
        "norm": _norm(config, device),
        "linear": _linear(),
        "weight gradient": _weight_gradient(config, device),
    }


def parameters_not_split(model: torch.nn.Module) -> list[str]:
    """Trainable matrices whose gradient is made in B by autograd, not left to W.

    Gradients are right either way; but a schedule gains nothing from W for these.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() > 1
        and not getattr(parameter, "gradient_in_store", False)
    ]


def _attention(config: TransformerConfig, device: Device) -> str:
    """Asks torch what it would take for a small input like the model's."""
    shape = (1, config.num_attention_heads, 128, config.head_dim)
    query = torch.empty(shape, dtype=config.params_dtype, device=device.torch_device)
    key = query[:, : config.query_groups]
    choice = torch._fused_sdp_choice(
        query.requires_grad_(),
        key,
        key,
        None,
        config.attention_dropout,
        True,
        enable_gqa=config.query_groups != config.num_attention_heads,
    )
    kernel = _ATTENTION_KERNELS.get(choice, f"backend {choice}")
    reason = "torch's choice for this device, precision and head width"
    if choice == 0 and config.attention_dropout > 0.0:
        reason += f"; attention_dropout {config.attention_dropout} may be what excludes the others"
    return f"scaled_dot_product_attention, {kernel} ({reason})"


def _norm(config: TransformerConfig, device: Device) -> str:
    if config.normalization == "LayerNorm":
        return "torch layer_norm (fused in torch)"
    if device.is_cuda:
        return "torch rms_norm (fused in torch on this device)"
    return "own RMSNorm over torch's layer_norm backward (torch fuses rms_norm on CUDA only)"


def _linear() -> str:
    if importlib.util.find_spec("transformer_engine") is None:
        return "torch, split backward (transformer_engine is not installed)"
    return "torch, split backward (transformer_engine is installed, but has no adapter here)"


def _weight_gradient(config: TransformerConfig, device: Device) -> str:
    kernel = "torch addmm into the gradient buffer"
    if not config.gradient_accumulation_fusion:
        return f"{kernel} (gradient_accumulation_fusion is off)"
    extension = find_extension()
    if extension.module is None:
        return f"{kernel} ({extension.problem})"
    if not device.is_cuda:
        return f"{kernel} (NVIDIA apex's {EXTENSION} needs CUDA)"
    return f"NVIDIA apex's {EXTENSION}, into the gradient buffer"
