"""Reader and builder of the dataset file pair `<prefix>.bin` (tokens) and `<prefix>.idx` (index).

`index_file.py` has the layout.
"""

from __future__ import annotations

import array
import operator
import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .index_file import (
    DType,
    Index,
    get_bin_path,
    get_idx_path,
    map_bytes,
    read_index,
    with_retries,
    write_index,
)
from .utils import DatasetError

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]

_MAX_LENGTH = np.iinfo(np.int32).max  # the index stores lengths as i32


class IndexedDataset:
    """Reads one file pair: `len()` sequences of tokens, grouped into documents.

    `mmap=False` reads with seek and read instead of a memory map, and keeps the index in memory.
    Pickling carries the prefix only; the copy opens the files again. Raises `DatasetError` with
    the file, byte position, expected and found value when a file is damaged.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        self.path_prefix = path_prefix
        self._multimodal = multimodal
        self._mmap = mmap
        self._bin_path = get_bin_path(path_prefix)
        if not self.exists(path_prefix):
            raise DatasetError(_not_found(path_prefix))
        self._index = read_index(path_prefix, multimodal=multimodal, mmap=mmap)
        self._bin = map_bytes(self._bin_path) if mmap else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path_prefix, self._multimodal, self._mmap)

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of the pair exist."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(
            get_bin_path(path_prefix)
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        return self._index.dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens per sequence, [N]."""
        return self._index.lengths

    @property
    def sequence_pointers(self) -> NDArray[np.int64]:
        """Byte offset of each sequence in the token file, [N]."""
        return self._index.pointers

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document, then N; [documents + 1]."""
        return self._index.documents

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """Modality per sequence, [N]; None unless multimodal."""
        return self._index.modes

    def __len__(self) -> int:
        return len(self._index.lengths)

    def __getitem__(self, index: int | slice) -> Any:
        """Tokens of one sequence, or a list of them for a slice without a step; in multimodal
        data a pair of that and the mode(s)."""
        if isinstance(index, slice):
            if index.step not in (None, 1):
                raise DatasetError(
                    f"slice step {index.step} on {self.path_prefix}; only 1 is possible"
                )
            items: Any = [self.get(i) for i in range(*index.indices(len(self)))]
        else:
            items = self.get(index)
        return items if self._index.modes is None else (items, self._index.modes[index])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens [offset, offset + length) of sequence `idx`; to its end without `length`."""
        idx = operator.index(idx)
        if not -len(self) <= idx < len(self):
            raise IndexError(f"{self.path_prefix} has no sequence {idx}; it has {len(self)}")
        available = int(self._index.lengths[idx])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise DatasetError(
                f"tokens {offset} to {offset + count} of sequence {idx} of {self.path_prefix} are "
                f"asked for; it has {available}"
            )
        start = int(self._index.pointers[idx]) + offset * self.dtype.itemsize
        return self._read(start, int(count))

    def _read(self, start: int, count: int) -> NDArray[Any]:
        if self._bin is not None:
            return np.frombuffer(self._bin, self.dtype, count, start)
        num_bytes = count * self.dtype.itemsize
        return np.frombuffer(with_retries(lambda: self._read_bytes(start, num_bytes)), self.dtype)

    def _read_bytes(self, start: int, num_bytes: int) -> bytes:
        # Opened for each read: a descriptor shared by forked workers would share its position.
        with open(self._bin_path, "rb") as file:
            file.seek(start)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise DatasetError(
                f"{self._bin_path} at byte {start}: {num_bytes} bytes expected, {len(data)} found"
            )
        return data


