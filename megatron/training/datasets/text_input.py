"""Reading lines from JSON-lines files, plain or gzipped."""

from __future__ import annotations

import glob
import gzip
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, cast

from .text_encoder import Line, PreprocessError


@dataclass(frozen=True)
class TextInput:
    """Some lines of some files: those that `range(first, stop, step)` counts, over all files."""

    paths: tuple[str, ...]
    first: int = 0
    stop: int | None = None
    step: int = 1

    def __iter__(self) -> Iterator[Line]:
        return itertools.islice(_lines_of(self.paths), self.first, self.stop, self.step)

    def partitions(self, count: int, *, contiguous: bool) -> list[TextInput]:
        """The lines dealt out in turn, or in contiguous pieces (which takes one pass to count)."""
        for path in self.paths:
            if not os.path.isfile(path):
                raise PreprocessError(
                    f"--input {path} is a pipe or device, which each partition would have to read; "
                    "use --partitions 1"
                )
        if not contiguous:
            return [TextInput(self.paths, index, None, count) for index in range(count)]
        size = -(-sum(1 for _ in self) // count)
        return [
            TextInput(self.paths, index * size, (index + 1) * size, 1) for index in range(count)
        ]


def find_inputs(pattern: str) -> tuple[str, ...]:
    """The files that `--input` names, in name order. Raises PreprocessError if there are none."""
    if os.path.isdir(pattern):
        raise PreprocessError(f"--input {pattern} is a directory; give a file or {pattern}/*.jsonl")
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    if not paths:
        raise PreprocessError(f"--input {pattern}: no such file")
    return tuple(paths)


def total_bytes(paths: Sequence[str]) -> int | None:
    """Bytes of text in the files; None if some are compressed or no regular files."""
    if all(os.path.isfile(path) and not path.endswith(".gz") for path in paths):
        return sum(os.path.getsize(path) for path in paths)
    return None


def _lines_of(paths: Sequence[str]) -> Iterator[Line]:
    for path in paths:
        number = 0
        try:
            with _open(path) as file:
                for number, content in enumerate(file, start=1):
                    yield Line(path, number, content)
        except (OSError, EOFError, zlib.error) as error:
            raise PreprocessError(f"{path} cannot be read behind line {number}: {error}") from error


def _open(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.endswith(".gz") else open(path, "rb")
