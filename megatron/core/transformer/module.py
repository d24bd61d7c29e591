"""Base class of modules that have a config."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(torch.nn.Module):
    """A torch module with a `config`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state dict to save; wrappers that add a prefix override it."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)
