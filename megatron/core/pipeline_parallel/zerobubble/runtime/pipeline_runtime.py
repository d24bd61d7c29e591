"""Plans and runs iterations on this rank: what `get_forward_backward_func` returns is one of these.

plan_for(m) --rank 0--> broadcast --> validate --> lower --> Executor, once per iteration
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.runtime.channels import Channels, PipelineGroups
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import (
    ForwardStep,
    LossScaling,
    StageCompute,
)
from megatron.core.pipeline_parallel.zerobubble.runtime.executor import (
    Executor,
    Iteration,
    StepTimes,
    Validation,
)
from megatron.core.pipeline_parallel.zerobubble.runtime.replay import ReplayIterator
from megatron.core.pipeline_parallel.zerobubble.runtime.token_count import TokenCount
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import (
    RankProgram,
    lower,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.reduction import state_reductions
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.validation import (
    add_validation,
    without_validation,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.planners.no_pipeline import (
    plan_forward_only,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate


class _Variant(NamedTuple):
    """Which form of a plan runs."""

    forward_only: bool
    validating: bool = False  # with a PV on every rank


class PipelineRuntime:
    """This rank's stages, and the plans they run.

    `plan_for(num_microbatches)` makes the training plan; it is called on rank 0 of the job and
    broadcast over `world_group`, so that all ranks run the same plan. Evaluation runs the
    forward-only plan of the same placement.
    """

    def __init__(
        self,
        *,
        stages: Sequence[StageCompute],
        groups: PipelineGroups,
        plan_for: Callable[[int], Plan],
        hidden_size: int,
        pipeline_dtype: torch.dtype,
        device: torch.device,
        data_parallel_size: int = 1,
        data_parallel_group: dist.ProcessGroup | None = None,
        world_group: dist.ProcessGroup | None = None,
        overlap_grad_reduce: bool = False,
        per_token_loss: bool = False,
        check_message_identity: bool = False,
    ) -> None:
        self._stages = {stage.context.stage: stage for stage in stages}
        self.groups = groups
        self._plan_for = plan_for
        self._hidden_size = hidden_size
        self._pipeline_dtype, self._device = pipeline_dtype, device
        self._data_parallel_size = data_parallel_size
        self._data_parallel_group = data_parallel_group
        self._world_group = world_group
        self._overlap_grad_reduce = overlap_grad_reduce
        self._per_token_loss = per_token_loss
        self._check_message_identity = check_message_identity
        self._programs: dict[tuple[int, _Variant], RankProgram] = {}
        self._placement_plan: Plan | None = None
        self._loss_rank = 0  # known with the first program
        self.times = StepTimes()  # of the last iteration

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any] | None] | None,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        validation: Validation | None = None,
    ) -> list[Any]:
        """Run one iteration; the loss dicts of its micro-batches on the last stage, [] elsewhere.

        Megatron's signature (spec section 6.3). `model` is what the runtime was built with.
        `validation` checks the optimizer step before this iteration, during its warm-up
        (arXiv:2401.10241, section 4); every rank of the pipeline gives one, or none does.
        """
        config = self._any_config()
        tokens = self._token_count() if self._per_token_loss and not forward_only else None
        iteration = Iteration(
            forward_step=forward_step_func,
            data_iterators=self._iterators_by_stage(data_iterator),
            num_microbatches=num_microbatches,
            scaling=LossScaling(
                divisor=num_microbatches * self._data_parallel_size,
                per_token=self._per_token_loss,
                grad_scale=None if forward_only else getattr(config, "grad_scale_func", None),
            ),
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            on_gradients_ready=self._start_grad_sync if self._overlap_grad_reduce else None,
            on_losses=tokens.tell if tokens is not None else None,
            validation=validation,
        )
        shape = (decoder_seq_length or seq_length, micro_batch_size, self._hidden_size)
        try:
            with torch.set_grad_enabled(not forward_only):
                executor = self._execute(iteration, shape)
        except BaseException:
            self._discard()
            raise
        self.times = executor.times
        if not forward_only:
            self._finalize(config, tokens)
        return [record.reported for record in executor.losses]

    def _execute(self, iteration: Iteration, shape: Sequence[int]) -> Executor:
        """Run the plan; run it again from the start if it finds that the weights were wrong."""
        channels = Channels(
            self.groups,
            shape=shape,
            dtype=self._pipeline_dtype,
            device=self._device,
            check_identity=self._check_message_identity,
        )
        m = iteration.num_microbatches
        executor = Executor(self._stages, channels, iteration)
        if iteration.validation is None:
            executor.run(self._program(m, _Variant(iteration.forward_only)))
            return executor
        replays = {
            stage: ReplayIterator(source)
            for stage, source in iteration.data_iterators.items()
            if source is not None
        }
        iteration.data_iterators.update(replays)
        program = self._program(m, _Variant(forward_only=False, validating=True))
        if executor.run(program):
            return executor
        channels.start_again(program)
        self._discard()
        for replay in replays.values():
            replay.start_again()
        again = Executor(self._stages, channels, iteration, executor.times)
        again.run(self._program(m, _Variant(forward_only=False)))
        return again

    def plan(self, num_microbatches: int, *, forward_only: bool = False) -> Plan:
        """The plan for this many micro-batches, the same on every rank. Collective."""
        if forward_only:
            if self._placement_plan is None:
                self._placement_plan = self._agreed(num_microbatches)
            return plan_forward_only(self._placement_plan.placement, num_microbatches)
        return self._agreed(num_microbatches)

    def _program(self, num_microbatches: int, variant: _Variant) -> RankProgram:
        key = (num_microbatches, variant)
        if key not in self._programs:
            plan = self.plan(num_microbatches, forward_only=variant.forward_only)
            plan = add_validation(plan) if variant.validating else without_validation(plan)
            validate(plan, training=not variant.forward_only)
            self._loss_rank = plan.placement.rank_of(plan.placement.last_stage)
            self._programs[key] = lower(state_reductions(plan))[self.groups.rank]
        return self._programs[key]

    def _agreed(self, num_microbatches: int) -> Plan:
        """Rank 0's plan, on every rank; if rank 0 cannot plan, every rank raises its error."""
        if self._world_group is None or dist.get_world_size(self._world_group) == 1:
            return self._plan_for(num_microbatches)
        box: list[Any] = [None]
        if dist.get_rank(self._world_group) == 0:
            try:
                box[0] = self._plan_for(num_microbatches)
            except Exception as error:
                box[0] = error
        dist.broadcast_object_list(box, group_src=0, group=self._world_group)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def _iterators_by_stage(self, data_iterator: Any) -> dict[int, Iterator[Any] | None]:
        """One iterator for a single stage, or a list with one per chunk, in chunk order."""
        if isinstance(data_iterator, (list, tuple)):
            return dict(zip(self._stages, data_iterator, strict=True))
        assert len(self._stages) == 1, "a rank with several stages needs a list of data iterators"
        return dict.fromkeys(self._stages, data_iterator)

    def _token_count(self) -> TokenCount:
        return TokenCount(self.groups, self._data_parallel_group, self._device)

    def _start_grad_sync(self, stage: int) -> None:
        self._stages[stage].module.start_grad_sync()

    def _finalize(self, config: Any, tokens: TokenCount | None) -> None:
        num_tokens = tokens.get(self._loss_rank) if tokens is not None else None
        finalize = getattr(config, "finalize_model_grads_func", None)
        if finalize is not None:
            finalize([stage.module for stage in self._stages.values()], num_tokens)

    def _discard(self) -> None:
        for stage in self._stages.values():
            stage.discard()

    def _any_config(self) -> Any:
        return next(iter(self._stages.values())).module.config
