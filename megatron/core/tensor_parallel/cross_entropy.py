"""Cross entropy over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch


class _CrossEntropy(torch.autograd.Function):
    """Keeps the log-probabilities alone, and turns them into the gradient in place."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float,
        in_fp32: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32) if in_fp32 else logits.dtype
        log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
        index = target.unsqueeze(-1)
        loss = log_probs.gather(-1, index).squeeze(-1).neg_()
        if label_smoothing:
            loss = loss.mul_(1.0 - label_smoothing)
            loss = loss.sub_(log_probs.mean(-1), alpha=label_smoothing)
        ctx.save_for_backward(log_probs, index)
        ctx.label_smoothing, ctx.logits_dtype = label_smoothing, logits.dtype
        return loss.to(torch.promote_types(dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # d loss / d logits = softmax - (1 - smoothing) one_hot(target) - smoothing / vocabulary.
        log_probs, index = ctx.saved_tensors
        scale = grad.unsqueeze(-1).to(log_probs.dtype)
        grad_logits = log_probs.exp_()
        if ctx.label_smoothing:
            grad_logits.sub_(ctx.label_smoothing / grad_logits.shape[-1])
        grad_logits.mul_(scale)
        grad_logits.scatter_add_(-1, index, scale * (ctx.label_smoothing - 1.0))
        return grad_logits.to(ctx.logits_dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    in_fp32: bool = True,
) -> torch.Tensor:
    """Loss of each token, in fp32 (fp64 for fp64): logits (..., V), target (...) -> (...).

    `label_smoothing` a gives each wrong class a / (V - 1). `in_fp32=False` keeps 16-bit logits'
    precision for the log-probabilities, to halve their memory. One tensor of the logits' size is
    kept for backward, which consumes it: a second backward raises torch's in-place error.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it lies in [0, 1)")
    vocabulary = logits.shape[-1]
    # (1 - a) one_hot + a / (V - 1) on the others = (1 - s) one_hot + s / V with this s.
    smoothing = label_smoothing * vocabulary / (vocabulary - 1) if label_smoothing else 0.0
    return _CrossEntropy.apply(logits, target, smoothing, in_fp32)
