"""Floating-point operations of one training sequence, and the throughput that follows.

Letters: S sequence length, L layers, H hidden size, F ffn size, V padded vocabulary, Q width of all
query heads, K width of all key (or value) heads. A multiplication of (a, b) by (b, c) counts 2abc
operations; forward, input gradient and weight gradient make that 6abc. Only matrix products count.
Recomputation is never counted: these are the operations the model needs, not those a run spends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the model as it was built (not as some flag asked for it)."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads; equal to num_attention_heads without GQA
    kv_channels: int  # width of one head
    padded_vocab_size: int
    seq_length: int
    swiglu: bool

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name != "swiglu" and size < 1:
                raise ValueError(f"{name} is {size}; a model size is at least 1")

    @property
    def query_width(self) -> int:
        return self.kv_channels * self.num_attention_heads

    @property
    def key_width(self) -> int:
        return self.kv_channels * self.num_query_groups

    @property
    def num_mlp_matrices(self) -> int:
        """(H, F) or (F, H) matrices of one MLP: SwiGLU has a gate besides up and down."""
        return 3 if self.swiglu else 2


def causal_flops_per_sample(sizes: ModelSizes) -> int:
    """Current Megatron-LM's count: causal attention, so half of the scores.

    S*(6HF*(3 if swiglu else 2)*L + 6(H(Q+2K) + QH)*L + 6HV) + S^2 * 6QL.
    """
    return _matrix_flops(sizes) + _full_attention_flops(sizes) // 2


def full_attention_flops_per_sample(sizes: ModelSizes) -> int:
    """The zero-bubble fork's (mid-2024 Megatron-LM's) count: all S x S scores.

    12*S*L*H^2 * ((1 + groups/heads + S/H) * Q/H + (F/H)*(1.5 if swiglu else 1) + V/(2LH)), here in
    whole numbers.
    """
    return _matrix_flops(sizes) + _full_attention_flops(sizes)


@dataclass(frozen=True)
class FlopsFormula:
    """A way to count, and the words that say which one a printed number was made with."""

    flops_per_sample: Callable[[ModelSizes], int]
    counts: str


FORMULAS = {
    "causal": FlopsFormula(
        causal_flops_per_sample, "causal attention (half of the scores), as current Megatron-LM"
    ),
    "full": FlopsFormula(
        full_attention_flops_per_sample,
        "full attention (all scores), as mid-2024 Megatron-LM and the zero-bubble paper's code",
    ),
}


def flops_formula(name: str) -> FlopsFormula:
    """The formula of that name; a ValueError lists the names."""
    if name not in FORMULAS:
        raise ValueError(f"no FLOPs formula is named {name!r}; choose from {', '.join(FORMULAS)}")
    return FORMULAS[name]


def throughput_notice(name: str, sizes: ModelSizes) -> str:
    """One line for the start of a run: what the printed TFLOP/s will count."""
    formula = flops_formula(name)
    tera = formula.flops_per_sample(sizes) / 1e12
    return (
        f"throughput counts {tera:.4g} TFLOP per sequence with {formula.counts}; "
        f"{sizes.num_layers} layers, ffn {sizes.ffn_hidden_size} in {sizes.num_mlp_matrices} "
        f"matrices, {sizes.num_attention_heads} heads on {sizes.num_query_groups} key/value heads, "
        f"padded vocabulary {sizes.padded_vocab_size}; recomputation is not counted"
    )


def tflops_per_gpu(flops: float, seconds: float, world_size: int) -> float:
    """TFLOP/s of one rank, when all ranks together did `flops` in `seconds`.

    Not a number if no time passed.
    """
    return flops / (seconds * 1e12 * world_size) if seconds > 0 else float("nan")


def _matrix_flops(sizes: ModelSizes) -> int:
    """All products with a weight matrix: query/key/value, projection, MLP, head."""
    h, q, k = sizes.hidden_size, sizes.query_width, sizes.key_width
    attention = h * (q + 2 * k) + q * h
    mlp = h * sizes.ffn_hidden_size * sizes.num_mlp_matrices
    head = h * sizes.padded_vocab_size
    return 6 * sizes.seq_length * (sizes.num_layers * (attention + mlp) + head)


def _full_attention_flops(sizes: ModelSizes) -> int:
    """Scores (S, Q) x (Q, S) and their product with the values (S, S) x (S, Q)."""
    return 2 * 6 * sizes.num_layers * sizes.query_width * sizes.seq_length**2
