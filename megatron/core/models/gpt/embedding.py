"""Token and position embeddings of the first stage."""

# S sequence, B micro-batch, H hidden.

from __future__ import annotations

import torch
from torch.nn import functional

from megatron.core.keyed_random import EMBEDDING_LAYER
from megatron.core.stage_context import StageContext
from megatron.core.tensor_parallel.layers import SplitEmbedding, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """Word embeddings, learned positions if asked for, dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        assert config.init_method is not None, "derived in the config's __post_init__"
        self.stage = stage if stage is not None else StageContext()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            config=config,
            stage=self.stage,
        )
        self.position_embeddings: SplitEmbedding | None = None
        if position_embedding_type == "learned_absolute":
            self.position_embeddings = SplitEmbedding(
                max_sequence_length,
                config.hidden_size,
                init_method=config.init_method,
                config=config,
                stage=self.stage,
            )

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Ids (B, S) -> hidden states (S, B, H). Without position ids: 0 .. S - 1.

        An id outside its table raises ValueError on CPU. On CUDA torch's device-side assertion
        ends the run instead: looking at ids there would make the host wait for the device.
        """
        hidden = _look_up(self.word_embeddings, input_ids, "token", "the vocabulary")
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            hidden = hidden + _look_up(
                self.position_embeddings, position_ids, "position", "max_sequence_length"
            )
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        dropout = self.config.hidden_dropout
        if self.training and dropout > 0.0:
            with self.stage.random.dropout(hidden, EMBEDDING_LAYER, "embedding"):
                hidden = functional.dropout(hidden, dropout)
        return hidden

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        self.word_embeddings.backward_dw()
        if self.position_embeddings is not None:
            self.position_embeddings.backward_dw()


def _look_up(table: SplitEmbedding, ids: torch.Tensor, kind: str, limit: str) -> torch.Tensor:
    """ids (B, S) -> (S, B, H); the ids are transposed, which is cheaper than the rows."""
    try:
        return table(ids.t())
    except IndexError:
        check_ids(ids, table.num_embeddings, kind, limit)
        raise


def check_ids(ids: torch.Tensor, size: int, kind: str, limit: str) -> None:
    """ValueError naming the first of ids (B, S) outside [0, size). Makes the host wait."""
    outside = ((ids < 0) | (ids >= size)).nonzero()
    if len(outside):
        sample, position = outside[0].tolist()
        raise ValueError(
            f"{kind} id {int(ids[sample, position])} in sample {sample} of the micro-batch, "
            f"position {position}, is outside [0, {size}); {limit} is {size}, so the data and "
            "the model do not fit together"
        )
