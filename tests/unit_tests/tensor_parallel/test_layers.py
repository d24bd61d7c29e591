"""Split layers against plain autograd: same outputs and gradients, now or later."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.stage_context import StageContext
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.weight_grad_store import GradTarget

IN, OUT, ROWS = 6, 10, (5, 3)

ParallelLinear = ColumnParallelLinear | RowParallelLinear


def _linear(
    cls: type[ParallelLinear],
    *,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    stage: StageContext | None = None,
    **options: Any,
) -> ParallelLinear:
    config_options = {"delay_wgrad_compute": options.pop("delay_wgrad_compute", False)}
    if cls is RowParallelLinear:
        options = {"input_is_parallel": True, "skip_bias_add": False} | options
    layer = cls(
        IN,
        OUT,
        config=ModelParallelConfig(params_dtype=dtype, **config_options),
        init_method=torch.nn.init.normal_,
        bias=bias,
        stage=stage,
        **options,
    )
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


def _input(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*ROWS, IN, dtype=dtype, requires_grad=True)


def _plain_gradients(
    layer: ParallelLinear, x: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(y, dx, dweight[, dbias]) by torch's own autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *layer.parameters())]
    y = functional.linear(*leaves)
    return y, *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("cls", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("expanded", [False, True])
def test_linear_equals_plain_autograd(
    cls: type[ParallelLinear], bias: bool, expanded: bool
) -> None:
    layer, x = _linear(cls, bias=bias), _input()
    grad = torch.randn(*ROWS, OUT, dtype=torch.float64)
    if expanded:  # what sum().backward() sends: no memory of its own
        grad = torch.tensor(0.5, dtype=torch.float64).expand(*ROWS, OUT)
    y, returned_bias = layer(x)
    assert returned_bias is None
    y.backward(grad)
    expected = _plain_gradients(layer, x, grad)
    found = (y, x.grad, *(p.grad for p in layer.parameters()))
    for actual, value in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls", [ColumnParallelLinear, RowParallelLinear])
def test_skip_bias_add_returns_the_bias(cls: type[ParallelLinear]) -> None:
    layer, x = _linear(cls, skip_bias_add=True), _input()
    y, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y + bias, functional.linear(x, layer.weight, layer.bias))


def test_deferred_gradients_have_the_bits_of_immediate_ones() -> None:
    stage = StageContext()
    immediate = _linear(ColumnParallelLinear, dtype=torch.float32)
    deferred = _linear(ColumnParallelLinear, dtype=torch.float32, stage=stage)
    deferred.load_state_dict(immediate.state_dict())
    for microbatch in range(3):
        x, grad = _input(torch.float32), torch.randn(*ROWS, OUT)
        immediate(x)[0].backward(grad)
        with stage.store.defer(microbatch):
            deferred(x)[0].backward(grad)
    assert deferred.weight.grad is None  # all of it waits
    for microbatch in range(3):
        assert stage.store.run(microbatch) == ["ColumnParallelLinear"]
    assert torch.equal(deferred.weight.grad, immediate.weight.grad)
    assert torch.equal(deferred.bias.grad, immediate.bias.grad)
    stage.store.assert_empty()


def test_w_adds_to_what_is_there() -> None:
    layer, x = _linear(ColumnParallelLinear), _input()
    grad = torch.randn(*ROWS, OUT, dtype=torch.float64)
    earlier = torch.randn(OUT, IN, dtype=torch.float64)
    layer.weight.grad = earlier.clone()
    layer(x)[0].backward(grad)
    expected = earlier + _plain_gradients(layer, x, grad)[2]
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_16_bit_layers_add_to_an_fp32_main_gradient_without_rounding_first() -> None:
    layer, x = _linear(ColumnParallelLinear, dtype=torch.bfloat16), _input(torch.bfloat16)
    layer.weight.main_grad = torch.zeros(OUT, IN)
    grad = torch.randn(*ROWS, OUT, dtype=torch.bfloat16)
    layer(x)[0].backward(grad)
    exact = grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    torch.testing.assert_close(layer.weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)
    assert layer.weight.grad is None
    # The bias's gradient goes through autograd: summed in fp32, rounded once.
    expected = grad.double().sum((0, 1))
    assert torch.equal(layer.bias.grad, expected.to(torch.bfloat16))


def test_a_frozen_weight_queues_nothing_and_keeps_no_input() -> None:
    stage = StageContext()
    layer = _linear(ColumnParallelLinear, stage=stage)
    layer.weight.requires_grad_(False)
    x = _input()
    hidden = x * 2.0
    with stage.store.defer(0):
        y, _ = layer(hidden)
        kept = weakref.ref(hidden)
        del hidden
        assert kept() is None
        y.sum().backward()
    assert stage.store.layers_pending(0) == []
    stage.store.run(0)
    assert layer.weight.grad is None and layer.bias.grad is not None
    expected = 2.0 * layer.weight.sum(0).expand(*ROWS, IN)
    torch.testing.assert_close(x.grad, expected)


def test_no_input_gradient_is_made_where_none_is_needed() -> None:
    layer = _linear(ColumnParallelLinear)
    x = _input().detach()
    layer(x)[0].sum().backward()
    expected = x.sum((0, 1)).expand(OUT, IN)
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_weight_used_twice_gets_two_pieces() -> None:
    stage = StageContext()
    layer, x = _linear(ColumnParallelLinear, stage=stage), _input()
    other = torch.randn(OUT, IN, dtype=torch.float64)
    with stage.store.defer(0):
        hidden = layer(x)[0] @ other
        layer(hidden)[0].square().sum().backward()
    assert stage.store.layers_pending(0) == ["ColumnParallelLinear"] * 2
    stage.store.run(0)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    hidden = functional.linear(x.detach(), weight, bias) @ other
    functional.linear(hidden, weight, bias).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, bias.grad, rtol=1e-12, atol=1e-12)


def test_a_held_output_gradient_is_not_changed_by_what_backward_adds_later() -> None:
    """In a residual block one tensor is y's gradient and the first part of x's."""
    stage = StageContext()
    layer = ColumnParallelLinear(
        IN,
        IN,
        config=ModelParallelConfig(params_dtype=torch.float64),
        init_method=torch.nn.init.normal_,
        bias=False,
        stage=stage,
    )
    x, grad = _input(), torch.randn(*ROWS, IN, dtype=torch.float64)
    sent = grad.clone()
    with stage.store.defer(0):
        hidden = x * 2.0
        (hidden + layer(hidden)[0]).backward(sent)
        del sent
    stage.store.run(0)
    expected = grad.flatten(0, 1).t() @ (2.0 * x.detach()).flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_the_graph_is_gone_while_the_weight_gradient_waits() -> None:
    stage = StageContext()
    layer, x = _linear(ColumnParallelLinear, stage=stage), _input()
    gc.disable()
    try:
        hidden = x * 2.0
        node = hidden.grad_fn
        assert node is not None
        witness = _Callable()
        node.register_hook(witness)
        gone = weakref.ref(witness)
        with stage.store.defer(0):
            layer(hidden)[0].sum().backward()
        del hidden, node, witness
        assert gone() is None
        stage.store.run(0)
    finally:
        gc.enable()


class _Callable:
    def __call__(self, *_: Any) -> None:
        return None


def test_weight_handed_in_and_where_its_gradient_goes() -> None:
    layer = _linear(ColumnParallelLinear, bias=False, skip_weight_param_allocation=True)
    x = _input()
    with pytest.raises(ValueError, match="pass one to forward"):
        layer(x)
    assert not list(layer.parameters())
    weight = torch.nn.Parameter(torch.randn(OUT, IN, dtype=torch.float64))
    layer(x, weight=weight)[0].sum().backward()
    expected = x.detach().sum((0, 1)).expand(OUT, IN)
    torch.testing.assert_close(weight.grad, expected)
    weight.grad = None
    layer.tied_use = GradTarget(weight)
    layer.tied_use.main_grad = torch.zeros_like(weight)
    layer(x, weight=weight)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(layer.tied_use.main_grad, expected)


def test_delay_wgrad_compute_waits_for_backward_dw() -> None:
    layer, x = _linear(RowParallelLinear, delay_wgrad_compute=True), _input()
    for _ in range(2):
        layer(x)[0].sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None
    layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, 2.0 * x.detach().sum((0, 1)).expand(OUT, IN))


# Embedding.


def test_embedding_equals_plain_autograd() -> None:
    stage = StageContext()
    config = ModelParallelConfig(params_dtype=torch.float64)
    layer = VocabParallelEmbedding(
        7, 4, init_method=torch.nn.init.normal_, config=config, stage=stage
    )
    ids = torch.tensor([[1, 3, 3], [6, 0, 3]])
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    with stage.store.defer(0):
        rows = layer(ids)
        rows.backward(grad)
    assert layer.weight.grad is None
    assert stage.store.run(0) == ["VocabParallelEmbedding"]
    weight = layer.weight.detach().clone().requires_grad_()
    expected = functional.embedding(ids, weight)
    expected.backward(grad)
    assert torch.equal(rows, expected)
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-12, atol=1e-12)


def test_a_frozen_embedding_queues_nothing() -> None:
    layer = VocabParallelEmbedding(
        7, 4, init_method=torch.nn.init.normal_, config=ModelParallelConfig()
    )
    layer.weight.requires_grad_(False)
    assert not layer(torch.tensor([1])).requires_grad


# Parameters and their attributes.


def test_attributes_of_parameters() -> None:
    column, row = _linear(ColumnParallelLinear, stride=2), _linear(RowParallelLinear)
    weight = column.weight
    assert weight.tensor_model_parallel and weight.partition_dim == 0
    assert weight.partition_stride == 2
    assert weight.full_shape == (OUT, IN) and weight.shard == (slice(0, OUT), slice(0, IN))
    assert row.weight.tensor_model_parallel and row.weight.partition_dim == 1
    assert column.bias.tensor_model_parallel and column.bias.partition_dim == 0
    assert not row.bias.tensor_model_parallel
    assert row.bias.sequence_parallel is False
    for parameter in (*column.parameters(), *row.parameters()):
        assert callable(parameter.init_method)


def test_parameters_are_filled_unless_asked_not_to() -> None:
    def layer(perform: bool) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            IN,
            OUT,
            config=ModelParallelConfig(perform_initialization=perform),
            init_method=lambda tensor: torch.nn.init.constant_(tensor, 3.0),
        )

    assert (layer(True).weight == 3.0).all() and not layer(True).bias.any()
    empty = layer(False)
    empty.weight.init_method(empty.weight)
    assert (empty.weight == 3.0).all()


def test_tensor_parallel_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size 2 is not available"):
        _linear(ColumnParallelLinear, stage=StageContext(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"dimension 1 .*does not divide .* 4"):
        _linear(RowParallelLinear, stage=StageContext(tensor_parallel_size=4))
