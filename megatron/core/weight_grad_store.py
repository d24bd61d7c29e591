"""Deferred weight gradients: what backward's B leaves for its W.

A layer that can split its backward computes the gradient of its input at once and puts the
gradient of its weight here as work to be done later. Outside a split backward the work is done
at once, so that fused and split backward run the same kernels in the same order per parameter.

    with store.defer(microbatch=3):      # B: layers' weight-gradient work is kept
        torch.autograd.backward(...)
    store.run(microbatch=3)              # W: runs it, in the order it was put
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class GradTarget:
    """Where one further use of a parameter adds its gradient (a tied head, say).

    `main_grad` is set by the gradient buffer, as it is on parameters.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.main_grad: torch.Tensor | None = None


class WeightGradTask(NamedTuple):
    """One layer's deferred work: `function(*arguments)` adds to the weight's main gradient."""

    layer: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


class _Deferring:
    """The context of `WeightGradStore.defer`; a generator's would take twice as long per B."""

    def __init__(self, store: WeightGradStore, microbatch: int) -> None:
        self._store, self._microbatch = store, microbatch

    def __enter__(self) -> None:
        assert self._store._collecting is None, "a stage runs one B at a time"
        self._store._collecting = []

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        tasks, self._store._collecting = self._store._collecting, None
        if error_type is None:
            assert tasks is not None
            self._store._deferred[self._microbatch] = tasks


class WeightGradStore:
    """The deferred weight-gradient work of one stage, keyed by micro-batch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[WeightGradTask]] = {}
        self._collecting: list[WeightGradTask] | None = None

    def put(self, task: WeightGradTask) -> None:
        """Keep the task for this micro-batch's W, or run it now when nothing is deferred."""
        if self._collecting is None:
            task.function(*task.arguments)
        else:
            self._collecting.append(task)

    def defer(self, microbatch: int) -> _Deferring:
        """Within a block of it, what is put is kept as the work of `microbatch`'s W."""
        assert microbatch not in self._deferred, f"micro-batch {microbatch} already has had its B"
        return _Deferring(self, microbatch)

    @torch.no_grad()  # the work adds to gradients; it is not itself to be differentiated
    def run(self, microbatch: int) -> list[str]:
        """Do the deferred work of `microbatch`, each piece freed when done; returns the layers."""
        tasks = self._deferred.pop(microbatch)
        tasks.reverse()
        done = []
        while tasks:
            task = tasks.pop()
            task.function(*task.arguments)
            done.append(task.layer)
        return done

    def layers_pending(self, microbatch: int) -> list[str]:
        """The layers that wait for W of `microbatch`, in the order their B ran."""
        return [task.layer for task in self._deferred.get(microbatch, [])]

    def discard(self) -> None:
        """Forget all deferred work."""
        self._deferred.clear()

    def assert_empty(self) -> None:
        assert not self._deferred, f"deferred weight gradients left: {sorted(self._deferred)}"


def accumulate_linear_weight_grad(
    target: torch.nn.Parameter | GradTarget, inputs: torch.Tensor, grad_output: torch.Tensor
) -> None:
    """Add `grad_output^T @ inputs` to the target's gradient, in the gradient's precision.

    inputs (..., in), grad_output (..., out); the gradient is (out, in).
    """
    inputs_2d = inputs.reshape(-1, inputs.shape[-1])
    grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
    grad = gradient_of(target)
    if grad.dtype != inputs_2d.dtype:
        # The product is formed in the gradient's precision: rounding it to 16 bits first would
        # lose what fp32 accumulation is for.
        inputs_2d, grad_2d = inputs_2d.to(grad.dtype), grad_2d.to(grad.dtype)
    grad.addmm_(grad_2d.t(), inputs_2d)


def accumulate_embedding_weight_grad(
    target: torch.nn.Parameter | GradTarget, indices: torch.Tensor, grad_output: torch.Tensor
) -> None:
    """Add rows of `grad_output` (..., width) to the rows `indices` (...) of the gradient."""
    grad = gradient_of(target)
    rows = grad_output.reshape(-1, grad_output.shape[-1]).to(grad.dtype)
    grad.index_add_(0, indices.reshape(-1), rows)


def gradient_of(target: torch.nn.Parameter | GradTarget) -> torch.Tensor:
    """The tensor a gradient is added to: `main_grad` if a buffer gave one, else `.grad`."""
    main_grad = getattr(target, "main_grad", None)
    if main_grad is not None:
        return main_grad
    parameter = target.parameter if isinstance(target, GradTarget) else target
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
