"""Builds this rank's stages, their runtime, the optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    PostValidation,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.zerobubble.runtime.channels import PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    Channel,
    all_channels,
    lower,
)
from megatron.core.stage_context import StageContext
from megatron.training.banner import parameter_line
from megatron.training.memory_report import ParameterCounts, count_parameters
from megatron.training.printing import print_line
from megatron.training.session import Session

logger = logging.getLogger(__name__)

ModelProvider = Callable[..., torch.nn.Module]


@dataclass
class Trainer:
    """What training steps act on."""

    session: Session
    stages: list[StageCompute]
    runtime: PipelineRuntime
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    parameter_counts: ParameterCounts  # of the whole model, as built
    post_validation: PostValidation | None = None  # None: ranks meet at the optimizer step

    @property
    def model(self) -> list[DistributedDataParallel]:
        """This rank's stages in chunk order (Megatron's `model` list)."""
        return [stage.module for stage in self.stages]


def build_trainer(session: Session, model_provider: ModelProvider) -> Trainer:
    """Stages, runtime, optimizer and scheduler of this rank."""
    logger.info("building GPT model ...")
    stages = get_model(session, model_provider)
    runtime = _build_runtime(session, stages)
    model = [stage.module for stage in stages]
    optimizer = _build_optimizer(session, model)
    for chunk in model:
        config = chunk.config
        config.pipeline_runtime = runtime
        config.timers = session.timers
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = _finalizer(session)
    scheduler = _build_scheduler(session, optimizer)
    counts = count_parameters(
        (named for chunk in model for named in chunk.module.named_parameters()),
        tensor_parallel_rank=session.groups.position.tp,
        group=session.groups.model,
    )
    early = None
    if session.run.post_validation[0]:
        early = _post_validation(session, runtime, optimizer)
    return Trainer(session, stages, runtime, optimizer, scheduler, counts, early)


def get_model(session: Session, model_provider: ModelProvider) -> list[StageCompute]:
    """This rank's stages with weights drawn by global name; total layer count and ties checked."""
    contexts = session.pipeline.stage_contexts(session.groups, session.run.training.seed)
    modules = [_provide(model_provider, context) for context in contexts]
    _share_embedding(modules, contexts)
    for module in modules:
        module.to(device=session.device.torch_device, dtype=session.params_dtype)
        if session.run.perform_initialization:
            module.initialize_weights(session.run.training.seed)  # type: ignore[operator]
    _check_layer_total(session, modules)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=session.run.parallel.overlap_grad_reduce,
        use_distributed_optimizer=session.run.optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=session.run.check_for_nan_in_loss_and_grad,
    )
    stages = []
    for module, context in zip(modules, contexts, strict=True):
        wrapped = DistributedDataParallel(
            module.config, ddp_config, module, data_parallel_group=session.groups.dp
        )
        stages.append(StageCompute(wrapped, context))
    _report_parameters(session, modules)
    _check_weights(session, stages)
    return stages


