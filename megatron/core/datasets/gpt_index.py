"""Which tokens make up GPT sample k: document index, sample index and shuffle index.

The documents of E epochs, shuffled, are laid end to end; sample k is tokens [k*S, k*S + S + x) of
that stream, so neighbours share x tokens (S sequence length; x is 1 when a sample carries the
token after its last, else 0; T tokens in one epoch). Samples are read in the order of the shuffle
index. One `RandomState(seed)` draws the document index first, then the shuffle index: the order
of draws is part of the format, two programs with the same seed read the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The last epoch is shuffled on its own when less than this share of it is used; otherwise its
# unused part would be spread over the whole run and some documents would be seen once less.
_SEPARATE_LAST_EPOCH_BELOW = 0.80


@dataclass(frozen=True, kw_only=True)
class SampleShape:
    """How samples are cut from the token stream."""

    sequence_length: int  # S
    extra_token: bool = True  # x
    drop_last_partial: bool = True  # a last sample shorter than S + x is left out

    @property
    def num_tokens(self) -> int:
        """S + x."""
        return self.sequence_length + self.extra_token

    def samples_in(self, num_tokens: int) -> int:
        """Samples in a stream of that many tokens."""
        usable = num_tokens - self.extra_token
        if self.drop_last_partial:
            return max(usable // self.sequence_length, 0)
        return max(-(-usable // self.sequence_length), 0)


class EpochPlan(NamedTuple):
    """How often the documents are read, and how the last pass is shuffled."""

    num_epochs: int
    # Samples before the last epoch when that is shuffled on its own, else None.
    samples_before_last: int | None


class GPTIndex(NamedTuple):
    """The three arrays; n samples."""

    document_index: NDArray[np.int32]  # sequence numbers in the order of the stream
    sample_index: NDArray[Any]  # [n + 1, 2]: position in document_index, token offset in it
    shuffle_index: NDArray[Any]  # [n]: sample to read as k-th


def plan_epochs(num_samples: int | None, tokens_per_epoch: int, shape: SampleShape) -> EpochPlan:
    """Smallest number of epochs, at least one, that holds `num_samples`; one epoch if None."""
    if not num_samples:
        return EpochPlan(1, None)
    length, extra = shape.sequence_length, int(shape.extra_token)
    num_epochs = -(-(num_samples * length + extra) // tokens_per_epoch)
    if num_epochs == 1:
        return EpochPlan(1, None)
    before_last = ((num_epochs - 1) * tokens_per_epoch - extra) // length
    used = num_samples - before_last
    per_epoch = (tokens_per_epoch - extra) // length
    assert 0 <= used <= per_epoch + 1, "the last epoch is needed and holds what is asked of it"
    separate = used < int(_SEPARATE_LAST_EPOCH_BELOW * per_epoch)
    return EpochPlan(num_epochs, before_last if separate else None)


def build_gpt_index(
    sequence_lengths: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    num_samples: int | None,
    shape: SampleShape,
    seed: int,
) -> GPTIndex:
    """The index over the sequences `indices`, whose lengths are `sequence_lengths[indices]`."""
    tokens_per_epoch = int(np.sum(sequence_lengths[indices], dtype=np.int64))
    epochs = plan_epochs(num_samples, tokens_per_epoch, shape)
    random = np.random.RandomState(seed)
    document_index = _build_document_index(indices, epochs, random)
    num_built = shape.samples_in(epochs.num_epochs * tokens_per_epoch)
    sample_index = build_sample_index(sequence_lengths[document_index], num_built, shape)
    shuffle_index = _build_shuffle_index(num_built, epochs.samples_before_last, random)
    return GPTIndex(document_index, sample_index, shuffle_index)


def build_sample_index(
    lengths: NDArray[np.int32], num_samples: int, shape: SampleShape
) -> NDArray[Any]:
    """Where each sample begins, [num_samples + 1, 2], from the lengths along the stream.

    Row k names the place of stream token k*S. It is found through the last token the first k
    samples have used, number k*S + x - 1: a boundary that falls on the end of a document thereby
    stays in the finished document, and empty documents are passed over.
    """
    if num_samples == 0:
        return np.zeros((1, 2), np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * shape.sequence_length
    if not shape.drop_last_partial:
        boundaries[-1] = min(boundaries[-1], ends[-1] - shape.extra_token)  # the end of the stream
    last_used = boundaries + (int(shape.extra_token) - 1)
    documents = np.searchsorted(ends, last_used, side="right")
    documents[0] = 0
    offsets = boundaries - (ends[documents] - lengths[documents])
    offsets[0] = 0
    sample_index = np.stack([documents, offsets], axis=1)
    fits = sample_index.max() <= np.iinfo(np.int32).max
    return sample_index.astype(np.int32 if fits else np.int64)


def _build_document_index(
    indices: NDArray[np.int32], epochs: EpochPlan, random: np.random.RandomState
) -> NDArray[np.int32]:
    """`indices` once per epoch, shuffled; a separate last epoch is shuffled behind the others."""
    separate = epochs.samples_before_last is not None
    passes = [epochs.num_epochs - 1, 1] if separate else [epochs.num_epochs]
    parts = [np.tile(indices.astype(np.int32), count) for count in passes]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def _build_shuffle_index(
    num_samples: int, samples_before_last: int | None, random: np.random.RandomState
) -> NDArray[Any]:
    """The order of reading; a separate last epoch is read behind the others."""
    dtype = np.uint32 if num_samples < 2**32 - 2 else np.int64
    cut = num_samples if samples_before_last is None else samples_before_last
    parts = [np.arange(cut, dtype=dtype), np.arange(cut, num_samples, dtype=dtype)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)
