"""GPT samples of a fixed length, packed from documents; mock data to run without files.

S sequence length. A sample is a dict of tensors: tokens [S] int64, labels [S] int64 (the next
token of each), loss_mask [S] float32, position_ids [S] int64 and, if the config asks for it,
attention_mask [1, S, S] bool where True forbids row i to see column j.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from .gpt_index import SampleShape, build_gpt_index, plan_epochs
from .index_cache import Arrays, IndexCache
from .indexed_dataset import IndexedDataset
from .megatron_dataset import MegatronDataset, describe
from .utils import DatasetError, Split

logger = logging.getLogger(__name__)

Sample = dict[str, torch.Tensor]

# A pad id that no tokenizer uses, for those without one.
_NO_PAD = -1
_SPECIAL_TOKENS = ("eod", "bos", "eos", "cls", "sep", "mask")


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of GPT datasets. The first three options act on positions whose token is eod."""

    reset_position_ids: bool = False  # count from 0 again behind each eod
    reset_attention_mask: bool = False  # see nothing up to and including the last eod
    eod_mask_loss: bool = False  # no loss where the token is eod
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True  # samples hold the label of their last token
    allow_ambiguous_pad_tokens: bool = False  # pad may equal another special token

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None and self.depends_on_eod:
            raise DatasetError(
                "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need a "
                "tokenizer, whose end-of-document id they look for; none is given"
            )

    @property
    def depends_on_eod(self) -> bool:
        """Whether masks or positions differ from sample to sample."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GPTDataset(MegatronDataset):
    """Samples of S tokens from the sequences `indexed_indices`, shuffled over as many epochs as
    `num_samples` takes. `len()` may exceed the request. `ds[None]` is a sample without loss."""

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        lengths = indexed_dataset.sequence_lengths[indexed_indices]
        self._tokens_per_epoch = int(np.sum(lengths, dtype=np.int64))
        self._shape = SampleShape(
            sequence_length=config.sequence_length,
            extra_token=config.add_extra_token_to_sequence,
            drop_last_partial=(
                index_split is not Split.valid or config.drop_last_partial_validation_sequence
            ),
        )
        self._pad_id = _pad_id(config)
        self._eod_id = config.tokenizer.eod if config.depends_on_eod else None
        self._causal_mask = (
            _causal_mask(config.sequence_length) if config.create_attention_mask else None
        )
        # Beyond Megatron's description: the other options the index depends on, and the lengths,
        # so that data written anew under an old prefix do not meet the old index.
        self.unique_identifiers |= {
            "add_extra_token_to_sequence": self._shape.extra_token,
            "drop_last_partial_sequence": self._shape.drop_last_partial,
            "sequence_lengths_md5": hashlib.md5(lengths, usedforsecurity=False).hexdigest(),
        }
        self._check_has_tokens()
        arrays = self._load_or_build_index()
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        if dataset_path is None:
            raise DatasetError("no dataset is named; give --data-path, or --mock-data")
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.sequence_lengths)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> Sample:
        text = torch.from_numpy(self._read_tokens(int(self.shuffle_index[idx or 0])))
        length = self.config.sequence_length
        tokens = text[:length].clone()
        labels = torch.full_like(tokens, self._pad_id)
        labels[: len(text) - 1] = text[1:]  # the last label is missing without the extra token

        sample = self._masks_and_positions(tokens)
        sample["loss_mask"][labels == self._pad_id] = 0.0
        tokens[tokens == self._pad_id] = 0
        labels[labels == self._pad_id] = 0
        if idx is None:
            sample["loss_mask"].zero_()
        return {"tokens": tokens, "labels": labels, **sample}

    def _read_tokens(self, row: int) -> NDArray[np.int64]:
        """Tokens of a row of the sample index, padded on the right; [S + x]."""
        first, begin = (int(value) for value in self.sample_index[row])
        last, end = (int(value) for value in self.sample_index[row + 1])
        text = np.full(self._shape.num_tokens, self._pad_id, np.int64)
        filled = 0
        for position in range(first, last + 1):
            offset = begin if position == first else 0
            stop = end + self._shape.extra_token if position == last else None
            piece = self.dataset.get(
                int(self.document_index[position]),
                offset=offset,
                length=None if stop is None else stop - offset,
            )
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
        return text

    def _masks_and_positions(self, tokens: torch.Tensor) -> Sample:
        """Loss mask, positions and attention mask of a sample, before padding is considered.

        Loss mask and positions are new for each sample and may be changed. The attention mask is
        shared by all samples unless it is reset at eod: S * S bytes are too much to copy.
        """
        positions = torch.arange(len(tokens))
        sample = {"loss_mask": torch.ones(len(tokens)), "position_ids": positions}
        if self._causal_mask is not None:
            sample["attention_mask"] = self._causal_mask
        if self._eod_id is None:
            return sample

        config, is_eod = self.config, tokens == self._eod_id
        # begin[i]: the position behind the last eod before i, where the document of i begins.
        begin = torch.zeros_like(positions)
        begin[1:] = torch.where(is_eod[:-1], positions[1:], 0).cummax(0).values
        if config.eod_mask_loss:
            sample["loss_mask"][is_eod] = 0.0
        if config.reset_position_ids:
            sample["position_ids"] = positions - begin
        if config.reset_attention_mask and self._causal_mask is not None:
            before_begin = positions[None, None, :] < begin[None, :, None]
            sample["attention_mask"] = self._causal_mask | before_begin
        return sample

    def _check_has_tokens(self) -> None:
        if self._tokens_per_epoch == 0 and self.num_samples:
            raise DatasetError(
                f"the {self.index_split.name} dataset of {self.dataset_path} needs "
                f"{self.num_samples} samples of {self.config.sequence_length} tokens, but its "
                f"share of --split {self.config.split!r} is {len(self.indices)} of "
                f"{self.numel_low_level_dataset(self.dataset)} sequences with 0 tokens; give it "
                "more of the split or more documents"
            )

    def _load_or_build_index(self) -> Arrays:
        if self.dataset_path is None:  # mock data
            return self._build_index()
        directory = self.config.path_to_cache or os.path.join(
            self.dataset_path, "cache", "GPTDataset_indices"
        )
        name = f"{type(self).__name__}-{self.index_split.name}"
        cache = IndexCache(directory, name, describe(self.unique_identifiers))
        epochs = plan_epochs(self.num_samples, self._tokens_per_epoch, self._shape).num_epochs
        num_built = self._shape.samples_in(epochs * self._tokens_per_epoch)
        shapes = {
            "document_index": (epochs * len(self.indices),),
            "sample_index": (num_built + 1, 2),
            "shuffle_index": (num_built,),
        }
        return cache.load_or_build(shapes, self._build_index)

    def _build_index(self) -> Arrays:
        logger.info("building the %s index of %s", self.index_split.name, self.dataset_path)
        index = build_gpt_index(
            self.dataset.sequence_lengths,
            self.indices,
            num_samples=self.num_samples,
            shape=self._shape,
            seed=self.config.random_seed,
        )
        return index._asdict()


class MockGPTLowLevelDataset:
    """100000 documents of 1 to 4095 tokens that exist only as a rule: 1, 2, 3, ... eod."""

    num_documents = 100000

    def __init__(self, tokenizer: Any) -> None:
        self._vocab_size, self._eod_id = tokenizer.vocab_size, tokenizer.eod
        self.sequence_lengths: NDArray[np.int32] = np.random.default_rng(seed=0).integers(
            low=1, high=4096, size=self.num_documents, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, idx: int) -> NDArray[np.int64]:
        count = np.arange(1, self.sequence_lengths[idx], dtype=np.int64)
        return np.append(count % self._vocab_size, self._eod_id)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Part of a document, as `IndexedDataset.get`."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """GPT samples of mock documents; never cached."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> Any:
        if config.tokenizer is None:
            raise DatasetError("mock data need a tokenizer, for its vocabulary size and end token")
        return MockGPTLowLevelDataset(config.tokenizer)


def _causal_mask(length: int) -> torch.Tensor:
    """[1, S, S], True above the diagonal."""
    return torch.ones(1, length, length, dtype=torch.bool).triu(diagonal=1)


def _pad_id(config: GPTDatasetConfig) -> int:
    """The tokenizer's pad id; -1 if it has none or the id also means something else."""
    pad: int | None = getattr(config.tokenizer, "pad", None)
    if pad is None:
        return _NO_PAD
    others = [name for name in _SPECIAL_TOKENS if getattr(config.tokenizer, name, None) == pad]
    if others and not config.allow_ambiguous_pad_tokens:
        logger.warning(
            "the tokenizer's pad id %d is also its %s id; -1 is used for padding, so that %s keeps "
            "its loss (--allow-ambiguous-pad-tokens uses it all the same)",
            pad,
            others[0],
            others[0],
        )
        return _NO_PAD
    return pad
