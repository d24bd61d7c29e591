"""The tensors of a checkpoint: whole, under global names, whatever the layout of the run.

decoder.layers.3.mlp.linear_fc1.weight                            a weight
optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc1.weight    its first moment
optimizer.state.fp32_param.decoder....                            its fp32 main copy
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron.core.optimizer.entries import OptimizerEntry
from megatron.training.checkpoint_files import CheckpointError
from megatron.training.model_setup import Trainer

_OPTIMIZER = "optimizer.state."
_MAIN = "fp32_param"
_VOCABULARY_WEIGHTS = ("embedding.word_embeddings.weight", "output_layer.weight")


class CheckpointPart(Protocol):
    """Something that a checkpoint holds: the model's weights, or the optimizer's state."""

    prefix: str  # of its keys; weights have none

    def shapes(self) -> dict[str, torch.Size]: ...

    def set(self, key: str, tensor: torch.Tensor) -> None: ...


class ModelState:
    """The weights of this rank's stages."""

    prefix = ""

    def __init__(self, trainer: Trainer) -> None:
        self._parameters: dict[str, list[torch.nn.Parameter]] = {}
        for chunk in trainer.model:
            module: Any = chunk.module
            for local_name, parameter in module.named_parameters():
                name = module.global_parameter_name(local_name)
                self._parameters.setdefault(name, []).append(parameter)

    def to_save(self) -> dict[str, torch.Tensor]:
        """Tied copies are saved once, by the rank of the embedding or with equal values."""
        return {name: copies[0].detach() for name, copies in self._parameters.items()}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: copies[0].shape for name, copies in self._parameters.items()}

    def set(self, key: str, tensor: torch.Tensor) -> None:
        for parameter in self._parameters[key]:
            parameter.data.copy_(tensor)


class OptimizerState:
    """Main parameters and moments of this rank's entries, as whole tensors."""

    prefix = _OPTIMIZER

    def __init__(self, trainer: Trainer) -> None:
        self._optimizer = trainer.optimizer
        self._group = trainer.session.groups.dp
        self._by_key = {key: (entry, tensor) for key, entry, tensor in self._tensors()}

    def to_save(self) -> dict[str, torch.Tensor]:
        """Slices of a distributed optimizer are put together, each on one of the replicas."""
        tensors = {}
        for index, (key, (entry, tensor)) in enumerate(self._by_key.items()):
            if entry.slice_index is None:
                tensors[key] = tensor.view(entry.parameter.shape)
                continue
            whole = torch.empty(
                entry.buffer.data_parallel_size * tensor.numel(), device=tensor.device
            )
            dist.all_gather_single(whole, tensor.contiguous(), group=self._group)
            if index % entry.buffer.data_parallel_size == entry.slice_index:
                tensors[key] = whole[: entry.region.numel].view(entry.parameter.shape).cpu()
        return tensors

    def shapes(self) -> dict[str, torch.Size]:
        return {key: entry.parameter.shape for key, (entry, _) in self._by_key.items()}

    def set(self, key: str, tensor: torch.Tensor) -> None:
        entry, own = self._by_key[key]
        own.copy_(_part_of(entry, tensor))

    def step(self) -> float:
        """Number of optimizer steps taken, also on a rank whose parameters are all frozen.

        Collective.
        """
        steps = [float(s["step"]) for s in self._optimizer.inner.state.values() if "step" in s]
        everyone = [max(steps, default=0.0)]
        if dist.is_initialized():
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, everyone[0])
        return max(everyone)

    def set_step(self, step: float) -> None:
        for state in self._optimizer.inner.state.values():
            if "step" in state:
                state["step"].fill_(step)

    def _tensors(self) -> Iterator[tuple[str, OptimizerEntry, torch.Tensor]]:
        for entry in self._optimizer.entries:
            if entry.parameter.dtype is not torch.float32:
                yield f"{_OPTIMIZER}{_MAIN}.{entry.name}", entry, entry.main
            for kind, tensor in self._optimizer.inner.state[entry.main].items():
                if kind != "step":
                    yield f"{_OPTIMIZER}{kind}.{entry.name}", entry, tensor


def load_tensors(path: pathlib.Path, part: CheckpointPart) -> None:
    """Read a part of the checkpoint at `path`. Collective.

    Raises CheckpointError naming keys that are missing or unused, and shapes that differ; the
    padding of the vocabulary may differ.
    """
    reader = dcp.FileSystemReader(path)
    try:
        stored = {
            key: meta.size
            for key, meta in reader.read_metadata().state_dict_metadata.items()
            if isinstance(meta, dcp.metadata.TensorStorageMetadata)
        }
    except Exception as error:
        raise CheckpointError(f"the index of checkpoint {path} cannot be read: {error}") from error
    shapes = part.shapes()
    _check_keys(path, part.prefix, set(shapes), set(stored))
    tensors = {key: torch.empty(stored[key], dtype=torch.float32) for key in shapes}
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    for key, shape in shapes.items():
        part.set(key, _fitted(path, key, tensors.pop(key), shape))


def _check_keys(path: pathlib.Path, prefix: str, wanted: set[str], stored: set[str]) -> None:
    """Every key of the run is stored; every stored key of this part is somebody's."""
    if prefix:
        stored = {key for key in stored if key.startswith(prefix)}
    else:
        stored = {key for key in stored if not key.startswith(_OPTIMIZER)}
    everyone: list[set[str]] = [wanted]
    if dist.is_initialized():
        everyone = [set()] * dist.get_world_size()
        dist.all_gather_object(everyone, wanted)
    all_wanted = set().union(*everyone)
    problems = []
    if missing := all_wanted - stored:
        problems.append(f"it lacks {_named(missing)}")
    if unused := stored - all_wanted:
        problems.append(f"nothing in this run takes {_named(unused)}")
    if problems:
        raise CheckpointError(f"checkpoint {path} does not fit the model: " + "; ".join(problems))


def _fitted(path: pathlib.Path, key: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The tensor in the run's shape: rows of vocabulary padding are cut off or added as zeros."""
    if tensor.shape == shape:
        return tensor
    is_vocabulary = key.endswith(_VOCABULARY_WEIGHTS) and tensor.shape[1:] == shape[1:]
    if not is_vocabulary:
        raise CheckpointError(
            f"{key} has shape {tuple(tensor.shape)} in checkpoint {path}, but {tuple(shape)} here"
        )
    fitted = tensor.new_zeros(shape)
    rows = min(tensor.shape[0], shape[0])
    fitted[:rows] = tensor[:rows]
    return fitted


def _part_of(entry: OptimizerEntry, whole: torch.Tensor) -> torch.Tensor:
    """What of a whole tensor this entry holds: all, or its slice padded with zeros."""
    if entry.slice_index is None:
        return whole.view(entry.main.shape)
    size = entry.region.slice_numel
    flat = whole.reshape(-1)[entry.slice_index * size : (entry.slice_index + 1) * size]
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _named(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more