def _provide(model_provider: ModelProvider, context: StageContext) -> torch.nn.Module:
    """Call the user's provider with what it accepts; a pipeline needs `stage`."""
    accepted = inspect.signature(model_provider).parameters
    arguments: dict[str, Any] = {
        "pre_process": context.is_first,
        "post_process": context.is_last,
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    if "stage" in accepted or takes_any:
        arguments["stage"] = context
    elif context.num_stages > 1:
        raise ValueError(
            "model_provider does not accept `stage`, so it cannot build one stage of a pipeline; "
            "add the parameter and pass it on to GPTModel(stage=...)"
        )
    if "vp_stage" in accepted:
        arguments["vp_stage"] = context.stage
    return model_provider(**arguments)


def _share_embedding(modules: list[torch.nn.Module], contexts: list[StageContext]) -> None:
    """A tied head on the embedding's rank, in another chunk, uses the embedding's parameter."""
    first, last = modules[0], modules[-1]
    tied = getattr(last, "share_embeddings_and_output_weights", False)
    if tied and first is not last and contexts[0].is_first and contexts[-1].is_last:
        last.attach_shared_embedding(first.shared_embedding_or_output_weight())  # type: ignore[operator]


def _check_layer_total(session: Session, modules: list[torch.nn.Module]) -> None:
    """The layers built over all pipeline ranks are those the command line asked for."""
    built = torch.tensor(
        sum(len(getattr(getattr(m, "decoder", None), "layers", ())) for m in modules),
        device=session.device.torch_device,
    )
    if session.groups.pp is not None:
        dist.all_reduce(built, group=session.groups.pp)
    expected = session.run.model.num_layers
    if int(built) != expected:
        raise ValueError(
            f"{int(built)} transformer layers were built, but --num-layers is {expected}; "
            "the model provider must build the layers of the stage it is given"
        )


def _check_weights(session: Session, stages: list[StageCompute]) -> None:
    """No trainable matrix is all zero, and tied copies are equal, or the run stops."""
    if not session.run.perform_initialization:
        return
    for stage in stages:
        module: Any = stage.module.module
        for local_name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
                raise ValueError(
                    f"weight {module.global_parameter_name(local_name)} is all zero after the "
                    "model was built; it would never learn"
                )
    check_tied_copies(session, stages)


def check_tied_copies(session: Session, stages: list[StageCompute]) -> None:
    """Raise ValueError unless a tied embedding and its copy on another rank agree. Collective."""
    group = session.groups.embedding
    copies = [s for s in stages if s.context.tied_head == "copy"]
    ends = [s for s in copies if s.context.is_first or s.context.is_last]
    if group is None or not ends or session.run.model.untie_embeddings_and_output_weights:
        return
    weight = ends[0].module.module.shared_embedding_or_output_weight()  # type: ignore[operator]
    other = weight.detach().clone()
    dist.broadcast(other, dist.get_global_rank(group, 0), group=group)
    if not torch.equal(other, weight):
        raise ValueError(
            "the tied embedding and output weights differ between the first and the last stage"
        )


def _report_parameters(session: Session, modules: list[torch.nn.Module]) -> None:
    position = session.groups.position
    if position.dp == 0:
        count = sum(p.numel() for p in {p for m in modules for p in m.parameters()})
        line = parameter_line(
            tensor_rank=position.tp, pipeline_rank=position.pp, num_parameters=count
        )
        print_line(line)


def _build_runtime(session: Session, stages: list[StageCompute]) -> PipelineRuntime:
    run, groups = session.run, session.groups

    def channels() -> tuple[Channel, ...]:
        return all_channels(lower(session.pipeline.plan_for(run.num_microbatches)))

    return PipelineRuntime(
        stages=stages,
        groups=PipelineGroups.for_channels(run.sizes.groups("pp"), groups.pp, channels),
        plan_for=session.pipeline.plan_for,
        hidden_size=run.model.hidden_size,
        pipeline_dtype=stages[0].module.config.pipeline_dtype,
        device=session.device.torch_device,
        data_parallel_size=groups.sizes.dp,
        data_parallel_group=groups.dp,
        world_group=groups.world,
        overlap_grad_reduce=run.parallel.overlap_grad_reduce,
        per_token_loss=run.precision.calculate_per_token_loss,
        check_message_identity=run.pipeline.debug_pipeline_messages,
    )


def _finalizer(session: Session) -> Callable[..., None]:
    groups = session.groups

    def finalize(
        model: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None
    ) -> None:
        finalize_model_grads(model, num_tokens, embedding_group=groups.embedding)

    return finalize


def _build_optimizer(session: Session, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    run = session.run
    config = OptimizerConfig(
        optimizer=run.optimizer.optimizer,
        lr=run.learning_rate.lr,
        min_lr=run.learning_rate.min_lr,
        decoupled_lr=run.learning_rate.decoupled_lr,
        decoupled_min_lr=run.learning_rate.decoupled_min_lr,
        weight_decay=run.optimizer.weight_decay,
        fp16=run.precision.fp16,
        bf16=run.precision.bf16,
        params_dtype=session.params_dtype,
        loss_scale=run.precision.loss_scale,
        initial_loss_scale=run.precision.initial_loss_scale,
        min_loss_scale=run.precision.min_loss_scale,
        loss_scale_window=run.precision.loss_scale_window,
        hysteresis=run.precision.hysteresis,
        adam_beta1=run.optimizer.adam_beta1,
        adam_beta2=run.optimizer.adam_beta2,
        adam_eps=run.optimizer.adam_eps,
        sgd_momentum=run.optimizer.sgd_momentum,
        use_distributed_optimizer=run.optimizer.use_distributed_optimizer,
        clip_grad=run.optimizer.clip_grad,
        log_num_zeros_in_grad=run.logging.log_num_zeros_in_grad,
    )
    groups = session.groups
    sharded = run.optimizer.use_distributed_optimizer and groups.sizes.dp > 1
    return get_megatron_optimizer(
        config,
        model,
        norm_group=groups.world if sharded else groups.model,
        data_parallel_group=groups.dp,
    )


def _post_validation(
    session: Session, runtime: PipelineRuntime, optimizer: MegatronOptimizer
) -> PostValidation:
    pipeline = runtime.groups.control
    assert pipeline is not None, "post-validation is for pipelines"
    sharded = session.run.optimizer.use_distributed_optimizer
    return PostValidation(optimizer, pipeline, session.groups.dp if sharded else None)


def _build_scheduler(session: Session, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over samples (spec section 3.3)."""
    run = session.run
    logger.info("> learning rate decay style: %s", run.learning_rate.lr_decay_style)
    decay = run.lr_decay_steps
    if run.training.skip_train:  # a run that only evaluates may have no length
        decay = max(decay, int(run.lr_warmup_steps) + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=run.learning_rate.lr_warmup_init,
        max_lr=run.learning_rate.lr or 0.0,
        min_lr=run.learning_rate.min_lr,
        lr_warmup_steps=int(run.lr_warmup_steps),
        lr_decay_steps=decay,
        lr_decay_style=run.learning_rate.lr_decay_style,
        start_wd=run.start_weight_decay,
        end_wd=run.end_weight_decay,
        wd_incr_steps=run.wd_incr_steps,
        wd_incr_style=run.optimizer.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=run.learning_rate.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=run.learning_rate.override_opt_param_scheduler,
        wsd_decay_steps=run.wsd_decay_steps,
        lr_wsd_decay_style=run.learning_rate.lr_wsd_decay_style,
    )
