"""Indices kept on disk, named by what they were built from.

Many processes, and two runs, may build the same index at once: every file is written under a name
of its own and renamed, the description last, and all of them write the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]


class IndexCache:
    """Arrays in `<directory>/<md5>-<name>-<array>.npy`, with `<md5>-<name>-description.txt`
    beside them; the md5 is that of the description."""

    def __init__(self, directory: str | pathlib.Path, name: str, description: str) -> None:
        self._directory = pathlib.Path(directory)
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        self._base = f"{digest}-{name}"
        self._description = description

    def load_or_build(
        self, shapes: Mapping[str, tuple[int, ...]], build: Callable[[], Arrays]
    ) -> Arrays:
        """The arrays named in `shapes` (array name -> its shape), memory mapped.

        What is missing is built, what is damaged is built again with a warning. Where the
        directory cannot be written to, the arrays stay in memory, also with a warning.
        """
        cached = self._load(shapes)
        if cached is not None:
            return cached
        arrays = build()
        try:
            self._save(arrays)
        except OSError as error:
            logger.warning(
                "the dataset index is not cached, each process builds its own: %s; "
                "--data-cache-path names a directory for it",
                error,
            )
            return arrays
        return self._load(shapes) or arrays

    def path(self, suffix: str) -> pathlib.Path:
        """File of the index that ends in `suffix`, such as `description.txt`."""
        return self._directory / f"{self._base}-{suffix}"

    def _load(self, shapes: Mapping[str, tuple[int, ...]]) -> Arrays | None:
        # The description is written last: without it nothing is complete.
        if not self.path("description.txt").is_file():
            return None
        arrays = {}
        for part, shape in shapes.items():
            path = self.path(f"{part}.npy")
            try:
                arrays[part] = np.load(path, mmap_mode="r", allow_pickle=False)
                if arrays[part].shape != shape:
                    raise ValueError(f"shape {shape} expected, {arrays[part].shape} found")
            except (OSError, ValueError, EOFError) as error:
                logger.warning("cached index %s is damaged and is built again: %s", path, error)
                return None
        return arrays

    def _save(self, arrays: Arrays) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for part, array in arrays.items():
            self._write(f"{part}.npy", functools.partial(np.save, arr=array))
        self._write("description.txt", lambda file: file.write(self._description.encode()))

    def _write(self, suffix: str, write: Callable[[Any], object]) -> None:
        path = self.path(suffix)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                write(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
