"""Settings of the datasets, and what the split string means."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .utils import Blend, DatasetError, Split

logger = logging.getLogger(__name__)

DEFAULT_SPLIT = "969, 30, 1"


class Share(NamedTuple):
    """A part [begin, end) of a dataset, in fractions of its sequences."""

    begin: float
    end: float

    def indices_of(self, num_sequences: int) -> range:
        """The sequence numbers of this share."""
        return range(round(self.begin * num_sequences), round(self.end * num_sequences))


def parse_and_normalize_split(split: str) -> list[float]:
    """Fractions for train, valid and test: every number in the text, missing ones 0.

    Quotes that a script passed literally are ignored: "'99,1,0'" is (0.99, 0.01, 0).
    """
    pieces = re.findall(r"[.0-9]+", split)
    try:
        values = [float(piece) for piece in pieces]
    except ValueError:
        values = []
    if not 1 <= len(values) <= len(Split) or sum(values) <= 0:
        raise DatasetError(
            f"--split {split!r} is not up to {len(Split)} numbers (train, valid, test) with a "
            f"sum above 0; write for example {DEFAULT_SPLIT!r}"
        )
    values += [0.0] * (len(Split) - len(values))
    return [value / sum(values) for value in values]


def split_matrix_of(fractions: Sequence[float]) -> list[Share | None]:
    """The share of each split; None where it has no width."""
    bounds = itertools.pairwise(itertools.accumulate(fractions, initial=0.0))
    return [Share(begin, end) if end > begin else None for begin, end in bounds]


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """What all datasets need to know.

    Data come from one `blend` cut by `split`, or from a blend per split; without either they are
    mock data. A blend is (prefixes, weights or None), see `get_blend_from_list`.
    """

    random_seed: int
    sequence_length: int
    blend: tuple[list[str], list[float] | None] | None = None
    blend_per_split: list[tuple[list[str], list[float] | None] | None] | None = None
    split: str | None = None
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None  # None: beside each dataset; blends are then not cached
    mmap_bin_files: bool = True
    tokenizer: Any = None
    # Parts of a weighted blend are built this much larger than their share.
    mid_level_dataset_surplus: float = 0.005
    mock: bool = field(init=False)
    split_matrix: list[Share | None] | None = field(init=False)

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DatasetError(f"--seq-length {self.sequence_length} must be at least 1")
        if not 0 <= self.random_seed < 2**32:
            raise DatasetError(f"--seed {self.random_seed} must lie in 0 to 2**32 - 1")
        if self.num_dataset_builder_threads < 1:
            threads = self.num_dataset_builder_threads
            raise DatasetError(f"--num-dataset-builder-threads {threads} must be at least 1")
        if self.mid_level_dataset_surplus < 0:
            surplus = self.mid_level_dataset_surplus
            raise DatasetError(f"--mid-level-dataset-surplus {surplus} must not be below 0")
        self.mock = self.blend is None and self.blend_per_split is None
        if self.mock:
            self.split = "1,1,1"
        self._check_blends()
        if self.blend is not None and self.split is None:
            logger.warning("no --split is given; %r is used", DEFAULT_SPLIT)
            self.split = DEFAULT_SPLIT
        self.split_matrix = (
            None if self.split is None else split_matrix_of(parse_and_normalize_split(self.split))
        )

    def source_of(self, split: Split) -> tuple[Blend, Share] | None:
        """Which prefixes a split reads and which share of them; None if it has no data."""
        if self.blend_per_split is not None:
            blend = self.blend_per_split[split.value]
            return None if blend is None else (Blend(*blend), Share(0.0, 1.0))
        assert self.blend is not None and self.split_matrix is not None, "mock data have no source"
        share = self.split_matrix[split.value]
        return None if share is None else (Blend(*self.blend), share)

    def _check_blends(self) -> None:
        if self.blend_per_split is not None:
            if self.blend is not None:
                raise DatasetError(
                    "--data-path and --train/valid/test-data-path are both given; give one of them"
                )
            if self.split is not None:
                raise DatasetError(
                    f"--split {self.split!r} is given with --train/valid/test-data-path, which "
                    "are split already; leave --split out"
                )
            if len(self.blend_per_split) != len(Split) or not any(self.blend_per_split):
                raise DatasetError(
                    f"blend_per_split has {len(self.blend_per_split)} entries; three (train, "
                    "valid, test) are needed, not all of them None"
                )
        for blend in [self.blend, *(self.blend_per_split or [])]:
            if blend is not None:
                _check_blend(Blend(*blend))


def _check_blend(blend: Blend) -> None:
    prefixes, weights = blend
    if not prefixes:
        raise DatasetError("a blend without prefixes is given; name at least one dataset")
    if weights is None:
        return
    if len(weights) != len(prefixes):
        raise DatasetError(f"{len(weights)} weights are given for {len(prefixes)} prefixes")
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise DatasetError(f"blend weights {weights} must be finite, not below 0 and not all 0")
