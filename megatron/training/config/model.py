"""Shape of the transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import REQUIRED, ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class ModelArguments(ArgumentGroup):
    """Model architecture."""

    num_layers: int = arg(REQUIRED, "Number of transformer layers.", at_least=1)
    hidden_size: int = arg(REQUIRED, "Width of the residual stream.", at_least=1)
    num_attention_heads: int = arg(REQUIRED, "Number of query heads.", at_least=1)
    seq_length: int = arg(REQUIRED, "Tokens of one training sequence.", at_least=1)
    max_position_embeddings: int = arg(
        REQUIRED, "Rows of the position table; at least --seq-length.", at_least=1
    )
    ffn_hidden_size: int | None = arg(
        None,
        "Inner width of the MLP. Without it: 4 x hidden size, or with --swiglu two thirds of that, "
        "rounded down to a multiple of 64.",
        at_least=1,
    )
    kv_channels: int | None = arg(
        None, "Width of one attention head. Without it: hidden size / heads.", at_least=1
    )
    group_query_attention: bool = arg(False, "Let several query heads share one key/value head.")
    num_query_groups: int = arg(
        1, "Number of key/value heads; read only with --group-query-attention.", at_least=1
    )
    position_embedding_type: Literal[
        "learned_absolute", "rope", "none", "yarn", "mrope", "relative"
    ] = arg(
        "learned_absolute",
        "How positions enter the model: a learned table, rotary embeddings (rope), or not at all.",
    )
    use_rotary_position_embeddings: bool = arg(
        False, "Older spelling of --position-embedding-type rope."
    )
    add_position_embedding: bool = arg(
        True,
        "Keep no learned position table; positions must then be rope or none.",
        flags=("--no-position-embedding", "--disable-position-embedding"),
    )
    rotary_base: int = arg(10000, "Base (theta) of the rotary frequencies.", at_least=1)
    rotary_percent: float = arg(
        1.0, "Share of each head's channels that is rotated.", at_least=0, at_most=1
    )
    rotary_interleaved: bool = arg(
        False, "Rotate neighbouring channels as pairs instead of the two halves of a head."
    )
    rotary_seq_len_interpolation_factor: int | None = arg(
        None, "Divide positions by this number before rotating.", at_least=1
    )
    use_rope_scaling: bool = arg(False, "Rescale rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = arg(8.0, "Factor of --use-rope-scaling.", at_least=1)
    normalization: Literal["LayerNorm", "RMSNorm"] = arg("LayerNorm", "Kind of every norm.")
    norm_epsilon: float = arg(1e-5, "Epsilon inside the norms.", at_least=0)
    apply_layernorm_1p: bool = arg(False, "Store norm weights as their distance from one.")
    swiglu: bool = arg(False, "Gated MLP with SiLU.")
    squared_relu: bool = arg(False, "Squared ReLU in the MLP.")
    add_bias_linear: bool = arg(
        True,
        "Leave the biases of linear layers out.",
        flags=("--disable-bias-linear", "--no-bias-linear"),
    )
    add_qkv_bias: bool = arg(
        False, "Bias in the query/key/value projection even with --disable-bias-linear."
    )
    untie_embeddings_and_output_weights: bool = arg(
        False, "Give the output layer its own matrix instead of the embedding's."
    )
    qk_layernorm: bool = arg(False, "Normalise queries and keys per head.")
    apply_query_key_layer_scaling: bool = arg(
        False, "Divide attention scores by the layer number; computes the softmax in fp32."
    )
    attention_softmax_in_fp32: bool = arg(False, "Compute scores and softmax in fp32.")
    attention_dropout: float = arg(
        0.1, "Dropout on attention probabilities.", at_least=0, at_most=1
    )
    hidden_dropout: float = arg(0.1, "Dropout on the residual branches.", at_least=0, at_most=1)
    init_method_xavier_uniform: bool = arg(
        False, "Draw initial weights uniformly by Xavier's rule, except those into the residual."
    )
    init_method_std: float = arg(0.02, "Standard deviation of the initial weights.", at_least=0)
    transformer_impl: Literal["local", "transformer_engine"] = arg(
        "transformer_engine",
        "Layers of this repository, or of Transformer Engine; without that package: local.",
    )
    spec: tuple[str, ...] | None = arg(
        None, "MODULE NAME of a layer specification to build instead of the usual one.", nargs="*"
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = arg(
        "auto", "Attention kernel to use."
    )
    use_flash_attn: bool = arg(False, "Older spelling of --attention-backend flash.")
    fp32_residual_connection: bool = arg(
        False, "Keep the residual stream in fp32; for --fp16 and --bf16."
    )
    num_experts: int | None = arg(
        None, "Number of experts of a mixture-of-experts model; 0 is a dense model.", at_least=0
    )

    def problems(self) -> Iterator[str]:
        """Shapes that do not fit together, activations that exclude each other."""
        yield from self._position_problems()
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name) == 1:
                yield f"--{name.replace('_', '-')} 1 would drop everything; give less than 1"
        if self.swiglu and self.squared_relu:
            yield "--swiglu and --squared-relu are two activations; give one"
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.kv_channels is None and heads and self.hidden_size and self.hidden_size % heads:
            yield (
                f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                f"{heads}; change one, or give --kv-channels"
            )
        if self.group_query_attention and heads and groups and heads % groups:
            yield (
                f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use "
                "a divisor of it"
            )

    def _position_problems(self) -> Iterator[str]:
        length, positions = self.seq_length, self.max_position_embeddings
        kind = self.position_embedding_type
        if length and positions and positions < length:
            yield (
                f"--max-position-embeddings {positions} is below --seq-length {length}; raise it "
                f"to {length} or more"
            )
        if kind in ("yarn", "mrope", "relative"):
            yield (
                f"--position-embedding-type {kind} is not supported; use learned_absolute, rope "
                "or none"
            )
        if self.use_rotary_position_embeddings and kind == "none":
            yield (
                "--use-rotary-position-embeddings and --position-embedding-type none contradict "
                "each other; give one"
            )
        learned = kind == "learned_absolute" and not self.use_rotary_position_embeddings
        if learned and not self.add_position_embedding:
            yield (
                "--no-position-embedding takes the learned position table away; add "
                "--position-embedding-type rope (or none)"
            )
