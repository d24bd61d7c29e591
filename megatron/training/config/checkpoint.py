"""Saving and loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class CheckpointArguments(ArgumentGroup):
    """Checkpoints."""

    save: str | None = arg(None, "Directory to write checkpoints to.")
    load: str | None = arg(None, "Directory to read the newest checkpoint from.")
    save_interval: int | None = arg(
        None, "Iterations between checkpoints; needed with --save.", at_least=1
    )
    save_retain_interval: int | None = arg(
        None, "Keep only checkpoints at multiples of this (and the newest).", at_least=1
    )
    no_save_optim: bool = arg(False, "Leave optimizer state out of checkpoints.")
    no_load_optim: bool = arg(False, "Do not read optimizer state.")
    finetune: bool = arg(False, "Read weights only and start at iteration 0.")
    pretrained_checkpoint: str | None = arg(
        None, "Read weights from here, as with --finetune, when --load holds no checkpoint."
    )
    ckpt_step: int | None = arg(None, "Iteration to load. Without it: the newest.", at_least=0)
    use_checkpoint_args: bool = arg(
        False, "Take the shape of the model from the checkpoint's own arguments."
    )
    use_tokenizer_model_from_checkpoint_args: bool = arg(
        True, "With --use-checkpoint-args: keep the tokenizer of the command line."
    )
    exit_on_missing_checkpoint: bool = arg(
        False, "Stop when --load holds no checkpoint instead of starting from random weights."
    )
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = arg(
        "torch_dist", "Format to write; torch_dist loads under any layout."
    )
    async_save: bool = arg(False, "Write checkpoints in the background.")

    def problems(self) -> Iterator[str]:
        """Intervals for what is saved; formats that exist here."""
        if self.save is not None and self.save_interval is None:
            yield f"--save {self.save} needs --save-interval; add it"
        retain, interval = self.save_retain_interval, self.save_interval
        if retain is not None and (interval is None or retain % interval):
            yield (
                f"--save-retain-interval {retain} is not a multiple of --save-interval {interval}; "
                "change one"
            )
        if self.ckpt_format != "torch_dist":
            yield f"--ckpt-format {self.ckpt_format} is not supported; use torch_dist"
        if self.use_checkpoint_args and self.load is None and self.pretrained_checkpoint is None:
            yield "--use-checkpoint-args needs --load; add it"
