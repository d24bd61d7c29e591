"""Everything a run was asked for, in typed groups, and the values that follow from it.

The groups hold what the user wrote; `run.optimizer.lr` is `--lr`. The properties of `RunConfig`
hold what the run uses, under Megatron's names: `run.model.ffn_hidden_size` may be None,
`run.ffn_hidden_size` never is. No check changes a value in a group.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megatron.core.num_microbatches_calculator import (
    BatchSizes,
    NumMicroBatchesCalculator,
    batch_sizes_of,
)
from megatron.core.parallel_sizes import (
    DEFAULT_ORDER,
    PIPELINE_BEFORE_DATA_ORDER,
    ParallelSizes,
)
from megatron.core.pipeline_parallel.layer_split import parse_layout, split_layers
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Op
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.training.cli import ArgumentGroup

from .checkpoint import CheckpointArguments
from .data import DataArguments, TokenizerArguments, ValidationArguments
from .memory import FusionArguments, RecomputeArguments
from .model import ModelArguments
from .optimizer import LearningRateArguments, OptimizerArguments
from .parallel import ParallelArguments, PipelineArguments
from .precision import PrecisionArguments
from .reporting import LoggingArguments, ProfilingArguments
from .training import TrainingArguments
from .zero_bubble import ZeroBubbleArguments


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The groups of a run. Core code receives the group or the property it needs."""

    model: ModelArguments
    training: TrainingArguments
    optimizer: OptimizerArguments
    learning_rate: LearningRateArguments
    precision: PrecisionArguments
    parallel: ParallelArguments
    pipeline: PipelineArguments
    zero_bubble: ZeroBubbleArguments
    recompute: RecomputeArguments
    fusion: FusionArguments
    data: DataArguments
    tokenizer: TokenizerArguments
    validation: ValidationArguments
    checkpoint: CheckpointArguments
    logging: LoggingArguments
    profiling: ProfilingArguments

    world_size: int = 1
    rank: int = 0
    unused: Mapping[str, Any] = field(default_factory=dict)  # ignored and refused flags, by name
    explicit: frozenset[str] = frozenset()  # names of the values that the command line states
    notices: tuple[str, ...] = ()  # for rank 0 to print once logging is set up

    # Model

    @property
    def ffn_hidden_size(self) -> int:
        """Inner width of the MLP: 4h, or two thirds of that in multiples of 64 for SwiGLU."""
        if self.model.ffn_hidden_size is not None:
            return self.model.ffn_hidden_size
        wide = 4 * self.model.hidden_size
        return int(wide * 2 / 3 / 64) * 64 if self.model.swiglu else wide

    @property
    def kv_channels(self) -> int:
        """Width of one attention head."""
        given = self.model.kv_channels
        return self.model.hidden_size // self.model.num_attention_heads if given is None else given

    @property
    def num_query_groups(self) -> int | None:
        """Key/value heads of grouped-query attention, or None for one per query head."""
        return self.model.num_query_groups if self.model.group_query_attention else None

    @property
    def position_embedding_type(self) -> str:
        """`learned_absolute`, `rope` or `none`."""
        rotary = self.model.use_rotary_position_embeddings
        return "rope" if rotary else self.model.position_embedding_type

    @property
    def add_qkv_bias(self) -> bool:
        """Linear biases include those of the query/key/value projection."""
        return self.model.add_qkv_bias or self.model.add_bias_linear

    @property
    def attention_softmax_in_fp32(self) -> bool:
        """Scores scaled by layer number need an fp32 softmax."""
        return self.model.attention_softmax_in_fp32 or self.model.apply_query_key_layer_scaling

    @property
    def attention_backend(self) -> str:
        """Attention kernel asked for, in either spelling."""
        older = self.model.use_flash_attn and self.model.attention_backend == "auto"
        return "flash" if older else self.model.attention_backend

    @property
    def num_experts(self) -> int | None:
        """Experts of a mixture-of-experts model; None for a dense one."""
        return self.model.num_experts or None

    @property
    def bias_gelu_fusion(self) -> bool:
        """The fused bias and GELU need a bias and GELU."""
        gelu = not (self.model.swiglu or self.model.squared_relu)
        return self.fusion.bias_gelu_fusion and gelu and self.model.add_bias_linear

    @property
    def apply_rope_fusion(self) -> bool:
        """Fused rotation needs rotary positions."""
        return self.fusion.apply_rope_fusion and self.position_embedding_type == "rope"

    @property
    def params_dtype(self) -> str:
        """Name of the parameters' torch dtype."""
        return self.precision.params_dtype

    @property
    def accumulate_allreduce_grads_in_fp32(self) -> bool:
        """Always on for bf16."""
        return self.precision.accumulate_allreduce_grads_in_fp32 or self.precision.bf16

    @property
    def check_for_nan_in_loss_and_grad(self) -> bool:
        """Off with a dynamic loss scale, whose search produces overflows on purpose."""
        asked = self.precision.check_for_nan_in_loss_and_grad
        return asked and not self.precision.dynamic_loss_scale

    @property
    def recompute_granularity(self) -> str | None:
        """`full`, `selective` or None, whichever spelling asked for it."""
        return self.recompute.granularity

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """What selective recomputation recomputes."""
        return self.recompute.recompute_modules or ("core_attn",)

    # Ranks

    @cached_property
    def sizes(self) -> ParallelSizes:
        """The rank grid. Raises ValueError if the sizes do not divide the world size."""
        swapped = self.parallel.use_tp_pp_dp_mapping
        return ParallelSizes.for_world(
            self.world_size,
            tp=self.parallel.tensor_model_parallel_size,
            cp=self.parallel.context_parallel_size,
            pp=self.parallel.pipeline_model_parallel_size,
            order=PIPELINE_BEFORE_DATA_ORDER if swapped else DEFAULT_ORDER,
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks left for data parallelism."""
        return self.sizes.dp

    @property
    def sequence_parallel(self) -> bool:
        """Only with tensor parallelism is there a sequence to split."""
        return self.parallel.sequence_parallel and self.parallel.tensor_model_parallel_size > 1

    # Pipeline

    @cached_property
    def asked_schedule(self) -> tuple[str, str]:
        """The schedule asked for, and the flag that asks (empty for the default)."""
        if self.pipeline.pipeline_schedule is not None:
            return self.pipeline.pipeline_schedule, "--pipeline-schedule"
        if self.zero_bubble.schedule is not None:
            return self.zero_bubble.schedule
        chunks, flag = self.interleaving
        return ("interleaved", flag) if chunks > 1 else ("1f1b", "")

    @property
    def pipeline_schedule(self) -> str:
        """Name of the schedule that runs, or its file. One rank has no pipeline, and runs 1f1b."""
        asked, _ = self.asked_schedule
        alone = self.parallel.pipeline_model_parallel_size == 1 and self.plan_file is None
        return "1f1b" if alone else asked

    @property
    def plan_file(self) -> str | None:
        """The plan file to run, if `--pipeline-schedule` names one; names have no `.` or `/`."""
        asked = self.pipeline.pipeline_schedule
        return asked if asked is not None and ("." in asked or "/" in asked) else None

    @cached_property
    def interleaving(self) -> tuple[int, str]:
        """Chunks per rank that the flags ask for (1 without), and the flag that does.

        Raises ValueError if layers per chunk do not divide the layers of a rank.
        """
        pipeline, num_ranks = self.pipeline, self.parallel.pipeline_model_parallel_size
        if pipeline.num_virtual_stages_per_pipeline_rank is not None:
            chunks = pipeline.num_virtual_stages_per_pipeline_rank
            return chunks, "--num-virtual-stages-per-pipeline-rank"
        if pipeline.num_layers_per_virtual_pipeline_stage is not None:
            per_chunk = pipeline.num_layers_per_virtual_pipeline_stage
            if self.model.num_layers % (num_ranks * per_chunk):
                unit = num_ranks * per_chunk
                raise ValueError(
                    f"--num-layers {self.model.num_layers} is not a multiple of {num_ranks} ranks "
                    f"x --num-layers-per-virtual-pipeline-stage {per_chunk} = {unit}; change one, "
                    "or use --num-virtual-stages-per-pipeline-rank with --num-layers-per-stage"
                )
            chunks = self.model.num_layers // (num_ranks * per_chunk)
            return chunks, "--num-layers-per-virtual-pipeline-stage"
        for flag, counts in (
            ("--pipeline-model-parallel-layout", self._layout),
            ("--num-layers-per-stage", self._listed_for_interleaving),
        ):
            if counts is not None and len(counts) % num_ranks == 0:
                return len(counts) // num_ranks, flag
        named = SCHEDULES.get(pipeline.pipeline_schedule or "")
        if named is not None and named.placement == "looped" and num_ranks > 1:
            return named.default_chunks, "--pipeline-schedule"
        return 1, ""

    @cached_property
    def placement(self) -> Placement:
        """Stages on ranks, as the schedule or the plan file has them. Raises ValueError."""
        if self.plan_file is not None:
            return Plan.load(self.plan_file).placement
        num_ranks, kind = self.parallel.pipeline_model_parallel_size, self.placement_kind
        if kind == "v":
            return Placement.v_shape(num_ranks)
        return Placement.looped(num_ranks, self.interleaving[0] if kind == "looped" else 1)

    @property
    def placement_kind(self) -> Literal["plain", "looped", "v"]:
        """How the schedule places stages."""
        name = self.pipeline_schedule
        if name not in SCHEDULES:
            raise ValueError(f"the placement of schedule {name!r} is not known")
        return SCHEDULES[name].placement

    @property
    def interleave_group_size(self) -> int | None:
        """Micro-batches a chunk runs before its rank turns to the next; None: the planner's."""
        given = self.pipeline.microbatch_group_size_per_virtual_pipeline_stage
        return given or self.zero_bubble.interleave_group_size or None

    @property
    def pending_backward_limit(self) -> float | None:
        """Micro-batches of activations that a rank may hold; None: the planner's own.

        The V schedules are named for their memory, so the flag can lower theirs, not raise it:
        scripts of the fork give it along with them, where it does nothing.
        """
        name, text = self.pipeline_schedule, self.zero_bubble.zero_bubble_max_pending_backward
        if text == "auto" or name not in SCHEDULES:
            return None
        peak_of = SCHEDULES[name].peak_of
        if peak_of is not None:
            return min(float(text), peak_of(self.sizes.pp))
        return float(text) if name == "zb" else None

    @property
    def post_validation_needs(self) -> str | None:
        """A flag that makes ranks meet at the optimizer step whatever else is asked for."""
        logging = self.logging
        flags = {
            "--log-num-zeros-in-grad": logging.log_num_zeros_in_grad,
            "--log-params-norm": logging.log_params_norm,
        }
        return next((flag for flag, given in flags.items() if given), None)

    @cached_property
    def post_validation(self) -> tuple[bool, str]:
        """Whether the optimizer steps before ranks have met (design, section 6), and why."""
        zero_bubble = self.zero_bubble
        if self.parallel.pipeline_model_parallel_size == 1:
            return False, "a single pipeline rank has nobody to wait for"
        if zero_bubble.disable_optimizer_post_validation:
            return False, "--disable-optimizer-post-validation"
        if self.post_validation_needs is not None:
            return False, f"{self.post_validation_needs} makes ranks meet at every step"
        if zero_bubble.enable_optimizer_post_validation:
            return True, "--enable-optimizer-post-validation"
        if not self.splits_backward:
            return False, (
                "by default only with a schedule that splits the backward; "
                "--enable-optimizer-post-validation turns it on"
            )
        return True, "the schedule splits the backward"

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has B and W apart."""
        if self.plan_file is not None:
            return any(ins.op is Op.W for ins in Plan.load(self.plan_file).instructions())
        return SCHEDULES[self.pipeline_schedule].splits_backward

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per rank, or None for one."""
        chunks = self.placement.max_chunks
        return chunks if chunks > 1 else None

    @property
    def overlap_p2p_comm(self) -> bool:
        """Megatron's flag means something only with several chunks per rank."""
        return self.parallel.overlap_p2p_comm and self.placement.max_chunks > 1

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage in model order; they sum to `--num-layers`. Raises ValueError."""
        pipeline = self.pipeline
        first = (
            0
            if pipeline.standalone_embedding_stage
            else (pipeline.decoder_first_pipeline_num_layers)
        )
        return split_layers(
            self.model.num_layers,
            self.placement,
            first_rank_layers=first,
            last_rank_layers=pipeline.decoder_last_pipeline_num_layers,
            account_for_embedding=pipeline.account_for_embedding_in_pipeline_split,
            account_for_loss=pipeline.account_for_loss_in_pipeline_split,
            per_stage=self._layout or pipeline.num_layers_per_stage,
            allow_padding=pipeline.allow_padding_num_layers,
        )

    @cached_property
    def _layout(self) -> tuple[int, ...] | None:
        text = self.pipeline.pipeline_model_parallel_layout
        return None if text is None else parse_layout(text)

    @property
    def _listed_for_interleaving(self) -> tuple[int, ...] | None:
        """A list of layers states the number of chunks only if interleaving is named."""
        named = self.pipeline.pipeline_schedule
        looped = named in SCHEDULES and SCHEDULES[named].placement == "looped"
        return self.pipeline.num_layers_per_stage if looped else None

    # Batch size and length

    @property
    def global_batch_size(self) -> int:
        """Sequences of one iteration, at the end of any ramp."""
        training = self.training
        if training.step_batch_size_schedule is not None:
            text = training.step_batch_size_schedule
            return BatchSizes.steps(text, self.model.seq_length).final
        if training.global_batch_size is not None:
            return training.global_batch_size
        return training.micro_batch_size * self.data_parallel_size

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """Global batch size by consumed samples. Raises ValueError for an impossible ramp."""
        return batch_sizes_of(
            self.global_batch_size,
            self.training.rampup_batch_size,
            self.training.step_batch_size_schedule,
            self.model.seq_length,
        )

    def build_num_microbatches_calculator(self) -> NumMicroBatchesCalculator:
        """A new calculator, at the start of the run."""
        return NumMicroBatchesCalculator(
            self.batch_sizes, self.training.micro_batch_size, self.data_parallel_size
        )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank and iteration at the full batch size."""
        return self.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size)

    @property
    def perform_initialization(self) -> bool:
        """Whether initial weights are drawn."""
        return self.training.perform_initialization

    @property
    def train_iters(self) -> int:
        """Iterations of the run; whole ones if its length is given in samples."""
        if self.training.train_samples is not None:
            return self.batch_sizes.num_iterations(self.training.train_samples)
        return self.training.train_iters or 0

    # Schedules of learning rate and weight decay; they count samples.

    @property
    def lr_decay_iters(self) -> int | None:
        """Iterations of the decay; None if the run is counted in samples."""
        if self.training.train_samples is not None:
            return None
        return self.learning_rate.lr_decay_iters or self.training.train_iters

    @property
    def lr_decay_samples(self) -> int | None:
        """Samples of the decay; None if the run is counted in iterations."""
        if self.training.train_samples is None:
            return None
        return self.learning_rate.lr_decay_samples or self.training.train_samples

    @property
    def lr_decay_steps(self) -> int:
        """Length of warm-up and decay together, in samples."""
        samples = self.lr_decay_samples
        return (self.lr_decay_iters or 0) * self.global_batch_size if samples is None else samples

    @property
    def lr_warmup_steps(self) -> float:
        """Length of the warm-up, in samples."""
        rates = self.learning_rate
        if rates.lr_warmup_fraction is not None:
            return rates.lr_warmup_fraction * self.lr_decay_steps
        return self._in_samples(rates.lr_warmup_iters, rates.lr_warmup_samples) or 0

    @property
    def wsd_decay_steps(self) -> int | None:
        """Length of the tail of WSD, in samples."""
        rates = self.learning_rate
        return self._in_samples(rates.lr_wsd_decay_iters, rates.lr_wsd_decay_samples)

    @property
    def wd_incr_steps(self) -> int:
        """Samples over which weight decay goes from its first to its last value."""
        return self._in_samples(self.training.train_iters, self.training.train_samples) or 0

    @property
    def start_weight_decay(self) -> float:
        """First weight decay."""
        given = self.optimizer.start_weight_decay
        return self.optimizer.weight_decay if given is None else given

    @property
    def end_weight_decay(self) -> float:
        """Last weight decay."""
        given = self.optimizer.end_weight_decay
        return self.optimizer.weight_decay if given is None else given

    def _in_samples(self, iters: int | None, samples: int | None) -> int | None:
        """A length in samples, from whichever unit the run is counted in."""
        if self.training.train_samples is not None:
            return samples
        return None if iters is None else iters * self.global_batch_size

    # Data and checkpoints

    @property
    def dataloader_type(self) -> Literal["single", "cyclic", "external"]:
        """`single` unless asked otherwise."""
        return self.data.dataloader_type or "single"

    @property
    def no_load_optim(self) -> bool:
        """A run that only evaluates needs no optimizer state."""
        return self.checkpoint.no_load_optim or self.training.skip_train


GROUPS: dict[str, type[ArgumentGroup]] = {
    name: type_
    for name, type_ in typing.get_type_hints(RunConfig).items()
    if isinstance(type_, type) and issubclass(type_, ArgumentGroup)
}
