"""Rules between groups of flags: each function returns what is wrong, or None.

A message names the flags, their values, the rule and the mend. All messages are shown together.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable

from megatron.core.num_microbatches_calculator import check_batch_size
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate
from megatron.training.config.compatibility import REFUSED, set_rows, written
from megatron.training.config.not_yet import NOT_YET
from megatron.training.config.run_config import RunConfig

Rule = Callable[[RunConfig], str | None]


def broken_rules(run: RunConfig, *, already_broken: bool = False) -> list[str]:
    """Messages of every rule that `run` breaks.

    A rule may rest on another (the layers of a stage on the ranks, these on the world size). One
    that cannot be evaluated is left out if there is already a message, which then is the cause.
    """
    messages: list[str] = []
    for rule in (*RULES, *(row.check for row in NOT_YET)):
        try:
            message = rule(run)
        except (ArithmeticError, TypeError, ValueError):
            if not (messages or already_broken):
                raise
            continue
        if message is not None:
            messages.append(message)
    return list(dict.fromkeys([*messages, *refused_flags(run)]))


def refused_flags(run: RunConfig) -> list[str]:
    """Messages for flags of other code bases that cannot be honoured."""
    unused = dict(run.unused)
    return [
        f"{written(row.flag, unused[row.dest])} is refused: {row.reason}"
        for row in set_rows(REFUSED, unused)
    ]


# Ranks


def ranks_fill_the_world(run: RunConfig) -> str | None:
    sizes = {
        "--tensor-model-parallel-size": run.parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": run.parallel.pipeline_model_parallel_size,
        "--context-parallel-size": run.parallel.context_parallel_size,
    }
    model = 1
    for size in sizes.values():
        model *= size
    if run.world_size % model == 0:
        return None
    product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    return (
        f"{product} = {model} does not divide the world size {run.world_size}; start a multiple "
        f"of {model} processes or change a size"
    )


def tensor_ranks_divide_widths(run: RunConfig) -> str | None:
    tp, model = run.parallel.tensor_model_parallel_size, run.model
    widths = {
        f"--num-attention-heads {model.num_attention_heads}": model.num_attention_heads,
        f"--hidden-size {model.hidden_size}": model.hidden_size,
        f"the MLP width {run.ffn_hidden_size} (--ffn-hidden-size)": run.ffn_hidden_size,
    }
    for name, width in widths.items():
        if width % tp:
            return f"{name} is not a multiple of --tensor-model-parallel-size {tp}; change one"
    groups = run.num_query_groups
    if groups is not None and groups % tp and tp % groups:
        return (
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide "
            "the other; change one"
        )
    return None


def sequence_divides(run: RunConfig) -> str | None:
    seq, cp, tp = (
        run.model.seq_length,
        run.parallel.context_parallel_size,
        run.parallel.tensor_model_parallel_size,
    )
    if cp > 1 and seq % (2 * cp):
        return (
            f"--seq-length {seq} is not a multiple of 2 x --context-parallel-size {cp} = {2 * cp}; "
            "change one"
        )
    if run.sequence_parallel and seq % tp:
        return (
            f"--seq-length {seq} is not a multiple of --tensor-model-parallel-size {tp}, as "
            "--sequence-parallel needs; change one"
        )
    return None


def experts_divide(run: RunConfig) -> str | None:
    experts, ep = run.num_experts, run.parallel.expert_model_parallel_size
    if ep > 1 and experts is None:
        return f"--expert-model-parallel-size {ep} needs --num-experts; add it or use 1"
    if experts is not None and experts % ep:
        return (
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {ep}; "
            "change one"
        )
    tp = run.parallel.tensor_model_parallel_size
    if experts is not None and tp > 1 and not run.sequence_parallel:
        return (
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs "
            "--sequence-parallel; add it"
        )
    return None


def overlapped_gather_needs_shards(run: RunConfig) -> str | None:
    if run.parallel.overlap_param_gather and not run.optimizer.use_distributed_optimizer:
        return "--overlap-param-gather needs --use-distributed-optimizer; add it"
    return None


# Pipeline


def chunks_are_whole(run: RunConfig) -> str | None:
    try:
        assert run.interleaving[0] >= 1, "a rank holds a chunk"
    except ValueError as error:
        return str(error)
    return None


def schedule_exists(run: RunConfig) -> str | None:
    asked, flag = run.asked_schedule
    if run.plan_file is not None:
        return _plan_file_problem(run.plan_file, run.sizes.pp)
    if asked in SCHEDULES:
        return None
    close = difflib.get_close_matches(asked, SCHEDULES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    asking = f"{flag} {asked}" if flag == "--pipeline-schedule" else f"{flag} (schedule {asked})"
    return (
        f"{asking} is not available in this version; choose from {', '.join(SCHEDULES)}, or name "
        f"a plan file{hint}"
    )


def _plan_file_problem(path: str, num_ranks: int) -> str | None:
    """Every rank reads the file: its placement decides what the rank builds."""
    if not os.path.isfile(path):
        return f"--pipeline-schedule {path}: there is no such file"
    try:
        plan = Plan.load(path)
        validate(plan, training=True)
    except ScheduleError as error:
        return f"--pipeline-schedule {path}: {error}"
    if plan.num_ranks != num_ranks:
        return (
            f"--pipeline-schedule {path} is a plan for {plan.num_ranks} pipeline ranks, but "
            f"--pipeline-model-parallel-size is {num_ranks}; make them equal"
        )
    return None


def one_schedule_is_named(run: RunConfig) -> str | None:
    named, fork = run.pipeline.pipeline_schedule, run.zero_bubble.schedule
    if named is not None and fork is not None and fork[0] != named:
        return (
            f"--pipeline-schedule {named} and {fork[1]} (schedule {fork[0]}) name two schedules; "
            "give one"
        )
    return None


def chunks_fit_the_schedule(run: RunConfig) -> str | None:
    chunks, chunk_flag = run.interleaving
    asked, flag = run.asked_schedule
    kind = SCHEDULES[asked].placement if asked in SCHEDULES else None
    by_rank = run.parallel.pipeline_model_parallel_size
    if chunks > 1 and by_rank == 1:
        return (
            f"{chunk_flag} needs --pipeline-model-parallel-size above 1; raise it or drop the flag"
        )
    if chunks > 1 and (kind in ("plain", "v") or flag.startswith("--enable-zero")):
        own = "2 chunks" if kind == "v" else "1 chunk"
        return (
            f"{chunk_flag} asks for {chunks} chunks per rank, but schedule {asked} ({flag}) has "
            f"{own}; drop one of the flags"
        )
    return None


def layers_divide(run: RunConfig) -> str | None:
    known = run.plan_file is None and run.pipeline_schedule in SCHEDULES
    if not known and not os.path.isfile(run.plan_file or ""):
        return None
    try:
        assert sum(run.stage_layers) == run.model.num_layers, "no layer is dropped"
    except ValueError as error:
        return str(error)
    return None


def microbatch_groups_fill_the_pipeline(run: RunConfig) -> str | None:
    size = run.pipeline.microbatch_group_size_per_virtual_pipeline_stage
    num_ranks = run.parallel.pipeline_model_parallel_size
    if size is not None and size < num_ranks:
        return (
            f"--microbatch-group-size-per-virtual-pipeline-stage {size} is below "
            f"--pipeline-model-parallel-size {num_ranks}; raise it to {num_ranks} or more"
        )
    return None


# Batch size, length, learning rate


def batch_sizes_are_readable(run: RunConfig) -> str | None:
    assert run.data_parallel_size, "sizes are judged by a rule of their own"
    try:
        final = run.batch_sizes.final
    except ValueError as error:
        return str(error)
    given = run.training.global_batch_size
    if given is not None and given != final:
        return (
            f"--step-batch-size-schedule ends with {final}, but --global-batch-size is {given}; "
            "let them agree, or drop --global-batch-size"
        )
    return None


def batches_divide(run: RunConfig) -> str | None:
    constant = run.batch_sizes.is_constant
    ramp = "--rampup-batch-size" if run.training.rampup_batch_size else "--step-batch-size-schedule"
    for segment in run.batch_sizes.segments:
        try:
            check_batch_size(
                segment.batch_size,
                run.training.micro_batch_size,
                run.data_parallel_size,
                "--global-batch-size" if constant else f"{ramp}: batch size",
            )
        except ValueError as error:
            return str(error)
    return None


def lengths_share_a_unit(run: RunConfig) -> str | None:
    rates = run.learning_rate
    in_iters = {
        "--lr-decay-iters": rates.lr_decay_iters,
        "--lr-warmup-iters": rates.lr_warmup_iters,
        "--lr-wsd-decay-iters": rates.lr_wsd_decay_iters,
    }
    in_samples = {
        "--lr-decay-samples": rates.lr_decay_samples,
        "--lr-warmup-samples": rates.lr_warmup_samples,
        "--lr-wsd-decay-samples": rates.lr_wsd_decay_samples,
    }
    by_samples = run.training.train_samples is not None
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    wrong = [f"{flag} {n}" for flag, n in (in_iters if by_samples else in_samples).items() if n]
    if not wrong or (run.training.train_iters is None and not by_samples):
        return None
    return (
        f"{', '.join(wrong)}: the run is counted by --train-{unit}, so give this in {unit} "
        f"(--lr-...-{unit} instead of --lr-...-{other})"
    )


def learning_rate_is_given(run: RunConfig) -> str | None:
    if run.learning_rate.lr is None and not run.training.skip_train:
        return "--lr is not given; training needs a learning rate"
    return None


def warmup_ends_before_decay(run: RunConfig) -> str | None:
    warmup, decay = run.lr_warmup_steps, run.lr_decay_steps
    if run.train_iters and warmup >= max(decay, 1):
        return (
            f"the warm-up of {warmup:g} samples (--lr-warmup-...) does not end before the decay at "
            f"{decay} samples (--lr-decay-..., or the length of the run); shorten the warm-up"
        )
    return None


def tail_fits_the_decay(run: RunConfig) -> str | None:
    if run.learning_rate.lr_decay_style != "WSD" or not run.train_iters:
        return None
    tail = run.wsd_decay_steps
    if tail is None:
        return "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    if tail > run.lr_decay_steps:
        return (
            f"the WSD tail of {tail} samples (--lr-wsd-decay-...) is longer than the decay of "
            f"{run.lr_decay_steps} samples; shorten it"
        )
    return None


# Precision, memory, reports


def fp32_residual_needs_16_bits(run: RunConfig) -> str | None:
    if run.model.fp32_residual_connection and run.params_dtype == "float32":
        return "--fp32-residual-connection needs --fp16 or --bf16; in fp32 it is always so, drop it"
    return None


def fp16_loss_needs_fp16(run: RunConfig) -> str | None:
    if run.unused.get("fp16_lm_cross_entropy") and not run.precision.fp16:
        return "--fp16-lm-cross-entropy needs --fp16; add it or drop the flag"
    return None


def saved_activations_can_be_sharded(run: RunConfig) -> str | None:
    if not run.recompute.distribute_saved_activations:
        return None
    if run.parallel.tensor_model_parallel_size == 1:
        return "--distribute-saved-activations needs --tensor-model-parallel-size above 1; drop it"
    if run.sequence_parallel:
        return (
            "--distribute-saved-activations and --sequence-parallel exclude each other (saved "
            "activations are sharded already); drop the first"
        )
    return None


def early_step_needs_no_meeting(run: RunConfig) -> str | None:
    flag = run.post_validation_needs
    if flag is None or not run.zero_bubble.enable_optimizer_post_validation:
        return None
    return (
        f"--enable-optimizer-post-validation excludes {flag}, which makes ranks meet at every "
        "optimizer step; drop one"
    )


def deterministic_excludes_fused_loss(run: RunConfig) -> str | None:
    if run.fusion.deterministic_mode and run.unused.get("cross_entropy_loss_fusion"):
        return "--deterministic-mode excludes --cross-entropy-loss-fusion; drop one"
    return None


def progress_needs_a_directory(run: RunConfig) -> str | None:
    if run.logging.log_progress and run.checkpoint.save is None:
        return "--log-progress writes progress.txt into the --save directory; add --save"
    return None


RULES: tuple[Rule, ...] = (
    ranks_fill_the_world,
    tensor_ranks_divide_widths,
    sequence_divides,
    experts_divide,
    overlapped_gather_needs_shards,
    chunks_are_whole,
    schedule_exists,
    one_schedule_is_named,
    chunks_fit_the_schedule,
    layers_divide,
    microbatch_groups_fill_the_pipeline,
    batch_sizes_are_readable,
    batches_divide,
    lengths_share_a_unit,
    learning_rate_is_given,
    warmup_ends_before_decay,
    tail_fits_the_decay,
    fp32_residual_needs_16_bits,
    fp16_loss_needs_fp16,
    saved_activations_can_be_sharded,
    early_step_needs_no_meeting,
    deterministic_excludes_fused_loss,
    progress_needs_a_directory,
)
