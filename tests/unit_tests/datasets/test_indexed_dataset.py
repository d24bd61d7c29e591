"""The file pair against its byte table, and against damaged files."""

from __future__ import annotations

import pathlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets import index_file
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.utils import DatasetError

# Documents [1, 2, 3] and [4, 5] as uint16, byte by byte.
_BIN = bytes.fromhex("0100 0200 0300 0400 0500")
_IDX = bytes.fromhex(
    "4D4D4944494458 0000"  # magic
    "0100000000000000"  # version
    "08"  # uint16
    "0200000000000000"  # sequences
    "0300000000000000"  # document index entries
    "03000000 02000000"  # lengths
    "0000000000000000 0600000000000000"  # pointers
    "0000000000000000 0100000000000000 0200000000000000"  # document index
)


def _write(folder: pathlib.Path, idx: bytes = _IDX, bin_: bytes = _BIN) -> str:
    prefix = str(folder / "data")
    pathlib.Path(get_idx_path(prefix)).write_bytes(idx)
    pathlib.Path(get_bin_path(prefix)).write_bytes(bin_)
    return prefix


def _build(
    prefix: str, documents: list[list[list[int]]], dtype: Any = np.uint16, **options: Any
) -> str:
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype, **options)
    for document in documents:
        for sequence in document:
            builder.add_item(sequence)
        builder.end_document()
    builder.finalize(get_idx_path(prefix))
    return prefix


def test_worked_example_is_written_byte_for_byte(tmp_path: pathlib.Path) -> None:
    assert len(_IDX) == 82
    prefix = _build(str(tmp_path / "data"), [[[1, 2, 3]], [[4, 5]]])
    assert pathlib.Path(get_bin_path(prefix)).read_bytes() == _BIN
    assert pathlib.Path(get_idx_path(prefix)).read_bytes() == _IDX


@pytest.mark.parametrize("mmap", [True, False])
def test_worked_example_is_read(tmp_path: pathlib.Path, mmap: bool) -> None:
    dataset = IndexedDataset(_write(tmp_path), mmap=mmap)
    assert len(dataset) == 2
    assert dataset.dtype == np.uint16
    assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2, 3], [4, 5]]
    assert dataset[-1].tolist() == [4, 5]
    assert dataset.sequence_lengths.tolist() == [3, 2]
    assert dataset.sequence_pointers.tolist() == [0, 6]
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert dataset.sequence_modes is None


@pytest.mark.parametrize("mmap", [True, False])
def test_get_reads_part_of_a_sequence(tmp_path: pathlib.Path, mmap: bool) -> None:
    dataset = IndexedDataset(_write(tmp_path), mmap=mmap)
    assert dataset.get(0, offset=1).tolist() == [2, 3]
    assert dataset.get(0, offset=1, length=1).tolist() == [2]
    assert dataset.get(1, offset=2).tolist() == []
    for offset, length in [(2, 2), (-1, 1), (4, None), (0, -1)]:
        with pytest.raises(DatasetError, match=r"sequence 0 of .*; it has 3"):
            dataset.get(0, offset=offset, length=length)
    with pytest.raises(IndexError, match="no sequence 2; it has 2"):
        dataset.get(2)


def test_strided_slice_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DatasetError, match="slice step 2"):
        IndexedDataset(_write(tmp_path))[::2]


@pytest.mark.parametrize("mmap", [True, False])
def test_pickle_opens_the_files_again(tmp_path: pathlib.Path, mmap: bool) -> None:
    dataset = IndexedDataset(_write(tmp_path), mmap=mmap)
    data = pickle.dumps(dataset)
    assert len(data) < 1000 + len(str(tmp_path))  # a prefix, no tokens
    copy = pickle.loads(data)
    assert copy.path_prefix == dataset.path_prefix
    assert copy[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [member.name for member in DType])
@pytest.mark.parametrize("mmap", [True, False])
def test_every_token_type_comes_back(tmp_path: pathlib.Path, dtype: str, mmap: bool) -> None:
    documents = [[[1, 2], [3]], [], [[]], [[127]]]
    dataset = IndexedDataset(_build(str(tmp_path / "data"), documents, dtype), mmap=mmap)
    assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2], [3], [], [127]]
    assert {tokens.dtype.name for tokens in dataset[:]} == {dtype}
    assert dataset.document_indices.tolist() == [0, 2, 2, 3, 4]


