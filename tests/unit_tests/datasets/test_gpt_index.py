"""The three index arrays: published vectors, and a walk over tokens as an independent method."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.gpt_index import (
    SampleShape,
    build_gpt_index,
    build_sample_index,
    plan_epochs,
)

_THREE_FIVES = np.array([5, 5, 5], np.int32)
_ROWS_3_EPOCHS = [
    (0, 0), (0, 4), (1, 3), (2, 2), (3, 1), (4, 0), (4, 4), (5, 3), (6, 2), (7, 1), (8, 0), (8, 4),
]  # fmt: skip


def _rows(sample_index: np.ndarray) -> list[tuple[int, int]]:
    return [(int(document), int(offset)) for document, offset in sample_index]


def test_one_epoch_vector() -> None:
    rows = build_sample_index(_THREE_FIVES, 3, SampleShape(sequence_length=4))
    assert _rows(rows) == [(0, 0), (0, 4), (1, 3), (2, 2)]


@pytest.mark.parametrize(
    ("num_samples", "documents", "shuffle"),
    [
        (11, [2, 2, 1, 0, 1, 1, 2, 0, 0], [9, 3, 5, 10, 4, 8, 0, 2, 6, 7, 1]),
        (8, [2, 1, 2, 0, 1, 0, 0, 2, 1], [6, 4, 0, 5, 3, 2, 1, 8, 7, 10, 9]),
    ],
)
def test_three_epoch_vectors(num_samples: int, documents: list[int], shuffle: list[int]) -> None:
    index = build_gpt_index(
        _THREE_FIVES,
        np.arange(3, dtype=np.int32),
        num_samples=num_samples,
        shape=SampleShape(sequence_length=4),
        seed=1234,
    )
    assert index.document_index.tolist() == documents
    assert _rows(index.sample_index) == _ROWS_3_EPOCHS
    assert index.shuffle_index.tolist() == shuffle
    assert index.document_index.dtype == index.sample_index.dtype == np.int32
    assert index.shuffle_index.dtype == np.uint32


@pytest.mark.parametrize(
    ("num_samples", "epochs", "separate"),
    [
        (None, 1, None),
        (0, 1, None),
        (3, 1, None),
        (4, 2, 3),  # 1 sample of the last epoch's 3, less than int(0.8 * 3)
        (5, 2, None),  # 2 samples
        (7, 2, None),
        (8, 3, 7),
        (11, 3, None),
    ],
)
def test_number_of_epochs(num_samples: int | None, epochs: int, separate: int | None) -> None:
    assert plan_epochs(num_samples, 15, SampleShape(sequence_length=4)) == (epochs, separate)


def _walk(lengths: list[int], shape: SampleShape) -> list[tuple[int, int]]:
    """Rows by taking S + x tokens one at a time, over and over, x of them twice."""
    places = [(doc, offset) for doc, length in enumerate(lengths) for offset in range(length)]
    rows, used = [(0, 0)], 0
    extra = int(shape.extra_token)
    while used + shape.num_tokens <= len(places):
        used += shape.num_tokens
        document, offset = places[used - 1]  # the last token taken
        rows.append((document, offset + 1 - extra))
        used -= extra
    if not shape.drop_last_partial and len(places) - used > extra:
        document, offset = places[-1]
        rows.append((document, offset + 1 - extra))
    return rows


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any),
    length=st.integers(1, 8),
    extra=st.booleans(),
    drop=st.booleans(),
)
def test_sample_index_equals_a_walk(
    lengths: list[int], length: int, extra: bool, drop: bool
) -> None:
    shape = SampleShape(sequence_length=length, extra_token=extra, drop_last_partial=drop)
    rows = build_sample_index(np.array(lengths, np.int32), shape.samples_in(sum(lengths)), shape)
    expected = _walk(lengths, shape)
    assert _rows(rows) == (expected if len(expected) > 1 else [(0, 0)])


def test_boundary_at_the_end_of_a_document_stays_in_it() -> None:
    lengths = np.array([5, 0, 4, 3], np.int32)
    with_extra = build_sample_index(lengths, 2, SampleShape(sequence_length=4))
    assert _rows(with_extra) == [(0, 0), (0, 4), (2, 3)]
    without = SampleShape(sequence_length=5, extra_token=False)
    assert _rows(build_sample_index(lengths, 2, without)) == [(0, 0), (0, 5), (3, 1)]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any),
    length=st.integers(1, 30),
    num_samples=st.integers(1, 60),
    extra=st.booleans(),
)
def test_any_request_is_met_and_each_epoch_reads_every_document(
    lengths: list[int], length: int, num_samples: int, extra: bool
) -> None:
    shape = SampleShape(sequence_length=length, extra_token=extra)
    indices = np.arange(len(lengths), dtype=np.int32)
    index = build_gpt_index(
        np.array(lengths, np.int32), indices, num_samples=num_samples, shape=shape, seed=7
    )
    epochs, separate = plan_epochs(num_samples, sum(lengths), shape)
    assert len(index.shuffle_index) >= num_samples
    assert sorted(index.shuffle_index) == list(range(len(index.shuffle_index)))
    assert np.bincount(index.document_index).tolist() == [epochs] * len(lengths)
    # One epoch less would not do.
    assert (epochs - 1) * sum(lengths) < num_samples * length + extra
    if separate is not None:
        assert sorted(index.document_index[-len(lengths) :]) == indices.tolist()
        assert sorted(index.shuffle_index[:separate]) == list(range(separate))


def test_long_documents_need_64_bits() -> None:
    lengths = np.full(3, 2**31 - 1, np.int32)
    shape = SampleShape(sequence_length=2**30)
    assert build_sample_index(lengths, 5, shape).dtype == np.int32
    assert _rows(build_sample_index(lengths, 5, shape))[-1] == (2, 5 * 2**30 - 2 * (2**31 - 1))


def test_time_grows_no_faster_than_the_documents() -> None:
    """A loop over samples or documents, or anything quadratic, would exceed this by far."""

    def seconds(num_documents: int) -> float:
        lengths = np.random.default_rng(0).integers(1, 2000, num_documents, dtype=np.int32)
        indices = np.arange(num_documents, dtype=np.int32)
        start = time.perf_counter()
        build_gpt_index(
            lengths, indices, num_samples=None, shape=SampleShape(sequence_length=512), seed=1
        )
        return time.perf_counter() - start

    small = min(seconds(20_000) for _ in range(5))
    large = min(seconds(200_000) for _ in range(3))
    assert large < 60 * small
