"""The compute of one virtual stage: F, B, W and BW of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.stage_context import StageContext

GradientEdge = torch.autograd.graph.GradientEdge
ForwardStep = Callable[[Iterator[Any] | None, torch.nn.Module], tuple[torch.Tensor, Callable]]
# Takes what a pass makes for a neighbour. Called as soon as the value exists, before the pass's own
# bookkeeping: another rank may be waiting for it.
HandOn = Callable[[torch.Tensor], None]


@dataclass
class LossRecord:
    """What the last stage's loss function said of one micro-batch."""

    reported: dict[str, Any]
    num_tokens: torch.Tensor | None = None


@dataclass
class LossScaling:
    """How a micro-batch's loss becomes what backward starts from; applied once, before backward.

    `divisor` is micro-batches times data-parallel size (1 in per-token mode, where gradients are
    divided by the global token count at the end); `grad_scale` is the fp16 loss scale.
    """

    divisor: float = 1.0
    per_token: bool = False
    grad_scale: Callable[[torch.Tensor], torch.Tensor] | None = None

    def apply(self, result: tuple[Any, ...]) -> tuple[torch.Tensor, LossRecord]:
        """`result` is what a loss function returned: (loss, dict) or (sum, tokens, dict)."""
        if len(result) == 2:
            loss, reported = result
            record = LossRecord(reported)
        else:
            loss, num_tokens, reported = result
            record = LossRecord(reported, num_tokens)
            if not self.per_token:
                loss = loss / num_tokens.clamp(min=1)
        if loss.numel() != 1:
            raise ScheduleError(
                f"the loss function returned a loss of shape {tuple(loss.shape)}; backward starts "
                "from one number, so return a mean or a sum"
            )
        if not self.per_token:
            loss = loss / self.divisor
        if self.grad_scale is not None:
            loss = self.grad_scale(loss)
        return loss, record


@dataclass
class _Live:
    """What a micro-batch keeps between its F and its B: the stage's input leaf, the graph's end."""

    input_leaf: torch.Tensor | None
    output: GradientEdge | None
    first_grad: torch.Tensor | None  # on the last stage: what backward starts from


def deferring_layers(module: torch.nn.Module) -> list[str]:
    """Names of the layers whose weight gradient B leaves for W: those with a trainable weight."""
    names = []
    for layer in module.modules():
        name = getattr(layer, "layer_name", None)
        use = getattr(layer, "tied_use", None)
        weight = getattr(layer, "weight", None) if use is None else use.parameter
        if name is not None and weight is not None and weight.requires_grad:
            names.append(name)
    return names


@dataclass
class StageCompute:
    """Runs the passes of one virtual stage held by this rank."""

    module: DistributedDataParallel
    context: StageContext
    _live: dict[int, _Live] = field(default_factory=dict)
    _deferring: frozenset[str] = field(init=False)  # layers that owe W work after each B
    _set_input_tensor: Callable[[torch.Tensor | None], None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._deferring = frozenset(deferring_layers(self.module))
        # Bound here: looking a submodule up takes longer than the call.
        self._set_input_tensor = self.module.module.set_input_tensor  # type: ignore[assignment]

    def forward(
        self,
        microbatch: int,
        received: torch.Tensor | None,
        *,
        forward_step: ForwardStep,
        data_iterator: Iterator[Any] | None,
        scaling: LossScaling,
        forward_only: bool,
        hand_on: HandOn,
        collect_non_loss_data: bool = False,
    ) -> LossRecord | None:
        """F: hands its output on; the last stage has none and returns its loss record."""
        self.context.random.microbatch = microbatch
        leaf = received
        if leaf is not None and not forward_only:
            leaf = leaf.detach().requires_grad_()
        self._set_input_tensor(leaf)
        output, loss_function = forward_step(data_iterator, self.module)
        if not self.context.is_last:
            hand_on(output.detach())
        self._set_input_tensor(None)
        record = None
        if self.context.is_last:
            if collect_non_loss_data:
                return LossRecord(loss_function(output, non_loss_data=True))
            output, record = scaling.apply(loss_function(output))
        if not forward_only:
            edge = torch.autograd.graph.get_gradient_edge(output) if output.requires_grad else None
            first_grad = torch.ones_like(output) if self.context.is_last else None
            self._live[microbatch] = _Live(leaf, edge, first_grad)
        return record

    def input_backward(
        self, microbatch: int, grad: torch.Tensor | None, *, hand_on: HandOn
    ) -> None:
        """B: hands the gradient of the stage's input on; leaves the weights' in the store."""
        has_graph = self._live[microbatch].output is not None
        with self.context.store.defer(microbatch):
            self._backward(microbatch, grad, hand_on)
        if has_graph:
            self._check_deferred(microbatch)

    def weight_backward(self, microbatch: int) -> None:
        """W: the weight gradients that B left."""
        self.context.store.run(microbatch)

    def full_backward(self, microbatch: int, grad: torch.Tensor | None, *, hand_on: HandOn) -> None:
        """BW: both at once; the same kernels as B and W."""
        self._backward(microbatch, grad, hand_on)

    @property
    def num_deferred(self) -> int:
        """Weight gradients that each B leaves for its W, at least."""
        return len(self._deferring)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def assert_empty(self) -> None:
        assert not self._live, f"micro-batches without a backward: {sorted(self._live)}"
        self.context.store.assert_empty()

    def discard(self) -> None:
        """Forget an iteration that failed."""
        self._live.clear()
        self.context.store.discard()

    def _check_deferred(self, microbatch: int) -> None:
        """Every layer that can split has left its W work: else W is empty and B did it all."""
        silent = self._deferring.difference(self.context.store.layers_pending(microbatch))
        if silent:
            raise ScheduleError(
                f"B of stage {self.context.stage}, micro-batch {microbatch} left no weight "
                f"gradient for W from {', '.join(sorted(silent)[:5])} "
                f"({len(silent)} of {len(self._deferring)} layers); a layer that is built must be "
                "used, or frozen"
            )

    def _backward(self, microbatch: int, grad: torch.Tensor | None, hand_on: HandOn) -> None:
        self.context.random.microbatch = microbatch  # recompute draws this micro-batch's dropout
        live = self._live.pop(microbatch)
        if live.output is not None:
            _run_backward(live.output, live.first_grad if grad is None else grad)
        leaf = live.input_leaf
        if leaf is not None:  # no gradient: by agreement zeros, as nothing depends on the input
            hand_on(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        if live.output is not None:
            self.module.collect_autograd_gradients()


def _run_backward(output: GradientEdge, grad: torch.Tensor | None) -> None:
    """torch.autograd.backward less its checks of arguments, which take as long as the engine."""
    torch.autograd.Variable._execution_engine.run_backward(
        (output,),
        (grad,),
        False,  # keep the graph
        False,  # create a graph of the backward
        (),  # the leaves to accumulate into: all
        allow_unreachable=True,
        accumulate_grad=True,
    )
