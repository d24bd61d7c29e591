"""Layers and blocks: the residual structure, specs of layers and of blocks, foreign layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.stage_context import StageContext
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

S, B, H = 5, 2, 16


def _config(**changes: Any) -> TransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": H,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**fields | changes)


class _Foreign(torch.nn.Module):
    """A layer as Megatron's are: takes no stage, returns (hidden states, context)."""

    def __init__(self, config: TransformerConfig, layer_number: int, step: float = 1.0) -> None:
        super().__init__()
        self.layer_number, self.step = layer_number, step

    def forward(
        self, hidden: torch.Tensor, attention_mask: Any, rotary_pos_emb: Any = None
    ) -> tuple[torch.Tensor, None]:
        return hidden + self.step, None


def test_a_layer_adds_two_pre_normed_branches() -> None:
    layer = build_module(get_gpt_layer_local_spec(), config=_config(), layer_number=1)
    x = torch.randn(S, B, H)
    hidden = x + layer.self_attention(layer.input_layernorm(x))[0]
    expected = hidden + layer.mlp(layer.pre_mlp_layernorm(hidden))[0]
    assert torch.equal(layer(x), expected)


def test_hidden_dropout_drops_each_branch_by_its_own_key() -> None:
    stage = StageContext(layer_offset=2)
    config = _config(hidden_dropout=0.5)
    layer = build_module(get_gpt_layer_local_spec(), config=config, layer_number=1, stage=stage)
    assert layer.layer_number == 3
    x = torch.randn(S, B, H)
    found = layer(x)
    hidden = x
    for site, branch in (
        ("attention_output", lambda h: layer.self_attention(layer.input_layernorm(h))[0]),
        ("mlp_output", lambda h: layer.mlp(layer.pre_mlp_layernorm(h))[0]),
    ):
        with stage.random.dropout(x, 3, site):
            hidden = hidden + torch.nn.functional.dropout(branch(hidden), 0.5)
    assert torch.equal(found, hidden)


def test_cross_attention_is_refused() -> None:
    submodules = TransformerLayerSubmodules(cross_attention=torch.nn.Identity)
    with pytest.raises(ValueError, match="cross_attention"):
        TransformerLayer(_config(), submodules)


def _block(spec: Any, **stage: Any) -> TransformerBlock:
    return TransformerBlock(_config(), spec, stage=StageContext(**stage))


def test_a_layer_spec_is_used_for_every_layer_of_the_stage() -> None:
    block = _block(ModuleSpec(_Foreign), layer_offset=1, num_layers=2)
    assert [layer.layer_number for layer in block.layers] == [1, 2]
    block.final_layernorm = None
    assert torch.equal(block(torch.zeros(S, B, H)), torch.full((S, B, H), 2.0))


def _steps(*steps: float) -> list[ModuleSpec]:
    return [ModuleSpec(_Foreign, params={"step": step}) for step in steps]


@pytest.mark.parametrize("as_module_spec", [False, True])
def test_a_block_spec_lists_all_layers_or_the_stages_own(as_module_spec: bool) -> None:
    def block(*steps: float) -> TransformerBlock:
        spec: Any = TransformerBlockSubmodules(_steps(*steps), layer_norm=None)
        if as_module_spec:
            spec = ModuleSpec(TransformerBlock, submodules=spec)
        return _block(spec, layer_offset=1, num_layers=2)

    for steps in ((1.0, 2.0, 3.0, 4.0), (2.0, 3.0)):
        assert [layer.step for layer in block(*steps).layers] == [2.0, 3.0]
        assert block(*steps).final_layernorm is None
    with pytest.raises(ValueError, match="lists 3 layers; stage 0 holds 2 of num_layers 4"):
        block(1.0, 2.0, 3.0)


def test_the_final_norm_is_on_the_last_stage_only() -> None:
    spec = get_gpt_layer_local_spec()
    stage = StageContext(num_layers=0)
    first = TransformerBlock(_config(), spec, post_process=False, stage=stage)
    last = TransformerBlock(_config(), spec, stage=stage)
    x = torch.randn(S, B, H)
    assert torch.equal(first(x), x)
    assert torch.equal(last(x), torch.nn.functional.layer_norm(x, (H,), eps=1e-5))


def test_backward_dw_reaches_every_linear_layer() -> None:
    config = _config(num_layers=2, delay_wgrad_compute=True)
    block = TransformerBlock(config, get_gpt_layer_local_spec())
    block(torch.randn(S, B, H)).sum().backward()
    matrices = [p for p in block.parameters() if p.dim() == 2]
    assert len(matrices) == 8 and all(p.grad is None for p in matrices)
    block.backward_dw()
    assert all(p.grad is not None and p.grad.any() for p in matrices)