@pytest.mark.parametrize("mmap", [True, False])
def test_empty_dataset(tmp_path: pathlib.Path, mmap: bool) -> None:
    dataset = IndexedDataset(_build(str(tmp_path / "data"), []), mmap=mmap)
    assert len(dataset) == 0
    assert dataset.document_indices.tolist() == [0]


def test_tokens_at_odd_bytes_are_read(tmp_path: pathlib.Path) -> None:
    idx = bytearray(_IDX)
    struct.pack_into("<qq", idx, 42, 1, 7)
    dataset = IndexedDataset(_write(tmp_path, bytes(idx), b"\xff" + _BIN))
    assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2, 3], [4, 5]]


def test_codes_are_those_of_the_format() -> None:
    names = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
    for code, name in enumerate(names, start=1):
        assert DType.code_from_dtype(getattr(np, name)) == code
        assert DType.dtype_from_code(code) is getattr(np, name)
        assert DType.size(code) == DType.size(getattr(np, name)) == np.dtype(name).itemsize
    assert DType.optimal_dtype(65499) is np.uint16
    assert DType.optimal_dtype(65500) is np.int32
    assert DType.optimal_dtype(None) is np.int32
    with pytest.raises(DatasetError, match="complex64 has no code; use one of uint8"):
        DType.code_from_dtype(np.complex64)


def test_add_document_takes_several_sequences(tmp_path: pathlib.Path) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), np.uint16)
    builder.add_document(torch.tensor([1, 2, 3, 4]), [3, 1])
    builder.add_document([], [])
    builder.finalize(get_idx_path(prefix))
    dataset = IndexedDataset(prefix)
    assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2, 3], [4]]
    assert dataset.document_indices.tolist() == [0, 2, 2]


def test_add_index_equals_writing_all_at_once(tmp_path: pathlib.Path) -> None:
    first, second = [[[1, 2, 3]], []], [[[4], [5, 6]], [[]]]
    whole = _build(str(tmp_path / "whole"), first + second)
    pieces = [_build(str(tmp_path / "a"), first), _build(str(tmp_path / "b"), second)]
    merged = str(tmp_path / "merged")
    builder = IndexedDatasetBuilder(get_bin_path(merged), np.uint16)
    for piece in pieces:
        builder.add_index(piece)
    builder.finalize(get_idx_path(merged))
    for path_of in (get_bin_path, get_idx_path):
        assert (
            pathlib.Path(path_of(merged)).read_bytes() == pathlib.Path(path_of(whole)).read_bytes()
        )


def test_multimodal_data_keep_their_modes(tmp_path: pathlib.Path) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), np.uint16, multimodal=True)
    builder.add_item([1, 2], mode=3)
    builder.end_document()
    builder.add_document([4, 5], [1, 1], modes=[0, 7])
    builder.finalize(get_idx_path(prefix))
    assert pathlib.Path(get_idx_path(prefix)).read_bytes()[-3:] == bytes([3, 0, 7])

    dataset = IndexedDataset(prefix, multimodal=True)
    tokens, mode = dataset[2]
    assert (tokens.tolist(), mode) == ([5], 7)
    sequences, modes = dataset[0:2]
    assert ([tokens.tolist() for tokens in sequences], modes.tolist()) == ([[1, 2], [4]], [3, 0])
    assert IndexedDataset(prefix)[2].tolist() == [5]  # readable without its modes

    merged = str(tmp_path / "merged")
    builder = IndexedDatasetBuilder(get_bin_path(merged), np.uint16, multimodal=True)
    builder.add_index(prefix)
    builder.add_index(prefix)
    builder.finalize(get_idx_path(merged))
    modes_twice = IndexedDataset(merged, multimodal=True).sequence_modes
    assert modes_twice is not None and modes_twice.tolist() == [3, 0, 7, 3, 0, 7]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda b, _: b.add_item([70000]), "token 70000 .* does not fit uint16"),
        (lambda b, _: b.add_item([-1]), "token -1 .* does not fit uint16"),
        (lambda b, _: b.add_item([[1]]), r"shape \(1, 1\).*one axis"),
        (lambda b, _: b.add_document([1, 2], [1]), r"lengths \[1\] .* for 2 tokens"),
        (lambda b, _: b.add_document([1], [1], modes=[]), "0 modes are given for 1 sequences"),
        (lambda b, _: (b.add_item([1]), b.finalize("unused")), r"1 sequences belong to no doc"),
        (lambda b, other: b.add_index(other), "holds int32 tokens, .* holds uint16"),
    ],
)
def test_builder_refuses(
    tmp_path: pathlib.Path, misuse: Callable[[IndexedDatasetBuilder, str], Any], message: str
) -> None:
    other = _build(str(tmp_path / "other"), [[[1]]], np.int32)
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), np.uint16)
    with pytest.raises(DatasetError, match=message):
        misuse(builder, other)
    builder.close()


