"""What a run gives the layers of one virtual stage: its share of the model, and shared objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron.core.keyed_random import RandomContext
from megatron.core.weight_grad_store import WeightGradStore


@dataclass
class StageContext:
    """One virtual stage. The default is the whole model in one process, backward not split."""

    stage: int = 0
    num_stages: int = 1
    layer_offset: int = 0  # global number (from 0) of the stage's first transformer layer
    num_layers: int | None = None  # None: all of them
    # A tied head lives with the embedding ("shared": one parameter, two uses) or on another rank
    # ("copy": a parameter of its own that is kept equal).
    tied_head: Literal["shared", "copy"] = "shared"
    store: WeightGradStore = field(default_factory=WeightGradStore)
    random: RandomContext = field(default_factory=RandomContext)
    tensor_parallel_group: torch.distributed.ProcessGroup | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1
