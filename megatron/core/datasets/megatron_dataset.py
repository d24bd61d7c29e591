"""What every dataset over a file pair has in common."""

from __future__ import annotations

import abc
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from .utils import Split


class MegatronDataset(torch.utils.data.Dataset[dict[str, Any]], abc.ABC):
    """A dataset of samples over some sequences of a low-level dataset.

    A class of this kind is what `BlendedMegatronDatasetBuilder` builds: it opens the low-level
    dataset, asks how many sequences that has, and constructs one dataset per split.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples  # at least that many; None: one epoch
        self.index_split = index_split
        self.config = config
        self.unique_identifiers = self._identifiers()

    @staticmethod
    @abc.abstractmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        """Open the sequences behind a prefix (None: mock data)."""

    @staticmethod
    @abc.abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Number of sequences, which a split divides."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...

    def _identifiers(self) -> dict[str, Any]:
        """Everything the samples depend on, in a fixed order; names the cached index."""
        config = self.config
        return {
            "class": type(self).__name__,
            "dataset_path": self.dataset_path,
            "num_samples": self.num_samples,
            "index_split": self.index_split.name,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": config.split_matrix,
            "tokenizer": config.tokenizer,
        }


def describe(identifiers: Any) -> str:
    """Text of identifiers; objects in them are replaced by their `unique_identifiers`."""
    return json.dumps(identifiers, indent=4, default=lambda obj: obj.unique_identifiers)
