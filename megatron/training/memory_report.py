"""What memory a run should take, from the model and plan it built, and what it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.memory import peak_memory
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan

_MEGABYTE = 2**20
_WEIGHT_AND_GRADIENT_BYTES = 6  # bf16 weight, fp32 gradient
_OPTIMIZER_BYTES = 12  # fp32 weight, two moments


def memory_line(rank: int, iteration: int, device: Device) -> str:
    """The device memory of this process; on CPU its resident set."""
    figures = "".join(f" | {name}: {size:.2f}" for name, size in device.memory_mb().items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB){figures}"


class MemoryReporter:
    """Says when the memory line is due: after the first logged step, then every `interval`
    iterations (`--log-memory-interval`), if given."""

    def __init__(self, interval: int | None = None) -> None:
        self._interval = interval
        self._reported = False

    def is_due(self, iteration: int, *, logged: bool) -> bool:
        """Whether to report after this step; `logged` is whether its training line was due."""
        first = logged and not self._reported
        self._reported = self._reported or logged
        again = self._interval is not None and iteration % self._interval == 0
        return first or again


def memory_scalars(device: Device) -> dict[str, float]:
    """`--log-memory-to-tensorboard`: bytes on the device, and on CUDA the number of blocks."""
    size = {name: megabytes * _MEGABYTE for name, megabytes in device.memory_mb().items()}
    scalars = {
        "mem-reserved-bytes": size["reserved"],
        "mem-allocated-bytes": size["allocated"],
        "mem-max-allocated-bytes": size["max allocated"],
    }
    if device.is_cuda:
        stats = torch.accelerator.memory_stats(device.torch_device)
        scalars["mem-allocated-count"] = stats["allocation.all.current"]
    return scalars


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the whole model as built (each once, tied ones too), and of one rank."""

    transformer_layers: int  # decoder.*, the final norm included
    embedding_layers: int  # embedding and head
    most_loaded_shard: int  # all that the fullest rank holds, copies included

    @property
    def total(self) -> int:
        return self.transformer_layers + self.embedding_layers


def count_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    tensor_parallel_rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> ParameterCounts:
    """Count what the ranks of `group` built; None is this process alone. Collective.

    `group` holds the tensor- and pipeline-parallel ranks of one model. A parameter that is not
    split over tensor-parallel ranks counts on the first of them, the tied copy of the embedding
    nowhere.
    """
    distinct = {id(parameter): (name, parameter) for name, parameter in named_parameters}
    own = [0, 0, 0]
    for name, parameter in distinct.values():
        own[2] += parameter.numel()
        is_split = getattr(parameter, "tensor_model_parallel", False)
        is_tied_copy = getattr(parameter, "shared", False)
        if (is_split or tensor_parallel_rank == 0) and not is_tied_copy:
            own[0 if "decoder." in name else 1] += parameter.numel()
    gathered = [own]
    if group is not None:
        gathered = [own] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
    layers, embeddings, shards = zip(*gathered, strict=True)
    return ParameterCounts(sum(layers), sum(embeddings), max(shards))


def peak_layers_in_flight(plan: Plan, layers_per_stage: Sequence[int]) -> int:
    """The most layer activations (layers times micro-batches) any rank holds under the plan.

    The activations of a stage count from its F to its BW, or to its W where backward is split.
    """
    layers = tuple(map(float, layers_per_stage))
    held = dataclasses.replace(
        Costs.uniform(plan.placement), held_f_to_b=layers, held_b_to_w=layers
    )
    return round(max(peak_memory(plan, held)))


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """What the activation estimate needs (arXiv:2205.05198, section 5: sequence parallel,
    attention scores not kept)."""

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    ffn_hidden_size: int
    tensor_parallel_size: int
    peak_layers_in_flight: int

    @property
    def bytes_per_layer(self) -> float:
        """Of one layer and micro-batch on one rank: s*b*h*(18 + 4*ffn/h) / TP."""
        width = 18 * self.hidden_size + 4 * self.ffn_hidden_size
        return self.seq_length * self.micro_batch_size * width / self.tensor_parallel_size

    @property
    def bytes(self) -> float:
        return self.bytes_per_layer * self.peak_layers_in_flight


def weight_and_optimizer_bytes(
    num_parameters: int, *, distributed_optimizer_size: int = 1
) -> float:
    """18 bytes a parameter; with a distributed optimizer over DP ranks 6 + 12/DP."""
    each = _WEIGHT_AND_GRADIENT_BYTES + _OPTIMIZER_BYTES / distributed_optimizer_size
    return num_parameters * each


def theoretical_report(
    counts: ParameterCounts,
    *,
    distributed_optimizer_size: int = 1,
    activations: ActivationSizes | None = None,
    undo_bytes_per_parameter: float | None = None,
) -> list[str]:
    """The lines of the estimate.

    `activations` is None where its formula does not hold: with full recompute, or with tensor but
    not sequence parallel. `undo_bytes_per_parameter` is what post-validation copies of each
    parameter that a rank steps, None without it.
    """
    lines = [
        f"Number of parameters in transformer layers in billions:  "
        f"{counts.transformer_layers / 1e9:.2f}",
        f"Number of parameters in embedding layers in billions: "
        f"{counts.embedding_layers / 1e9:.2f}",
        f"Total number of parameters in billions: {counts.total / 1e9:.2f}",
        f"Number of parameters in most loaded shard in billions: "
        f"{counts.most_loaded_shard / 1e9:.4f}",
    ]
    weights = weight_and_optimizer_bytes(
        counts.most_loaded_shard, distributed_optimizer_size=distributed_optimizer_size
    )
    footprint = f"Theoretical memory footprints: weight and optimizer={weights / _MEGABYTE:.2f} MB"
    if activations is None:
        lines.append(footprint)
    else:
        layer, all_layers = activations.bytes_per_layer, activations.bytes
        lines += [
            f"Activation memory footprint per transformer layer: {layer / _MEGABYTE:.1f} MB",
            f"{footprint}, activation={all_layers / _MEGABYTE:.2f} MB, "
            f"total={(weights + all_layers) / _MEGABYTE:.2f} MB",
        ]
    if undo_bytes_per_parameter is not None:
        undo = counts.most_loaded_shard * undo_bytes_per_parameter / distributed_optimizer_size
        lines.append(
            f"Undo copies for optimizer post-validation: {undo / _MEGABYTE:.2f} MB, not in the "
            "total; held from a step to its validation in the next warm-up"
        )
    return lines
