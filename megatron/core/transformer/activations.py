"""Activation functions of the MLP beyond torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def openai_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, as GPT-2 and Megatron's fused bias-GELU compute it."""
    return functional.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x) squared."""
    return functional.relu(x).square()


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up for [gate; up] (..., 2 f) -> (..., f).

    Only the input is kept for backward: the plain formula keeps silu(gate) as well, and joins the
    two halves' gradients by a copy.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate_up
