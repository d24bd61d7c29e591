"""Cross entropy against torch's, against finite differences, and on extreme logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

VOCAB, SHAPE = 11, (5, 3)


def _data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (3.0 * torch.randn(*SHAPE, VOCAB, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(VOCAB, SHAPE)


def _reference(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.movedim(-1, 1), target, reduction="none")


def test_loss_and_gradient_equal_torch() -> None:
    logits, target = _data()
    grad = torch.rand(SHAPE, dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(logits, target)
    (found,) = torch.autograd.grad(loss, logits, grad)
    expected = _reference(logits, target)
    (expected_grad,) = torch.autograd.grad(expected, logits, grad)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_equals_finite_differences(smoothing: float) -> None:
    logits, target = _data()
    weights = torch.rand(SHAPE, dtype=torch.float64)

    def total(logits: torch.Tensor) -> torch.Tensor:
        return (vocab_parallel_cross_entropy(logits, target, smoothing) * weights).sum()

    (found,) = torch.autograd.grad(total(logits), logits)
    step = 1e-6
    for index in ((0, 0, 0), (4, 2, int(target[4, 2])), (2, 1, 7)):
        shifted = [logits.detach().clone() for _ in range(2)]
        shifted[0][index] += step
        shifted[1][index] -= step
        slope = (total(shifted[0]) - total(shifted[1])) / (2 * step)
        assert float(found[index]) == pytest.approx(float(slope), rel=1e-5, abs=1e-8)


def test_label_smoothing_spreads_over_the_wrong_classes() -> None:
    logits, target = _data()
    smoothing = 0.2
    wanted = torch.full((*SHAPE, VOCAB), smoothing / (VOCAB - 1), dtype=torch.float64)
    wanted.scatter_(-1, target.unsqueeze(-1), 1.0 - smoothing)
    expected = -(wanted * torch.log_softmax(logits, -1)).sum(-1)
    loss = vocab_parallel_cross_entropy(logits, target, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.0"):
        vocab_parallel_cross_entropy(logits, target, 1.0)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(loss, torch.tensor([2e4, 1.0986123]))
    loss.sum().backward()
    expected = torch.tensor([[1.0, -1.0, 0.0], [-2 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_give_an_fp32_loss_and_a_gradient_of_their_own_dtype(
    dtype: torch.dtype,
) -> None:
    logits, target = _data(dtype)
    loss = vocab_parallel_cross_entropy(logits, target)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, _reference(logits.float(), target))
    loss.sum().backward()
    assert logits.grad is not None and logits.grad.dtype is dtype
    low = vocab_parallel_cross_entropy(logits, target, in_fp32=False)
    assert low.dtype is torch.float32 and not torch.equal(low, loss)


def test_logits_are_not_changed_and_a_second_backward_is_an_error() -> None:
    logits, target = _data()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, target).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(logits, before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
