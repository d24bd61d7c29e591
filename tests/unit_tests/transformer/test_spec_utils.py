"""Specs build what they name, and say what they cannot find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.stage_context import StageContext
from megatron.core.transformer import ModuleSpec, build_module
from megatron.core.transformer.bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import import_module


class _WithStage:
    def __init__(self, size: int, stage: StageContext | None = None) -> None:
        self.size, self.stage = size, stage


class _Foreign:
    """As a layer written for Megatron: knows no stage."""

    def __init__(self, size: int, submodules: Any = None) -> None:
        self.size, self.submodules = size, submodules


def test_params_and_submodules_are_handed_over() -> None:
    built = build_module(ModuleSpec(_Foreign, params={"size": 3}, submodules="parts"))
    assert (built.size, built.submodules) == (3, "parts")


def test_stage_goes_to_those_who_take_it() -> None:
    stage = StageContext()
    assert build_module(_WithStage, 1, stage=stage).stage is stage
    assert build_module(_Foreign, 2, stage=stage).size == 2


def test_functions_are_returned_and_paths_are_imported() -> None:
    assert build_module(get_bias_dropout_add) is get_bias_dropout_add
    assert build_module(ModuleSpec(get_bias_dropout_add)) is get_bias_dropout_add
    linear = build_module(ModuleSpec(("torch.nn", "Linear")), 2, 3)
    assert isinstance(linear, torch.nn.Linear)
    assert import_module(["torch.nn", "Linear"]) is torch.nn.Linear


def test_bad_paths_are_named() -> None:
    with pytest.raises(ValueError, match=r"'no\.such\.module' of the spec cannot be imported"):
        import_module(("no.such.module", "x"))
    with pytest.raises(ValueError, match=r"'torch\.nn' has no 'Linaer'"):
        import_module(("torch.nn", "Linaer"))


def test_identity_places() -> None:
    x = torch.ones(2)
    assert IdentityOp(3, config=None)(x, "ignored") is x
    assert IdentityFuncOp()(True, False)(x, "residual") is x


@pytest.mark.parametrize("training", [True, False])
def test_bias_dropout_add(training: bool) -> None:
    x, bias, residual = torch.randn(4, 3), torch.randn(3), torch.randn(4, 3)
    add = get_bias_dropout_add(training, fused=True)
    torch.testing.assert_close(add((x, bias), residual, 0.0), x + bias + residual)
    torch.testing.assert_close(add((x, None), residual, 0.0), x + residual)
    torch.manual_seed(1)
    dropped = add((x, bias), residual, 0.5)
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(x + bias, 0.5, training) + residual
    torch.testing.assert_close(dropped, expected)
