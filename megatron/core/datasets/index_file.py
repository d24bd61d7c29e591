"""The index file of a dataset: its layout, reading it with every check, writing it.

`.bin` holds the tokens of all sequences back to back. `.idx`, little endian and without padding:

    offset      type     content
    0           9 bytes  magic "MMIDIDX\\0\\0"
    9           u64      format version, 1
    17          u8       dtype code of the tokens (`DType`)
    18          u64      N, number of sequences
    26          u64      D, entries of the document index = documents + 1
    34          i32[N]   length of each sequence in tokens
    34 + 4N     i64[N]   byte offset of each sequence in .bin
    34 + 12N    i64[D]   first sequence of each document, then N
    then        i8[N]    modality of each sequence, only in multimodal data

Byte 34 is aligned for none of the arrays, so none are read as if they were.
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .utils import DatasetError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_READ_RETRY_PAUSES_S = (10, 20, 40)  # network file systems recover from most hiccups within this


class DType(enum.Enum):
    """Codes of the token types in the index header."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: Any) -> int:
        """Code of a numpy type; `DatasetError` if the format has none for it."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise DatasetError(
                f"token type {name} has no code; use one of {', '.join(cls.__members__)}"
            )
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number[Any]]:
        """Numpy type of a code."""
        return getattr(np, cls(value).name)

    @classmethod
    def size(cls, key: Any) -> int:
        """Bytes per token, from a code or a numpy type."""
        return np.dtype(cls.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @classmethod
    def optimal_dtype(cls, cardinality: int | None) -> type[np.number[Any]]:
        """The type to write for a vocabulary of that many tokens (None: unknown)."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def get_idx_path(path_prefix: str) -> str:
    """Path of the index file."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Path of the token file."""
    return path_prefix + ".bin"


@dataclass(frozen=True)
class Index:
    """Content of an index file; N sequences."""

    dtype: np.dtype[Any]  # of the tokens
    lengths: NDArray[np.int32]  # [N], in tokens
    pointers: NDArray[np.int64]  # [N], byte offsets in the token file
    documents: NDArray[np.int64]  # [documents + 1], first sequence of each, then N
    modes: NDArray[np.int8] | None  # [N], only in multimodal data


def read_index(path_prefix: str, *, multimodal: bool, mmap: bool) -> Index:
    """Read and check the index of a pair; `DatasetError` says which byte is wrong and how."""
    path = get_idx_path(path_prefix)
    data = map_bytes(path) if mmap else with_retries(lambda: np.fromfile(path, np.uint8))
    dtype, num_sequences, num_documents = _read_header(path, data)
    starts = _array_starts(num_sequences, num_documents)
    _check_size(path, len(data), starts, multimodal=multimodal)
    index = Index(
        dtype,
        np.frombuffer(data, "<i4", num_sequences, starts["sequence lengths"]),
        np.frombuffer(data, "<i8", num_sequences, starts["sequence pointers"]),
        np.frombuffer(data, "<i8", num_documents, starts["document index"]),
        np.frombuffer(data, "i1", num_sequences, starts["sequence modes"]) if multimodal else None,
    )
    _check_sequences(path_prefix, index, starts)
    _check_documents(path, index, starts["document index"])
    return index


def write_index(path: str, index: Index) -> None:
    """Write an index file; the arrays may have any integer type that holds their values."""
    code = DType.code_from_dtype(index.dtype)
    num_sequences, num_documents = len(index.lengths), len(index.documents)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_documents))
        file.write(np.asarray(index.lengths, "<i4").tobytes())
        file.write(np.asarray(index.pointers, "<i8").tobytes())
        file.write(np.asarray(index.documents, "<i8").tobytes())
        if index.modes is not None:
            file.write(np.asarray(index.modes, "i1").tobytes())


