"""Logs and profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.training.cli import ArgumentGroup, arg


@dataclass(frozen=True, kw_only=True)
class LoggingArguments(ArgumentGroup):
    """Logging."""

    log_interval: int = arg(100, "Iterations between log lines.", at_least=1)
    log_throughput: bool = arg(False, "Show model TFLOP/s per GPU in the log line.")
    log_step_breakdown: bool = arg(
        False,
        "Append to each line what the logging rank's time went into: compute by F, B, W, waiting "
        "for a neighbour, communication, optimizer, data.",
    )
    log_params_norm: bool = arg(False, "Show the norm of the weights.")
    log_num_zeros_in_grad: bool = arg(False, "Show how many gradients are zero.")
    log_progress: bool = arg(False, "Append to progress.txt in the --save directory.")
    timing_log_level: Literal[0, 1, 2] = arg(
        0, "Detail of timers: coarse, per phase, per operation."
    )
    timing_log_option: Literal["max", "minmax", "all"] = arg(
        "minmax", "Over ranks show the maximum, minimum and maximum, or all."
    )
    barrier_with_L1_time: bool = arg(
        True,
        "Do not wait for all ranks around level 1 timers.",
        flags=("--no-barrier-with-level-1-timing", "--disable-barrier-with-level-1-timing"),
    )
    metrics_file: str | None = arg(
        None, "Write the figures of every iteration to this file, one JSON object per line."
    )
    tensorboard_dir: str | None = arg(None, "Directory of TensorBoard events.")
    tensorboard_log_interval: int = arg(1, "Iterations between TensorBoard points.", at_least=1)
    tensorboard_queue_size: int = arg(1000, "Pending TensorBoard events.", at_least=1)
    log_timers_to_tensorboard: bool = arg(False, "Write timers to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = arg(True, "Do not write the loss scale to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = arg(
        False, "Write validation perplexity to TensorBoard."
    )
    log_memory_to_tensorboard: bool = arg(False, "Write memory figures to TensorBoard.")
    log_world_size_to_tensorboard: bool = arg(False, "Write the world size to TensorBoard.")
    log_batch_size_to_tensorboard: bool = arg(False, "Write the batch size to TensorBoard.")
    log_learning_rate_to_tensorboard: bool = arg(
        True,
        "Do not write the learning rate to TensorBoard (the first spelling is the fork's).",
        flags=("--no-log-learnig-rate-to-tensorboard", "--no-log-learning-rate-to-tensorboard"),
    )
    log_memory_interval: int | None = arg(None, "Iterations between memory reports.", at_least=1)
    wandb_project: str | None = arg(None, "Log to this Weights & Biases project.")
    wandb_entity: str | None = arg(None, "Weights & Biases team.")
    wandb_exp_name: str | None = arg(None, "Name of the run; needed with --wandb-project.")
    wandb_save_dir: str | None = arg(None, "Local Weights & Biases directory.")
    logging_level: int | None = arg(None, "Level of Python's logging, e.g. 10 for debug.")

    def problems(self) -> Iterator[str]:
        """A name for a Weights & Biases run."""
        if self.wandb_project and not self.wandb_exp_name:
            yield f"--wandb-project {self.wandb_project} needs --wandb-exp-name; add it"


@dataclass(frozen=True, kw_only=True)
class ProfilingArguments(ArgumentGroup):
    """Profiling."""

    profile: bool = arg(False, "Profile the iterations of --profile-step-start and -end.")
    use_pytorch_profiler: bool = arg(False, "Profile with torch.profiler instead of nsys.")
    profile_step_start: int = arg(10, "First profiled iteration.", at_least=0)
    profile_step_end: int = arg(12, "Iteration before which profiling ends.", at_least=0)
    profile_ranks: tuple[int, ...] = arg((), "Ranks to profile; none given: rank 0.", at_least=0)
    trace_pipeline: str | None = arg(
        None, "Write when every pipeline instruction ran to this file."
    )

    def problems(self) -> Iterator[str]:
        """A window that exists."""
        if self.profile and self.profile_step_start >= self.profile_step_end:
            yield (
                f"--profile-step-start {self.profile_step_start} is not before "
                f"--profile-step-end {self.profile_step_end}; nothing would be profiled"
            )
