"""The kernel report says what is used and why; unsplit matrices are named."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.device import Device
from megatron.core.transformer.kernels import kernel_choices, parameters_not_split
from tests.unit_tests.models.tiny_models import build_stages, gpt_config, llama_config

CPU = Device(torch.device("cpu"))


def test_report() -> None:
    report = kernel_choices(llama_config(), CPU)
    assert list(report) == ["attention", "norm", "linear", "weight gradient"]
    assert "flash" in report["attention"]
    assert "RMSNorm" in report["norm"] and "layer_norm" in kernel_choices(gpt_config(), CPU)["norm"]
    assert "transformer_engine is not installed" in report["linear"]
    assert "gradient_accumulation_fusion is off" in report["weight gradient"]
    fused = kernel_choices(llama_config(gradient_accumulation_fusion=True), CPU)
    assert "apex" in fused["weight gradient"] and "not installed" in fused["weight gradient"]


def test_dropout_that_costs_the_fused_attention_is_named() -> None:
    report = kernel_choices(gpt_config(attention_dropout=0.1), CPU)
    assert "unfused" in report["attention"] and "attention_dropout 0.1" in report["attention"]


def test_matrices_that_do_not_split_are_named() -> None:
    (model,) = build_stages(llama_config())
    assert parameters_not_split(model) == []
    foreign: Any = torch.nn.Linear(4, 4)
    model.decoder.layers[1].adapter = foreign
    assert parameters_not_split(model) == ["decoder.layers.1.adapter.weight"]
    foreign.requires_grad_(False)
    assert parameters_not_split(model) == []