def _read_header(path: str, data: NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    if len(data) < _HEADER.size:
        raise _damaged(path, len(data), f"a header of {_HEADER.size} bytes", "the end of the file")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(
        data[: _HEADER.size].tobytes()
    )
    if magic != _MAGIC:
        raise _damaged(path, 0, f"magic {_MAGIC!r}", repr(magic))
    if version != _VERSION:
        raise _damaged(path, 9, f"format version {_VERSION}", str(version))
    if code not in {member.value for member in DType}:
        raise _damaged(path, 17, "a dtype code from 1 to 8", str(code))
    if num_documents < 1:
        raise _damaged(path, 26, "at least 1 document index entry", str(num_documents))
    return np.dtype(DType.dtype_from_code(code)).newbyteorder("<"), num_sequences, num_documents


def _array_starts(num_sequences: int, num_documents: int) -> dict[str, int]:
    """First byte of each array, and of what follows the last."""
    sizes = {
        "sequence lengths": 4 * num_sequences,
        "sequence pointers": 8 * num_sequences,
        "document index": 8 * num_documents,
        "sequence modes": num_sequences,
        "end": 0,
    }
    starts = itertools.accumulate(itertools.chain([_HEADER.size], sizes.values()))
    return dict(zip(sizes, starts, strict=False))


def _check_size(path: str, size: int, starts: dict[str, int], *, multimodal: bool) -> None:
    required = starts["end" if multimodal else "sequence modes"]
    if size < required:
        cut = [name for name, start in starts.items() if start <= max(size, _HEADER.size)][-1]
        raise _damaged(path, size, f"{required} bytes (the {cut} are cut short)", f"{size} bytes")
    # Multimodal data may be read without its modes, so they may be there unasked.
    if size not in (required, starts["end"]):
        raise _damaged(path, required, "the end of the file", f"{size - required} more bytes")


def _check_sequences(path_prefix: str, index: Index, starts: dict[str, int]) -> None:
    """Every sequence lies within the token file."""
    path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
    negative = np.flatnonzero(index.lengths < 0)
    if len(negative):
        at = int(negative[0])
        position = starts["sequence lengths"] + 4 * at
        raise _damaged(path, position, "a sequence length of 0 or more", str(index.lengths[at]))
    bin_size = os.path.getsize(bin_path)
    ends = index.pointers + index.lengths.astype(np.int64) * index.dtype.itemsize
    outside = np.flatnonzero((index.pointers < 0) | (ends > bin_size) | (ends < index.pointers))
    if len(outside):
        at = int(outside[0])
        position = starts["sequence pointers"] + 8 * at
        raise _damaged(
            path,
            position,
            f"sequence {at} within the {bin_size} bytes of {bin_path}",
            f"bytes {index.pointers[at]} to {ends[at]} (is {bin_path} cut short?)",
        )


def _check_documents(path: str, index: Index, start: int) -> None:
    """The document index rises from 0 to the number of sequences."""
    documents, num_sequences = index.documents, len(index.lengths)
    if documents[0] != 0:
        raise _damaged(path, start, "a document index that begins with 0", str(documents[0]))
    falling = np.flatnonzero(documents[1:] < documents[:-1])
    if len(falling):
        at = int(falling[0]) + 1
        found = f"{documents[at]} after {documents[at - 1]}"
        raise _damaged(path, start + 8 * at, "a document index that never falls", found)
    if documents[-1] != num_sequences:
        last = start + 8 * (len(documents) - 1)
        expected = f"a document index that ends with {num_sequences}, the number of sequences"
        raise _damaged(path, last, expected, str(documents[-1]))


def _damaged(path: str, position: int, expected: str, found: str) -> DatasetError:
    return DatasetError(f"{path} at byte {position}: {expected} expected, {found} found")


def map_bytes(path: str) -> NDArray[np.uint8]:
    """Memory map of a file."""
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def with_retries(read: Callable[[], T]) -> T:
    """`read()`, again after pauses when the file system fails."""
    for pause in _READ_RETRY_PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            logger.warning("%s; reading again in %d s", error, pause)
            time.sleep(pause)
    return read()
