"""From a config and three sizes to the train, valid and test datasets, on every rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from .blended_dataset import BlendedDataset, blend_order, normalized
from .blended_megatron_dataset_config import BlendedMegatronDatasetConfig, Share
from .megatron_dataset import MegatronDataset
from .utils import Blend, DatasetError, Split

logger = logging.getLogger(__name__)

T = TypeVar("T")
TopLevelDataset = MegatronDataset | BlendedDataset


class BlendedMegatronDatasetBuilder:
    """Builds datasets of class `cls` for train, valid and test.

    `sizes` says how many samples each needs at least: None takes one epoch (or, for a weighted
    blend, each part once), 0 builds nothing. `is_built_on_rank()` says whether this rank reads
    data. Where torch.distributed runs, `build` must be called on every rank.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if len(sizes) != len(Split) or any(size is not None and size < 0 for size in sizes):
            raise DatasetError(
                f"dataset sizes {list(sizes)}: three (train, valid, test) of 0 or more are needed"
            )
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._low_level: dict[str | None, Any] = {}  # opened files by prefix, for all splits

    def build(self) -> list[TopLevelDataset | None]:
        """[train, valid, test]; None for a split without data and on ranks that read none.

        Rank 0 builds first and leaves the indices in the cache, the others then load them. When
        any rank fails, all raise.
        """
        nothing: list[TopLevelDataset | None] = [None] * len(Split)
        if not dist.is_initialized():
            return self._build_splits() if self.is_built_on_rank() else nothing
        rank, wanted = dist.get_rank(), self.is_built_on_rank()
        first = _fail_together(self._build_splits if rank == 0 else None)
        then = _fail_together(self._build_splits if rank != 0 and wanted else None)
        return (first or then or nothing) if wanted else nothing

    def _build_splits(self) -> list[TopLevelDataset | None]:
        return [self._build_split(split) for split in Split]

    def _build_split(self, split: Split) -> TopLevelDataset | None:
        size = self.sizes[split.value]
        if size == 0:
            return None
        if self.config.mock:
            assert self.config.split_matrix is not None, "mock data are split"
            share = self.config.split_matrix[split.value]
            assert share is not None, "mock data have three equal shares"
            return self._build_parts([None], [size], share, split)[0]
        source = self.config.source_of(split)
        if source is None:
            return None
        blend, share = source
        if len(blend.prefixes) == 1:
            parts = self._build_parts(blend.prefixes, [size], share, split)
            self._check_not_empty(parts, split)
            return parts[0]
        if blend.weights is None or size is None:
            return self._blend_whole_parts(blend.prefixes, size, share, split)
        return self._blend_by_weight(blend, size, share, split)

    def _blend_whole_parts(
        self, prefixes: Sequence[str], size: int | None, share: Share, split: Split
    ) -> BlendedDataset:
        """One epoch of every part; parts without a whole sample are left out."""
        parts = self._build_parts(prefixes, [None] * len(prefixes), share, split)
        self._check_not_empty(parts, split)
        for part in parts:
            if len(part) == 0:
                logger.warning("%s has no %s sample and is left out", part.dataset_path, split.name)
        parts = [part for part in parts if len(part)]
        lengths = [len(part) for part in parts]
        size = None if size is None else min(size, sum(lengths))
        return BlendedDataset(parts, lengths, size, self.config)

    def _blend_by_weight(
        self, blend: Blend, size: int, share: Share, split: Split
    ) -> BlendedDataset:
        """Parts in proportion to their weights, repeated as often as that takes."""
        assert blend.weights is not None, "a blend by weight has weights"
        weights = normalized(blend.weights).tolist()
        targets = [math.ceil(size * weight) for weight in weights]
        sizes = part_sizes(weights, targets, self.config.mid_level_dataset_surplus)
        parts = self._build_parts(blend.prefixes, sizes, share, split)
        return BlendedDataset(parts, weights, sum(targets), self.config)

    def _build_parts(
        self,
        prefixes: Sequence[str | None],
        sizes: Sequence[int | None],
        share: Share,
        split: Split,
    ) -> list[MegatronDataset]:
        """`share` of each dataset, several at once if the config allows threads."""
        for prefix in prefixes:
            if prefix not in self._low_level:
                self._low_level[prefix] = self.cls.build_low_level_dataset(prefix, self.config)

        def build(prefix: str | None, size: int | None) -> MegatronDataset:
            sequences = self._low_level[prefix]
            chosen = share.indices_of(self.cls.numel_low_level_dataset(sequences))
            indices = np.arange(chosen.start, chosen.stop, dtype=np.int32)
            return self.cls(sequences, prefix, indices, size, split, self.config)

        with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as threads:
            return list(threads.map(build, prefixes, sizes))

    def _check_not_empty(self, parts: Sequence[MegatronDataset], split: Split) -> None:
        if not any(len(part) for part in parts):
            names = ", ".join(str(part.dataset_path) for part in parts)
            num_sequences = sum(len(part.indices) for part in parts)
            raise DatasetError(
                f"the {split.name} split of {names} has {num_sequences} sequences and not one "
                f"sample of {self.config.sequence_length} tokens; give it more of --split "
                f"{self.config.split!r}, more documents, or a shorter --seq-length"
            )


def part_sizes(weights: Sequence[float], targets: Sequence[int], surplus: float) -> list[int]:
    """Samples to build of each part, for a blend of sum(targets) samples; weights add up to 1.

    Megatron's rule, ceil(target * (1 + surplus)), falls short in small blends of many parts: the
    rounded-up targets add up to more than was requested, and the heavy parts supply that too.
    A part gives at most ceil(weight * sum(targets)) samples, since it is chosen only while it is
    behind its share; where the rule does not cover that, the exact numbers are counted.
    """
    sizes = [math.ceil(target * (1 + surplus)) for target in targets]
    total = sum(targets)
    if all(math.ceil(weight * total) <= size for weight, size in zip(weights, sizes, strict=True)):
        return sizes
    needed = np.bincount(blend_order(weights, total), minlength=len(weights))
    return [max(size, int(count)) for size, count in zip(sizes, needed, strict=True)]


def _fail_together(action: Callable[[], T] | None) -> T | None:
    """Run `action` on the ranks that have one and wait for all ranks; when it failed on one of
    them, raise on all of them, so that none waits for a rank that is gone."""
    result, failure = None, None
    try:
        result = action() if action is not None else None
    except Exception as error:
        failure = error
    reports: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, None if failure is None else f"{failure}")
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise DatasetError(f"rank {rank} could not build the datasets: {report}")
    return result