def _patched(position: int, layout: str, value: int) -> bytes:
    idx = bytearray(_IDX)
    struct.pack_into(layout, idx, position, value)
    return bytes(idx)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    ("idx", "position", "expected", "found"),
    [
        (b"", 0, "header of 34 bytes", "end of the file"),
        (_IDX[:33], 33, "header of 34 bytes", "end of the file"),
        (b"NUMPY" + _IDX[5:], 0, "MMIDIDX", "NUMPY"),
        (_patched(9, "<Q", 2), 9, "format version 1", "2"),
        (_patched(17, "<B", 9), 17, "dtype code from 1 to 8", "9"),
        (_patched(26, "<Q", 0), 26, "at least 1 document index entry", "0"),
        (_IDX[:34], 34, "82 bytes .the sequence lengths are cut short", "34 bytes"),
        (_IDX[:50], 50, "82 bytes .the sequence pointers are cut short", "50 bytes"),
        (_IDX[:81], 81, "82 bytes .the document index", "81 bytes"),
        (_IDX + b"x", 82, "the end of the file", "1 more bytes"),
        (_patched(18, "<Q", 1 << 40), 82, "cut short", "82 bytes"),
        (_patched(38, "<i", -1), 38, "sequence length of 0 or more", "-1"),
        (_patched(42, "<q", -2), 42, "sequence 0 within the 10 bytes of .*bin", "bytes -2 to 4"),
        (_patched(50, "<q", 8), 50, "sequence 1 within the 10 bytes of .*bin", "bytes 8 to 12"),
        (_patched(50, "<q", 2**63 - 1), 50, "sequence 1 within", "bytes 9223372036854775807"),
        (_patched(58, "<q", 1), 58, "begins with 0", "1"),
        (_patched(66, "<q", 3), 74, "never falls", "2 after 3"),
        (_patched(74, "<q", 1), 74, "ends with 2, the number of sequences", "1"),
    ],
    ids=range(18),
)
def test_damage_is_located(
    tmp_path: pathlib.Path, idx: bytes, position: int, expected: str, found: str, mmap: bool
) -> None:
    prefix = _write(tmp_path, idx)
    message = rf"data\.idx at byte {position}: .*{expected}.* expected, .*{found}.* found"
    with pytest.raises(DatasetError, match=message):
        IndexedDataset(prefix, mmap=mmap)


@pytest.mark.parametrize("size", [0, 9])
def test_short_token_file_is_named(tmp_path: pathlib.Path, size: int) -> None:
    prefix = _write(tmp_path, bin_=_BIN[:size])
    with pytest.raises(DatasetError, match=rf"within the {size} bytes of .*data\.bin .*short"):
        IndexedDataset(prefix)


def test_token_file_that_shrinks_later_is_an_error(tmp_path: pathlib.Path) -> None:
    dataset = IndexedDataset(_write(tmp_path), mmap=False)
    pathlib.Path(get_bin_path(dataset.path_prefix)).write_bytes(_BIN[:8])
    assert dataset[0].tolist() == [1, 2, 3]
    with pytest.raises(DatasetError, match=r"data\.bin at byte 6: 4 bytes expected, 2 found"):
        dataset[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"nothing\.idx and .*nothing\.bin not found"),
        ("data.bin", r"not found; give the prefix without \.bin: .*data$"),
        ("0.3", "if it is meant as a weight, every prefix needs one"),
    ],
)
def test_missing_files_come_with_a_hint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    _write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert not IndexedDataset.exists(name)
    assert IndexedDataset.exists("data")
    with pytest.raises(DatasetError, match=message):
        IndexedDataset(name)


def test_failing_reads_are_tried_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = IndexedDataset(_write(tmp_path), mmap=False)
    pauses: list[float] = []
    monkeypatch.setattr(index_file.time, "sleep", pauses.append)
    failures = iter([OSError("stale handle"), OSError("stale handle")])
    read = dataset._read_bytes

    def flaky(start: int, num_bytes: int) -> bytes:
        for failure in failures:
            raise failure
        return read(start, num_bytes)

    monkeypatch.setattr(dataset, "_read_bytes", flaky)
    assert dataset[0].tolist() == [1, 2, 3]
    assert pauses == [10, 20]
    failures = iter([OSError("gone")] * 4)
    with pytest.raises(OSError, match="gone"):
        dataset[0]
