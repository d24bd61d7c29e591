"""Number formats and loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments(ArgumentGroup):
    """Precision and loss scaling."""

    fp16: bool = arg(False, "Train in half precision with loss scaling.")
    bf16: bool = arg(False, "Train in bfloat16.")
    loss_scale: float | None = arg(
        None, "Constant loss scale for --fp16. Without it, or 0: dynamic.", at_least=0
    )
    initial_loss_scale: float = arg(2.0**32, "First dynamic loss scale.", at_least=0)
    min_loss_scale: float = arg(1.0, "Smallest dynamic loss scale.", at_least=0)
    loss_scale_window: float = arg(
        1000.0, "Clean iterations in a row after which the scale doubles.", at_least=1
    )
    hysteresis: int = arg(2, "Overflows it takes before the scale is halved.", at_least=1)
    accumulate_allreduce_grads_in_fp32: bool = arg(
        False,
        "Accumulate and reduce gradients in fp32. Main gradients are always fp32 here; the flag "
        "is on by itself for --bf16.",
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True,
        "Go on when the loss or a gradient is not finite; with dynamic loss scale always so.",
    )
    calculate_per_token_loss: bool = arg(
        False,
        "Divide by the number of tokens of the whole batch instead of micro-batch by micro-batch.",
    )

    @property
    def params_dtype(self) -> Literal["float16", "bfloat16", "float32"]:
        """Name of the parameters' torch dtype."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return self.fp16 and not self.loss_scale

    def problems(self) -> Iterator[str]:
        """One format."""
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 exclude each other; give one"
