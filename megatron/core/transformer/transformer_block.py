"""The transformer layers of one stage, and on the last stage the final norm."""

# S sequence, B micro-batch, H hidden.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.stage_context import StageContext
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norm import WrappedTorchNorm
from megatron.core.transformer.recompute import Unit, plan_units, recomputed
from megatron.core.transformer.rotary import Rotation
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class TransformerBlockSubmodules:
    """The layers' specs, of the whole model or of one stage, and the final norm's."""

    layer_specs: list[ModuleSpec]
    layer_norm: ModuleSpec | type | None = WrappedTorchNorm


class TransformerBlock(MegatronModule):
    """A stage's share of the model's layers.

    `spec` is the spec of one layer, which is then used for all, or of a block.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        self.stage = stage if stage is not None else StageContext()
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: torch.Tensor | None = None
        submodules = _block_submodules(spec, config.num_layers)
        self.layers = torch.nn.ModuleList(
            build_module(layer_spec, config=config, layer_number=number, stage=self.stage)
            for number, layer_spec in enumerate(self._layer_specs(submodules), start=1)
        )
        self.final_layernorm: torch.nn.Module | None = None
        if post_process and post_layer_norm and submodules.layer_norm is not None:
            self.final_layernorm = build_module(
                submodules.layer_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
        self._units = plan_units(
            len(self.layers), config.recompute_method, config.recompute_num_layers
        )

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """What the previous stage sent; the next forward consumes it."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotation | None = None,
    ) -> torch.Tensor:
        """(S, B, H) -> (S, B, H). Stages after the first take what set_input_tensor was given."""
        if not self.pre_process:
            hidden_states, self.input_tensor = self.input_tensor, None
        if hidden_states is None:
            raise ValueError(
                f"stage {self.stage.stage} has no input; call set_input_tensor before forward"
            )
        for unit in self._units:
            run = self._runner(unit)
            if unit.recompute and self.training:
                hidden_states = recomputed(
                    run, self.stage.random, hidden_states, attention_mask, rotary_pos_emb
                )
            else:
                hidden_states = run(hidden_states, attention_mask, rotary_pos_emb)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        assert hidden_states is not None
        return hidden_states

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        for layer in reversed(self.layers):
            layer.backward_dw()  # type: ignore[operator]

    def _runner(self, unit: Unit) -> Callable[..., torch.Tensor]:
        def run(hidden: torch.Tensor, mask: Any, rotation: Any) -> torch.Tensor:
            for layer in self.layers[unit.start : unit.stop]:
                output = layer(hidden, mask, rotary_pos_emb=rotation)
                # Layers written for Megatron return (hidden states, context).
                hidden = output[0] if isinstance(output, tuple) else output
            return hidden

        return run

    def _layer_specs(self, submodules: TransformerBlockSubmodules) -> list[ModuleSpec]:
        """The specs of this stage's layers."""
        specs, total = submodules.layer_specs, self.config.num_layers
        first, count = self.stage.layer_offset, self.stage.num_layers
        count = total if count is None else count
        if first + count > total:
            raise ValueError(
                f"stage {self.stage.stage} is to hold layers {first} to {first + count - 1}, but "
                f"num_layers is {total}"
            )
        if len(specs) == total:
            return specs[first : first + count]
        if len(specs) != count:
            raise ValueError(
                f"the block's spec lists {len(specs)} layers; stage {self.stage.stage} holds "
                f"{count} of num_layers {total}, so list one of these numbers of layers"
            )
        return specs


def _block_submodules(
    spec: TransformerBlockSubmodules | ModuleSpec, num_layers: int
) -> TransformerBlockSubmodules:
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    module = get_module(spec)
    if isinstance(module, type) and issubclass(module, TransformerBlock):
        return spec.submodules
    return TransformerBlockSubmodules([spec] * num_layers)
