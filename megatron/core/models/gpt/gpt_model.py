"""GPT and Llama language models, whole or one pipeline stage of them."""

# S sequence, B micro-batch, H hidden, V vocabulary; /t: split over the tensor-parallel ranks.

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from megatron.core.keyed_random import initialize_keyed
from megatron.core.models.gpt.embedding import LanguageModelEmbedding, check_ids
from megatron.core.stage_context import StageContext
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, mark
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.weight_grad_store import GradTarget

PositionEmbeddingType = Literal["learned_absolute", "rope", "none"]

EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"
OUTPUT_WEIGHT = "output_layer.weight"
_LAYERS = "decoder.layers."


class GPTModel(MegatronModule):
    """Embedding (`pre_process`), a stage's layers, final norm, head and loss (`post_process`).

    `transformer_layer_spec` is the spec of one layer or of a block. `vocab_size` is the padded
    size. With `share_embeddings_and_output_weights` the head uses the embedding's weight: its
    parameter if this rank holds it (`stage.tied_head == "shared"`), else an equal copy. A rotary
    model numbers positions from 0 and does not read position ids: only their differences count.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: PositionEmbeddingType = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        seq_len_interpolation_factor: float | None = None,
        *,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config)
        if position_embedding_type not in get_args(PositionEmbeddingType):
            raise ValueError(
                f"position_embedding_type is {position_embedding_type!r}; "
                f"choose from {', '.join(get_args(PositionEmbeddingType))}"
            )
        self.stage = stage if stage is not None else StageContext()
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.fp16_lm_cross_entropy = fp16_lm_cross_entropy
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, max_sequence_length, position_embedding_type, self.stage
            )
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                config.head_dim,
                rotary_percent,
                config.rotary_interleaved,
                seq_len_interpolation_factor,
                rotary_base,
                rope_scaling,
                rope_scaling_factor,
            )
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            stage=self.stage,
        )
        if post_process:
            self.output_layer = self._build_output_layer()
        self._mark_ends()
        if self._head_is_shared and pre_process:
            self.attach_shared_embedding(self.embedding.word_embeddings.weight)
        for name, module in self.named_modules():
            if hasattr(module, "layer_name"):
                module.layer_name = self._global_name(name)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[Any] | None) -> None:
        """What the previous stage sent (S, B, H), alone or as a list of one; None on the first."""
        sent = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.decoder.set_input_tensor(sent)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inference_params: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """On the last stage the loss of each token (B, S), or without labels logits (B, S, V/t).

        Other stages give hidden states (S, B, H). Ids, position ids and labels are (B, S);
        `decoder_input` (S, B, H) takes the embedding's place. No mask means causal.
        """
        if inference_params is not None or packed_seq_params is not None:
            raise ValueError("inference_params and packed_seq_params are not supported; leave both")
        hidden = decoder_input
        if hidden is None and self.pre_process:
            hidden = self.embedding(input_ids, position_ids)
        rotation = self._rotation(hidden)
        hidden = self.decoder(
            hidden, attention_mask, rotary_pos_emb=rotation, **(extra_block_kwargs or {})
        )
        if not self.post_process:
            return hidden
        logits, _ = self.output_layer(hidden, weight=self._tied_weight())  # (S, B, V/t)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """labels (B, S), logits (S, B, V/t) -> the loss of each token (B, S), in fp32."""
        in_fp32 = not self.fp16_lm_cross_entropy
        try:
            loss = vocab_parallel_cross_entropy(logits, labels.t(), in_fp32=in_fp32)
        except RuntimeError:
            check_ids(labels, self.vocab_size, "label", "the vocabulary")
            raise
        return loss.t().contiguous()

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """The word embedding's weight, else the head's, else None."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        if self.post_process:
            return self._tied_weight() if self._head_is_shared else self.output_layer.weight
        return None

    def attach_shared_embedding(self, weight: torch.nn.Parameter) -> None:
        """Let the tied head use `weight`, the embedding's parameter on this rank.

        The head's share of its gradient goes to `output_layer.tied_use`.
        """
        self.output_layer.tied_use = GradTarget(weight)

    def global_parameter_name(self, local_name: str) -> str:
        """The parameter's name in the whole model: layers count from 0 over all stages.

        A tied head's copy is called as what it is a copy of.
        """
        if local_name == OUTPUT_WEIGHT and self.share_embeddings_and_output_weights:
            return EMBEDDING_WEIGHT
        return self._global_name(local_name)

    def initialize_weights(self, seed: int) -> None:
        """Draw all weights anew, each keyed by its global name: alike for every split into stages.

        Raises ValueError for a parameter without an `init_method`.
        """
        for local_name, parameter in self.named_parameters():
            name = self.global_parameter_name(local_name)
            if not hasattr(parameter, "init_method"):
                raise ValueError(
                    f"parameter {name} has no init_method, so its initial values would depend on "
                    "the rank; set the attribute where the parameter is made"
                )
            initialize_keyed(parameter, seed, name)

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept."""
        if self.post_process:
            self.output_layer.backward_dw()
        self.decoder.backward_dw()
        if self.pre_process:
            self.embedding.backward_dw()

    @property
    def _head_is_shared(self) -> bool:
        tied = self.post_process and self.share_embeddings_and_output_weights
        return tied and self.stage.tied_head == "shared"

    def _build_output_layer(self) -> ColumnParallelLinear:
        assert self.config.init_method is not None, "derived in the config's __post_init__"
        return ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=self._head_is_shared,
            stage=self.stage,
        )

    def _mark_ends(self) -> None:
        """Attributes by which optimizers and checkpoints know embedding and head."""
        ends = list(self.embedding.parameters()) if self.pre_process else []
        tied = [self.embedding.word_embeddings.weight] if self.pre_process else []
        if self.post_process and self.output_layer.weight is not None:
            ends.append(self.output_layer.weight)
            tied.append(self.output_layer.weight)
            if self.share_embeddings_and_output_weights:
                mark(self.output_layer.weight, shared=True)  # a copy: not counted a second time
        for parameter in ends:
            mark(parameter, is_embedding_or_output_parameter=True)
        for parameter in tied if self.share_embeddings_and_output_weights else ():
            mark(parameter, shared_embedding=True)

    def _tied_weight(self) -> torch.nn.Parameter | None:
        """The weight to hand to the head; None if it has its own."""
        if not self._head_is_shared:
            return None
        if self.output_layer.tied_use is None:
            raise ValueError(
                "the tied head has no weight yet; hand it the embedding's with "
                "attach_shared_embedding, or build the stage with tied_head='copy'"
            )
        return self.output_layer.tied_use.parameter

    def _rotation(self, hidden: torch.Tensor | None) -> Any:
        if self.rotary_pos_emb is None:
            return None
        hidden = self.decoder.input_tensor if hidden is None else hidden
        if hidden is None:
            return None  # the decoder says what is missing
        return self.rotary_pos_emb(hidden.shape[0], hidden.device, self.config.params_dtype)

    def _global_name(self, local_name: str) -> str:
        if not local_name.startswith(_LAYERS):
            return local_name
        index, _, rest = local_name.removeprefix(_LAYERS).partition(".")
        return f"{_LAYERS}{int(index) + self.stage.layer_offset}.{rest}"
