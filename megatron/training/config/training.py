"""Batch size, length of the run, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.training.cli import REQUIRED, ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(ArgumentGroup):
    """Batch size, length of the run, and how it ends."""

    micro_batch_size: int = arg(
        REQUIRED, "Sequences that one data-parallel rank processes at a time.", at_least=1
    )
    global_batch_size: int | None = arg(
        None,
        "Sequences of one iteration over all ranks. Without it: one micro-batch per data-parallel "
        "rank.",
        at_least=1,
    )
    rampup_batch_size: tuple[int, ...] | None = arg(
        None,
        "START INCREMENT SAMPLES: begin with a smaller global batch and grow it in equal steps "
        "while this many samples are consumed.",
        nargs=3,
        metavar="N",
    )
    step_batch_size_schedule: str | None = arg(
        None,
        'Global batch size by consumed tokens, e.g. "0:16 2.4B:320 4.8B:624"; suffixes K, M, B, T.',
    )
    train_iters: int | None = arg(None, "Number of iterations to train.", at_least=0)
    train_samples: int | None = arg(
        None, "Number of sequences to train on, instead of --train-iters.", at_least=0
    )
    exit_interval: int | None = arg(
        None, "Stop (and save) when the iteration is a multiple of this.", at_least=1
    )
    exit_duration_in_mins: int | None = arg(
        None, "Stop (and save) after this many minutes.", at_least=1
    )
    exit_signal_handler: bool = arg(False, "Save and stop on SIGTERM.")
    skip_train: bool = arg(False, "Only evaluate; the optimizer is then not loaded.")
    perform_initialization: bool = arg(
        True,
        "Do not draw initial weights; for runs that load a checkpoint.",
        flags=("--no-initialization", "--disable-initialization"),
    )
    seed: int = arg(1234, "Seed of weights, dropout and data order.", at_least=1)

    def problems(self) -> Iterator[str]:
        """The length must be stated once; so must the way in which the batch size changes."""
        if self.train_iters is not None and self.train_samples is not None:
            yield (
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} both "
                "state the length of the run; give one"
            )
        if self.train_iters is None and self.train_samples is None and not self.skip_train:
            yield "the length of the run is not given; add --train-iters or --train-samples"
