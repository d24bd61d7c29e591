"""Bias, dropout and the residual sum at the end of attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

BiasDropoutAdd = Callable[
    [tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor
]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """The function `((x, bias), residual, prob) -> residual + dropout(x + bias)`.

    Dropout draws from the device's default generator; the layer sets it to the place's own key.
    `fused` asks Megatron for a compiled kernel and changes nothing here.
    """
    return _add_in_training if training else _add


def _add_in_training(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    if prob == 0.0:
        return _add(x_with_bias, residual, prob)
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    return residual + functional.dropout(x, prob)


def _add(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    return residual + x
