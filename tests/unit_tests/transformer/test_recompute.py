"""Recompute: two forwards a layer, never three, the same bits, and activations not kept."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.recompute import Unit, plan_units
from tests.unit_tests.models.tiny_models import (
    assert_same_bits,
    batch,
    build_stages,
    gpt_config,
    gradients,
    llama_config,
    train_step,
)

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def _full(method: str, num_layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def test_units() -> None:
    assert plan_units(2, None, None) == [Unit(0, 1, False), Unit(1, 2, False)]
    assert plan_units(5, "uniform", 2) == [Unit(0, 2, True), Unit(2, 4, True), Unit(4, 5, True)]
    assert plan_units(3, "block", 2) == [Unit(0, 1, True), Unit(1, 2, True), Unit(2, 3, False)]
    assert plan_units(2, "block", 9) == [Unit(0, 1, True), Unit(1, 2, True)]
    assert plan_units(0, "uniform", 2) == []


def _count_forwards(model: GPTModel, suffix: str) -> collections.Counter[str]:
    calls: collections.Counter[str] = collections.Counter()

    def hook_for(name: str) -> Any:
        return lambda *_: calls.update([name])

    for name, module in model.named_modules():
        if name.startswith("decoder.layers.") and name.endswith(suffix):
            module.register_forward_pre_hook(hook_for(name))
    return calls


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize(
    ("changes", "twice"),
    [
        (_full("uniform", 1), [0, 1, 2, 3]),
        (_full("uniform", 3), [0, 1, 2, 3]),
        (_full("block", 2), [0, 1]),
    ],
)
def test_full_recompute_runs_each_layer_twice(
    changes: dict[str, Any], twice: list[int], split_backward: bool
) -> None:
    (model,) = build_stages(llama_config(**changes))
    calls = _count_forwards(model, "mlp")  # once in each layer's forward
    train_step([model], split_backward=split_backward)
    expected = {f"decoder.layers.{i}.mlp": 2 if i in twice else 1 for i in range(4)}
    assert calls == expected


@pytest.mark.parametrize(
    ("part", "suffix", "others"),
    [("core_attn", "core_attention", "mlp"), ("mlp", ".mlp", "core_attention")],
)
def test_selective_recompute_runs_its_part_alone_twice(part: str, suffix: str, others: str) -> None:
    (model,) = build_stages(gpt_config(**_selective(part)))
    twice, once = _count_forwards(model, suffix), _count_forwards(model, others)
    train_step([model])
    assert len(twice) == len(once) == 4
    assert set(twice.values()) == {2} and set(once.values()) == {1}


@pytest.mark.parametrize("make", [gpt_config, llama_config])
@pytest.mark.parametrize(
    "changes",
    [
        _full("uniform", 1),
        _full("uniform", 2),
        _full("block", 3),
        _selective("core_attn"),
        _selective("core_attn", "mlp"),
    ],
)
@pytest.mark.parametrize("split_backward", [False, True])
def test_gradients_have_the_bits_of_no_recompute(
    make: Any, changes: dict[str, Any], split_backward: bool
) -> None:
    plain, recomputing = build_stages(make(**DROPOUT)), build_stages(make(**DROPOUT, **changes))
    for microbatch in range(2):
        loss = train_step(plain, microbatch)
        assert train_step(recomputing, microbatch, split_backward=split_backward) == loss
    assert_same_bits(gradients(recomputing), gradients(plain))


def test_a_second_forward_draws_the_dropout_of_its_own_micro_batch() -> None:
    """Also when other micro-batches ran between its F and its B."""

    def run(**changes: Any) -> dict[str, torch.Tensor]:
        (model,) = build_stages(gpt_config(**DROPOUT, **changes))
        tokens, labels = batch()
        losses = []
        for model.stage.random.microbatch in range(3):
            losses.append(model(tokens, labels=labels).mean())
        for loss in losses:  # the context still says micro-batch 2
            loss.backward()
        assert model.stage.random.microbatch == 2
        return gradients([model])

    assert_same_bits(run(**_full("uniform", 1)), run())


@pytest.mark.parametrize(
    ("changes", "kept"), [({}, True), (_full("uniform", 1), False), (_selective("mlp"), False)]
)
def test_activations_inside_are_not_kept(changes: dict[str, Any], kept: bool) -> None:
    (model,) = build_stages(gpt_config(**changes))
    inner: list[weakref.ref[torch.Tensor]] = []
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.register_forward_hook(
            lambda _module, _inputs, output: inner.append(weakref.ref(output[0]))
        )
    tokens, labels = batch()
    loss = model(tokens, labels=labels).mean()
    assert len(inner) == 4
    assert all((reference() is not None) is kept for reference in inner)
    loss.backward()
    assert all(reference() is None for reference in inner)


def test_evaluation_runs_once() -> None:
    (model,) = build_stages(llama_config(**_full("uniform", 1)))
    calls = _count_forwards(model, "mlp")
    model.eval()
    tokens, labels = batch()
    model(tokens, labels=labels).mean().backward()
    assert set(calls.values()) == {1}


def test_frozen_first_layers_are_recomputed_for_nobody() -> None:
    (model,) = build_stages(llama_config(**_full("uniform", 1)), tied=False)
    model.embedding.requires_grad_(False)
    model.decoder.layers[:2].requires_grad_(False)
    calls = _count_forwards(model, "mlp")
    train_step([model])
    assert calls == {f"decoder.layers.{i}.mlp": 1 if i < 2 else 2 for i in range(4)}
    (plain,) = build_stages(llama_config(), tied=False)
    train_step([plain])
    expected = gradients([plain])
    found = gradients([model])
    assert_same_bits(found, {name: expected[name] for name in found})
