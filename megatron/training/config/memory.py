"""Recomputation, fused kernels, and memory housekeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class RecomputeArguments(ArgumentGroup):
    """Recomputation of activations."""

    recompute_activations: bool = arg(False, "Older spelling of --recompute-granularity selective.")
    recompute_granularity: Literal["full", "selective"] | None = arg(
        None, "Recompute whole layers (full) or only the attention core (selective)."
    )
    recompute_method: Literal["uniform", "block", "chunk"] | None = arg(
        None,
        "With full: all layers in units (uniform), or the first layers of each stage (block).",
    )
    recompute_num_layers: int | None = arg(
        None,
        "With full: layers per unit (uniform) or recomputed layers per stage (block).",
        at_least=1,
    )
    recompute_modules: tuple[str, ...] | None = arg(
        None, "With selective: what to recompute, of core_attn and mlp. Without it: core_attn."
    )
    distribute_saved_activations: bool = arg(
        False, "With full: shard the saved layer inputs over tensor-parallel ranks."
    )

    @property
    def granularity(self) -> Literal["full", "selective"] | None:
        """What is recomputed, whichever spelling asked for it."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    def problems(self) -> Iterator[str]:
        """What each granularity needs and excludes."""
        method, num_layers = self.recompute_method, self.recompute_num_layers
        if self.recompute_activations and self.recompute_granularity == "full":
            yield (
                "--recompute-activations means --recompute-granularity selective, but full is "
                "given; drop one"
            )
        elif self.granularity == "full" and (method is None or num_layers is None):
            yield (
                "--recompute-granularity full needs --recompute-method (uniform or block) and "
                "--recompute-num-layers; add what is missing"
            )
        elif self.granularity != "full" and method is not None:
            yield (
                f"--recompute-method {method} is only for --recompute-granularity full; "
                "drop it or choose full"
            )
        if method == "chunk":
            yield "--recompute-method chunk is not supported; use uniform or block"
        others = set(self.recompute_modules or ()) - {"core_attn", "mlp"}
        if others:
            yield (
                f"--recompute-modules {' '.join(sorted(others))}: only core_attn and mlp can be "
                "recomputed by themselves; use --recompute-granularity full for more"
            )
        if self.distribute_saved_activations and self.granularity != "full":
            yield "--distribute-saved-activations needs --recompute-granularity full"


@dataclass(frozen=True, kw_only=True)
class FusionArguments(ArgumentGroup):
    """Fused kernels, memory and determinism."""

    gradient_accumulation_fusion: bool = arg(
        True,
        "Do not add weight gradients to the main gradients inside the matrix product. The fused "
        "kernel is used only where it is installed.",
    )
    masked_softmax_fusion: bool = arg(True, "Compute scale, mask and softmax separately.")
    bias_gelu_fusion: bool = arg(True, "Add the bias before GELU separately.")
    bias_swiglu_fusion: bool = arg(True, "Add the bias before SwiGLU separately.")
    bias_dropout_fusion: bool = arg(True, "Add bias, dropout and residual separately.")
    apply_rope_fusion: bool = arg(
        True,
        "Rotate with plain tensor operations.",
        flags=("--no-rope-fusion", "--disable-rope-fusion"),
    )
    manual_gc: bool = arg(
        False, "Collect Python garbage only between iterations, on all ranks at once."
    )
    manual_gc_interval: int = arg(
        0, "Iterations between collections with --manual-gc; 0 never collects.", at_least=0
    )
    manual_gc_eval: bool = arg(True, "With --manual-gc: do not collect around evaluation.")
    deterministic_mode: bool = arg(False, "Use only kernels whose results repeat bit for bit.")
