"""Faults that split-backward runtimes are known to have without a word; no schedule has them here.

They show with models that do what plain layers do not: frozen stages, layers that cannot split, a
layer used twice, custom autograd functions, recompute; and with replicas.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import pretrain_gpt
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.stage_context import StageContext
from megatron.training.training import train_step
from tests.pretrain_runs import History, assert_same_training, run
from tests.training_runs import GPT, LLAMA, start

_P2 = "--pipeline-model-parallel-size 2"
_SMALL = "--global-batch-size 6 --train-iters 3 --eval-iters 0"  # 3 micro-batches
_UNTIED = "--untie-embeddings-and-output-weights"

Provider = Callable[..., GPTModel]


def _changed(
    pre_process: bool = True,
    post_process: bool = True,
    stage: StageContext | None = None,
    *,
    change: Callable[[GPTModel], None],
) -> GPTModel:
    """The model, or one stage of it, after `change`."""
    model = pretrain_gpt.model_provider(pre_process, post_process, stage)
    change(model)
    return model


def _layers(model: GPTModel) -> dict[int, Any]:
    """The stage's layers by their number in the whole model, from 0."""
    layers: Any = model.decoder.layers
    return {layer.layer_number - 1: layer for layer in layers}


def _freeze(model: GPTModel, *, prefixes: tuple[str, ...]) -> None:
    for local_name, parameter in model.named_parameters():
        if model.global_parameter_name(local_name).startswith(prefixes):
            parameter.requires_grad_(False)


def _add_adapter(model: GPTModel) -> None:
    """Layer 1 gets a linear layer of torch's own behind it, which cannot split its backward."""
    for number, layer in _layers(model).items():
        if number == 1:
            layer.adapter = torch.nn.Linear(32, 32)
            for parameter in layer.adapter.parameters():
                parameter.init_method = functools.partial(torch.nn.init.normal_, std=0.02)
            layer.register_forward_hook(lambda layer, _, hidden: hidden + layer.adapter(hidden))


def _share_layer(model: GPTModel) -> None:
    """Layer 1 uses the MLP of layer 0, which is in the same stage."""
    layers = _layers(model)
    if 1 in layers:
        assert 0 in layers, "both uses are in one stage"
        layers[1].mlp = layers[0].mlp


class _Counted(torch.autograd.Function):
    """The identity; counts its forwards and backwards, by layer."""

    forwards: ClassVar[Counter[int]] = Counter()
    backwards: ClassVar[Counter[int]] = Counter()

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        ctx.layer = layer
        _Counted.forwards[layer] += 1
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _Counted.backwards[ctx.layer] += 1
        return grad, None


def _count(model: GPTModel) -> None:
    """Each layer runs a custom function on the output of its MLP."""
    for number, layer in _layers(model).items():
        layer.mlp.register_forward_hook(
            lambda _module, _inputs, output, number=number: (
                _Counted.apply(output[0], number),
                *output[1:],
            )
        )


def _check_all(pool: Any, model: str, provider: Provider) -> tuple[History, list[History]]:
    """Every schedule on two ranks trains this model as one process does, bit for bit."""
    (single,) = run(pool, 1, model, model_provider=provider)
    assert single.weights[0] != single.weights[-1]
    piped = run(
        pool,
        2,
        *(f"{model} {_P2} --pipeline-schedule {schedule}" for schedule in SCHEDULES),
        model_provider=provider,
    )
    for schedule, ours in zip(SCHEDULES, piped, strict=True):
        assert_same_training(ours, single, schedule)
    return single, piped


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "prefixes",
    [
        ("embedding.", "decoder.layers.0.", "decoder.layers.1."),
        ("decoder.layers.1.", "decoder.layers.2."),
        ("decoder.layers.3.", "output_layer.", "decoder.final_layernorm."),
    ],
)
def test_frozen_stages_cost_the_others_nothing(pool: Any, prefixes: tuple[str, ...]) -> None:
    """The first stages, some in the middle (on a V placement), the last: the rest still learns."""
    change = functools.partial(_freeze, prefixes=prefixes)
    single, _ = _check_all(
        pool, f"{GPT} {_SMALL} {_UNTIED}", functools.partial(_changed, change=change)
    )
    first, last = single.weights[0], single.weights[-1]
    assert {n for n in first if first[n] == last[n]} == {n for n in first if n.startswith(prefixes)}


@pytest.mark.timeout(120)
def test_a_layer_that_cannot_split_is_named_and_right(pool: Any) -> None:
    provider = functools.partial(_changed, change=_add_adapter)
    single, piped = _check_all(pool, f"{LLAMA} {_SMALL}", provider)
    name = "decoder.layers.1.adapter.weight"
    assert single.weights[0][name] != single.weights[-1][name]
    for schedule, history in zip(SCHEDULES, piped, strict=True):
        stage = 0 if SCHEDULES[schedule].placement == "plain" else 1  # of two stages, or of four
        said = f"stage {stage}: the gradients of {name} cannot be split and are done in B"
        assert said in history.output, schedule


@pytest.mark.timeout(120)
def test_a_layer_used_twice_in_a_stage(pool: Any) -> None:
    model = f"{GPT} {_SMALL} --num-layers 8"
    single, _ = _check_all(pool, model, functools.partial(_changed, change=_share_layer))
    (separate,) = run(pool, 1, model)
    assert len(single.weights[0]) == len(separate.weights[0]) - 4, "two matrices, two biases"


def _counts(cases: list[str]) -> list[tuple[Counter[int], Counter[int]]]:
    """Of each case on this rank: (forwards, backwards) by layer, in one training step."""
    provider = functools.partial(_changed, change=_count)
    found = []
    for case in cases:
        _Counted.forwards, _Counted.backwards = Counter(), Counter()
        with contextlib.redirect_stdout(io.StringIO()):
            trainer, state, iterators = start(case, model_provider=provider)
        train_step(trainer, pretrain_gpt.forward_step, iterators, state)
        found.append((_Counted.forwards, _Counted.backwards))
    return found


_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("flags", "forwards"), [("", 1), (_RECOMPUTE, 2)])
def test_nothing_runs_more_often_than_it_must(pool: Any, flags: str, forwards: int) -> None:
    """A custom function's backward once a micro-batch; under recompute a layer's forward twice."""
    model = f"{LLAMA} {_SMALL} {flags} {_P2}"
    cases = [f"{model} --pipeline-schedule {schedule}" for schedule in SCHEDULES]
    per_rank = pool.run(2, _counts, cases)
    for index, schedule in enumerate(SCHEDULES):
        ran = sum((rank[index][0] for rank in per_rank), Counter[int]())
        back = sum((rank[index][1] for rank in per_rank), Counter[int]())
        assert ran == dict.fromkeys(range(4), 3 * forwards), schedule
        assert back == dict.fromkeys(range(4), 3), schedule


@pytest.mark.timeout(120)
def test_replicas_are_summed_behind_every_schedule(pool: Any) -> None:
    """Two replicas of a pipeline leave what two replicas without one leave, overlapped or not."""
    model = f"{LLAMA} --global-batch-size 12 --train-iters 3 --eval-iters 0"
    (flat,) = run(pool, 2, model)
    commands = [
        f"{model} {_P2} --pipeline-schedule {schedule} {overlap}"
        for schedule, overlap in zip(
            SCHEDULES, itertools.cycle(["--overlap-grad-reduce", ""]), strict=False
        )
    ]
    for command, ours in zip(commands, run(pool, 4, *commands), strict=True):
        assert_same_training(ours, flat, command)
