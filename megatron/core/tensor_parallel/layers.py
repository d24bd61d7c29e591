"""Linear layers and embeddings whose backward can be split.

Each computes the gradient of its input in backward and puts the gradient of its weight into a
store (`megatron.core.weight_grad_store`), which does it at once or in a later W. A weight's
gradient therefore never passes through autograd: the store adds it to `weight.main_grad`, or to
`weight.grad` where no gradient buffer exists. A bias's gradient is a sum over rows, cheap enough
to stay in B: autograd gets it, summed in fp32 and rounded once to the bias's precision.
"""

# S sequence, B micro-batch; /t: split over the tensor-parallel ranks.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from megatron.core.fused_weight_grad import Accumulation, linear_accumulation
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.stage_context import StageContext
from megatron.core.weight_grad_store import (
    GradTarget,
    WeightGradTask,
    accumulate_embedding_weight_grad,
)

InitMethod = Callable[[torch.Tensor], Any]


class TaskSink(Protocol):
    """Takes weight-gradient work: a WeightGradStore, or a layer's own KeptWeightGrads."""

    def put(self, task: WeightGradTask) -> None: ...


class KeptWeightGrads:
    """One layer's weight-gradient work, kept until its `backward_dw` (delay_wgrad_compute)."""

    def __init__(self) -> None:
        self._tasks: list[WeightGradTask] = []

    def put(self, task: WeightGradTask) -> None:
        self._tasks.append(task)

    def run(self) -> None:
        """Do the kept work, oldest first."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.function(*task.arguments)


class _SplitLinear(torch.autograd.Function):
    """x W^T + bias, the gradient of W left to the store."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.nn.Parameter | GradTarget,
        layer_name: str,
        store: TaskSink,
        accumulate: Accumulation,
    ) -> torch.Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.weight_grad = (target, layer_name, store, accumulate)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = rows.mm(weight).view(*grad.shape[:-1], -1) if needs_input else None
        if needs_weight:
            target, layer_name, store, accumulate = ctx.weight_grad
            # Detached: with its history, x would keep the autograd graph alive until W.
            arguments = (target, x.detach(), rows)
            store.put(WeightGradTask(layer_name, accumulate, arguments))
        return grad_input, None, rows.sum(0) if needs_bias else None, None, None, None, None


