"""What a user should know about a run before it starts: one function a notice, as in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable

from megatron.training.cli import shown

from .compatibility import IGNORED, set_rows
from .run_config import RunConfig


def notices_of(run: RunConfig) -> list[str]:
    """All notices of a run, for rank 0 to print once logging is set up."""
    messages = [notice(run) for notice in NOTICES]
    return [message for message in messages if message is not None] + ignored_flags(run)


def ignored_flags(run: RunConfig) -> list[str]:
    """Flags that change nothing, each with its reason."""
    return [
        f"{row.flag} has no effect: {row.reason}" for row in set_rows(IGNORED, dict(run.unused))
    ]


def params_dtype(run: RunConfig) -> str | None:
    return f"using torch.{run.params_dtype} for parameters ..."


def default_global_batch_size(run: RunConfig) -> str | None:
    training = run.training
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        return f"setting global batch size to {run.global_batch_size}"
    return None


def fp32_gradients_for_bf16(run: RunConfig) -> str | None:
    if run.precision.bf16 and not run.precision.accumulate_allreduce_grads_in_fp32:
        return "accumulate and all-reduce gradients in fp32 for bfloat16 data type."
    return None


def no_sequence_to_split(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and not run.sequence_parallel:
        return "--sequence-parallel has no effect: --tensor-model-parallel-size is 1"
    return None


def ramp_with_iterations(run: RunConfig) -> str | None:
    ramp = run.training.rampup_batch_size
    if ramp is not None and run.training.train_samples is None:
        return (
            f"--rampup-batch-size {shown(ramp)} with --train-iters {run.train_iters}: the ramp is "
            "applied, so the run sees fewer samples than iterations x global batch size"
        )
    return None


def batch_schedule_with_size(run: RunConfig) -> str | None:
    training = run.training
    if training.step_batch_size_schedule is not None and training.global_batch_size is not None:
        return (
            f"--step-batch-size-schedule with --global-batch-size {training.global_batch_size}: "
            "the schedule is applied and the size taken as its last value"
        )
    return None


def no_pipeline(run: RunConfig) -> str | None:
    asked, flag = run.asked_schedule
    if run.pipeline_schedule != asked:
        return f"{flag}: --pipeline-model-parallel-size is 1, so {asked} runs as a plain 1f1b"
    return None


def memory_setup_without_v(run: RunConfig) -> str | None:
    setup = run.zero_bubble.zero_bubble_v_schedule_mem_setup
    if setup != "zb" and not run.zero_bubble.zero_bubble_v_schedule:
        return (
            f"--zero-bubble-v-schedule-mem-setup {setup} has no effect without "
            "--zero-bubble-v-schedule"
        )
    return None


def pending_backward_without_effect(run: RunConfig) -> str | None:
    text, limit = run.zero_bubble.zero_bubble_max_pending_backward, run.pending_backward_limit
    if text == "auto" or run.sizes.pp == 1 or limit == float(text):
        return None
    name, flag = run.pipeline_schedule, f"--zero-bubble-max-pending-backward {text}"
    if limit is None:
        return f"{flag} has no effect: the order of {name} is not searched for a limit"
    return f"{flag} has no effect: {name} takes {limit:g} micro-batches in flight by itself"


def loss_scale_without_fp16(run: RunConfig) -> str | None:
    if run.precision.loss_scale and not run.precision.fp16:
        return f"--loss-scale {run.precision.loss_scale} has no effect without --fp16"
    return None


def uneven_layers(run: RunConfig) -> str | None:
    if len(set(run.stage_layers)) > 1:
        return f"layers per stage: {shown(run.stage_layers)}"
    return None


def no_data_source(run: RunConfig) -> str | None:
    data = run.data
    sources = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    files = (data.data_args_path, data.per_split_data_args_path)
    if data.mock_data or any(source is not None for source in (*sources, *files)):
        return None
    return "no data is named (--data-path and its kin): a GPT dataset would be synthetic"


def default_split(run: RunConfig) -> str | None:
    if run.data.data_path is not None and run.data.split is None:
        return "--split is not given: 969, 30, 1 applies"
    return None


NOTICES: tuple[Callable[[RunConfig], str | None], ...] = (
    params_dtype,
    default_global_batch_size,
    fp32_gradients_for_bf16,
    no_sequence_to_split,
    ramp_with_iterations,
    batch_schedule_with_size,
    no_pipeline,
    memory_setup_without_v,
    pending_backward_without_effect,
    loss_scale_without_fp16,
    uneven_layers,
    no_data_source,
    default_split,
)