class IndexedDatasetBuilder:
    """Writes a file pair: tokens as they come, the index in `finalize`.

    The token file is written in place; write under another name and rename both files when a
    reader must never see half of it.
    """

    def __init__(self, bin_path: str, dtype: Any = np.int32, multimodal: bool = False) -> None:
        self._bin_path = bin_path
        DType.code_from_dtype(dtype)  # refuses a type that has no code before anything is written
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._multimodal = multimodal
        self._lengths = array.array("i")
        self._pointers = array.array("q")
        self._documents = array.array("q", [0])
        self._modes = array.array("b")
        self._num_bytes = 0
        self._file = open(bin_path, "wb")  # noqa: SIM115  closed by finalize or close

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Append one sequence of tokens."""
        tokens = self._as_tokens(tensor)
        self._file.write(tokens.tobytes())
        self._append_sequences([len(tokens)], [mode])

    def end_document(self) -> None:
        """Close the document: the sequences since the last call belong to it (none is allowed)."""
        self._documents.append(len(self._lengths))

    def add_document(
        self, tensor: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document, given as a flat run of tokens and the lengths of its sequences."""
        tokens = self._as_tokens(tensor)
        if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
            raise DatasetError(
                f"sequence lengths {list(lengths)} are given to {self._bin_path} for "
                f"{len(tokens)} tokens; they must add up"
            )
        self._file.write(tokens.tobytes())
        self._append_sequences(lengths, [0] * len(lengths) if modes is None else modes)
        self.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Append a whole dataset by copying its bytes."""
        other = IndexedDataset(path_prefix, multimodal=self._multimodal)
        if other.dtype != self._dtype:
            raise DatasetError(
                f"{path_prefix} holds {other.dtype.name} tokens, what it is added to holds "
                f"{self._dtype.name}; only datasets of one type can be merged"
            )
        self._check_closed()
        with open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, self._file, length=1 << 24)
        num_sequences = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._pointers.frombytes((other.sequence_pointers + self._num_bytes).tobytes())
        self._documents.frombytes((other.document_indices[1:] + num_sequences).tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        self._num_bytes += os.path.getsize(get_bin_path(path_prefix))

    def finalize(self, idx_path: str) -> None:
        """Close the token file and write the index."""
        self._check_closed()
        self.close()
        index = Index(
            self._dtype,
            np.asarray(self._lengths),
            np.asarray(self._pointers),
            np.asarray(self._documents),
            np.asarray(self._modes) if self._multimodal else None,
        )
        write_index(idx_path, index)

    def close(self) -> None:
        """Close the token file without an index, for giving up."""
        self._file.close()

    def _as_tokens(self, tensor: ArrayLike) -> NDArray[Any]:
        given = np.asarray(tensor)
        if given.ndim != 1:
            raise DatasetError(
                f"tokens of shape {given.shape} for {self._bin_path}; one axis expected"
            )
        if len(given) > _MAX_LENGTH:
            raise DatasetError(f"{len(given)} tokens in one item of {self._bin_path}; split it")
        tokens = given.astype(self._dtype)
        if not np.array_equal(tokens, given):
            wrong = given[tokens != given][0]
            raise DatasetError(
                f"token {wrong} for {self._bin_path} does not fit {self._dtype.name}"
            )
        return tokens

    def _append_sequences(self, lengths: Sequence[int], modes: Sequence[int]) -> None:
        if len(modes) != len(lengths):
            raise DatasetError(f"{len(modes)} modes are given for {len(lengths)} sequences")
        for length in lengths:
            self._lengths.append(length)
            self._pointers.append(self._num_bytes)
            self._num_bytes += length * self._dtype.itemsize
        if self._multimodal:
            self._modes.extend(modes)

    def _check_closed(self) -> None:
        if self._documents[-1] != len(self._lengths):
            raise DatasetError(
                f"{self._bin_path}: {len(self._lengths) - self._documents[-1]} sequences belong to "
                "no document; call end_document() after the last of them"
            )


def _not_found(path_prefix: str) -> str:
    missing = [
        p for p in (get_idx_path(path_prefix), get_bin_path(path_prefix)) if not os.path.isfile(p)
    ]
    message = f"dataset prefix {path_prefix!r}: {' and '.join(missing)} not found"
    stem, extension = os.path.splitext(path_prefix)
    if extension in (".bin", ".idx"):
        return f"{message}; give the prefix without {extension}: {stem}"
    if path_prefix.replace(".", "", 1).isdigit():
        return f"{message}; if it is meant as a weight, every prefix needs one before it"
    return message