class _SplitEmbedding(torch.autograd.Function):
    """Rows of a table, the gradient of the table left to the store."""

    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, weight: torch.Tensor, layer_name: str, store: TaskSink
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.weight_grad = (weight, layer_name, store)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        (indices,) = ctx.saved_tensors
        target, layer_name, store = ctx.weight_grad
        arguments = (target, indices, grad)
        store.put(WeightGradTask(layer_name, accumulate_embedding_weight_grad, arguments))
        return None, None, None, None


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark whether and along which dim a parameter is split over tensor-parallel ranks."""
    mark(tensor, tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def set_init_method(
    parameter: torch.nn.Parameter, init_method: InitMethod, config: ModelParallelConfig
) -> None:
    """Give a parameter the init method that keyed initialisation uses, and run it if asked."""
    mark(parameter, init_method=init_method)
    if config.perform_initialization:
        with torch.no_grad():
            init_method(parameter)


class _SplitLayer(torch.nn.Module):
    """What layers with a deferred weight gradient share."""

    def __init__(self, config: ModelParallelConfig, stage: StageContext | None) -> None:
        super().__init__()
        self.config = config
        self.stage = stage if stage is not None else StageContext()
        self.layer_name = type(self).__name__  # the model replaces it by the global name
        self._kept = KeptWeightGrads() if config.delay_wgrad_compute else None
        self._sink: TaskSink = self._kept or self.stage.store

    def backward_dw(self) -> None:
        """Do the weight gradients that `delay_wgrad_compute` kept; without it none is left."""
        if self._kept is not None:
            self._kept.run()

    def _new_weight(
        self, shape: tuple[int, int], split_dim: int | None, init_method: InitMethod, stride: int
    ) -> torch.nn.Parameter:
        """This rank's part of a matrix of `shape` that is split along `split_dim`."""
        share = self._share(shape, split_dim)
        local_shape = tuple(part.stop - part.start for part in share)
        weight = torch.nn.Parameter(torch.empty(local_shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(
            weight, split_dim is not None, -1 if split_dim is None else split_dim, stride
        )
        mark(weight, full_shape=shape, shard=share, gradient_in_store=True)
        set_init_method(weight, init_method, self.config)
        return weight

    def _new_bias(self, size: int, *, is_split: bool) -> torch.nn.Parameter:
        """A bias of `size` in all; split like the rows of its matrix, or whole on each rank."""
        (share,) = self._share((size,), 0 if is_split else None)
        data = torch.empty(share.stop - share.start, dtype=self.config.params_dtype)
        bias = torch.nn.Parameter(data)
        set_tensor_model_parallel_attributes(bias, is_split, 0 if is_split else -1, 1)
        mark(bias, full_shape=(size,), shard=(share,))
        if not is_split:
            # Added to tokens that sequence parallelism spreads over ranks.
            mark(bias, sequence_parallel=self.config.sequence_parallel)
        set_init_method(bias, torch.nn.init.zeros_, self.config)
        return bias

    def _share(self, shape: tuple[int, ...], split_dim: int | None) -> tuple[slice, ...]:
        """Index of this tensor-parallel rank's contiguous part of a tensor of `shape`."""
        share = [slice(0, size) for size in shape]
        ranks, rank = self.stage.tensor_parallel_size, self.stage.tensor_parallel_rank
        if split_dim is not None:
            part, rest = divmod(shape[split_dim], ranks)
            if rest:
                raise ValueError(
                    f"dimension {split_dim} of a {type(self).__name__} of {shape} does not divide "
                    f"by tensor_model_parallel_size {ranks}; change one of the two"
                )
            if ranks > 1:
                raise ValueError(f"tensor_model_parallel_size {ranks} is not available yet; use 1")
            share[split_dim] = slice(rank * part, (rank + 1) * part)
        return tuple(share)


class _ParallelLinear(_SplitLayer):
    """What column- and row-parallel linear layers share."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    skip_bias_add: bool

    def __init__(self, config: ModelParallelConfig, stage: StageContext | None) -> None:
        super().__init__(config, stage)
        self._accumulate = linear_accumulation(allow_fused=config.gradient_accumulation_fusion)

    def _apply_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.nn.Parameter | GradTarget,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        added, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        where = (target, self.layer_name, self._sink, self._accumulate)
        return _SplitLinear.apply(x, weight, added, *where), returned


class ColumnParallelLinear(_ParallelLinear):
    """x W^T with the rows of W split over tensor-parallel ranks: weight (out/t, in).

    `skip_bias_add` returns the bias instead of adding it. With `skip_weight_param_allocation` the
    weight comes with each call; where its gradient goes is `tied_use` if that is set, else the
    weight itself. Keywords not named here are taken from Megatron callers and have no effect
    without tensor parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[torch.Tensor] | None = None,
        grad_output_buffer: list[torch.Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config, stage)
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.tied_use: GradTarget | None = None
        self.weight = None
        if not skip_weight_param_allocation:
            self.weight = self._new_weight((output_size, input_size), 0, init_method, stride)
        self.bias = self._new_bias(output_size, is_split=True) if bias else None

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(..., in) -> ((..., out/t), the bias if it was not added)."""
        if weight is None:
            weight = self.weight
            if weight is None:
                raise ValueError(
                    f"{self.layer_name} was built without a weight; pass one to forward(weight=...)"
                )
        return self._apply_linear(input_, weight, self.tied_use or weight)  # type: ignore[arg-type]


class RowParallelLinear(_ParallelLinear):
    """x W^T with the columns of W split over tensor-parallel ranks: weight (out, in/t).

    The bias is whole on each rank. Keywords as in ColumnParallelLinear.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config, stage)
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.weight = self._new_weight((output_size, input_size), 1, init_method, stride)
        self.bias = self._new_bias(output_size, is_split=False) if bias else None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(..., in/t) -> ((..., out), the bias if it was not added)."""
        return self._apply_linear(input_, self.weight, self.weight)


class SplitEmbedding(_SplitLayer):
    """A table of rows, whole on each tensor-parallel rank."""

    split_dim: int | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: ModelParallelConfig,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(config, stage)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        shape = (num_embeddings, embedding_dim)
        self.weight = self._new_weight(shape, self.split_dim, init_method, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices (...) -> rows (..., embedding_dim). IndexError on CPU for one out of range."""
        return _SplitEmbedding.apply(indices, self.weight, self.layer_name, self._sink)


class VocabParallelEmbedding(SplitEmbedding):
    """A table whose rows are split over tensor-parallel ranks: weight (vocabulary/t, width)."""

    split_dim = 0

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        stage: StageContext | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, init_method=init_method, config=config, stage=stage
        )


def mark(tensor: torch.Tensor, **attributes: Any) -> None:
    """Set the attributes by which optimizers, checkpoints and initialisation know a parameter."""
    for name, value in attributes.items():
        setattr(tensor, name, value)
