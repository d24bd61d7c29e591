"""What splitting a backward costs: (T_F + T_B + T_W) / (T_F + T_BW) of one transformer layer.

Above 1, every W that fills a bubble pays for itself first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.pipeline_parallel.zerobubble.runtime.compute import LossScaling
from megatron.core.stage_context import StageContext
from megatron.training.benchmarks.llama import (
    LlamaSizes,
    OrdinaryStage,
    build_model,
    with_gradient_buffer,
)
from megatron.training.benchmarks.measure import Contestant, RankTime, measure

SPLIT, FUSED, PEER_SPLIT, PEER_FUSED = "split", "fused", "torch split", "torch fused"


@dataclass(frozen=True, kw_only=True)
class SplitCase:
    """One layer, measured split and fused in turns."""

    name: str
    sizes: LlamaSizes
    recompute: bool
    passes_per_repeat: int  # how often the layer runs forward and backward in one measurement
    repeats: int
    with_peer: bool


def run_case(case: SplitCase) -> dict[str, list[RankTime]]:
    """Measure one case in this process."""
    passes = {SPLIT: _our_pass(case, split=True), FUSED: _our_pass(case, split=False)}
    if case.with_peer:
        passes[PEER_SPLIT] = _peer_pass(case, split=True)
        passes[PEER_FUSED] = _peer_pass(case, split=False)

    def contestant(name: str, once: Callable[[], None]) -> Contestant:
        def step() -> None:
            for _ in range(case.passes_per_repeat):
                once()

        return Contestant(name, step)

    contestants = [contestant(name, once) for name, once in passes.items()]
    return measure(contestants, repeats=case.repeats)


def _middle_stage() -> StageContext:
    """Neither embedding nor head: the layer alone."""
    return StageContext(stage=1, num_stages=3, layer_offset=0, num_layers=1)


def _activations(case: SplitCase) -> tuple[torch.Tensor, torch.Tensor]:
    """What a neighbour would send: the layer's input and its output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = case.sizes.activation_shape
    received = torch.randn(shape, generator=generator)
    return received, torch.randn(shape, generator=generator)


def _our_pass(case: SplitCase, *, split: bool) -> Callable[[], None]:
    context = _middle_stage()
    model = build_model(case.sizes, context, recompute=case.recompute)
    stage = with_gradient_buffer(model, context)
    received, grad = _activations(case)
    scaling = LossScaling()

    def once() -> None:
        stage.forward(
            0,
            received,
            forward_step=lambda _, module: (module(None), _no_loss),
            data_iterator=None,
            scaling=scaling,
            forward_only=False,
            hand_on=_nowhere,
        )
        if split:
            stage.input_backward(0, grad, hand_on=_nowhere)
            stage.weight_backward(0)
        else:
            stage.full_backward(0, grad, hand_on=_nowhere)

    return once


def _nowhere(value: torch.Tensor) -> None:
    """The layer has no neighbour."""


def _no_loss(output: torch.Tensor) -> None:
    """The stage before asks for no loss."""


def _peer_pass(case: SplitCase, *, split: bool) -> Callable[[], None]:
    """The same layer of torch's ordinary modules, backward as torch's stages run it."""
    from torch.distributed.pipelining._backward import (
        stage_backward,
        stage_backward_input,
        stage_backward_weight,
    )

    module = OrdinaryStage(build_model(case.sizes, _middle_stage(), recompute=case.recompute))
    received, grad = _activations(case)

    def once() -> None:
        leaf = received.detach().requires_grad_()
        output = module(leaf)
        if split:
            _, groups = stage_backward_input([output], [grad], [leaf], module.parameters())
            stage_backward_weight(module.parameters(), groups)
        else:
            stage_backward((output,), (grad,), [leaf])

    return once
