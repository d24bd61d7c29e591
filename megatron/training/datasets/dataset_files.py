"""Making dataset files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)


@contextlib.contextmanager
def staging_folder(output_prefix: str) -> Iterator[pathlib.Path]:
    """A hidden folder beside the output to write files in; it is gone afterwards, come what may
    (short of SIGKILL). `publish` moves a finished dataset out of it."""
    parent = pathlib.Path(output_prefix).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    name = pathlib.Path(output_prefix).name
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}.unfinished-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged_prefix: str, final_prefix: str) -> None:
    """Move a finished dataset to its name, replacing one that is there.

    The old index goes first and the new one comes last: at no moment does an index stand beside
    tokens that are not its own.
    """
    pathlib.Path(get_idx_path(final_prefix)).unlink(missing_ok=True)
    os.replace(get_bin_path(staged_prefix), get_bin_path(final_prefix))
    os.replace(get_idx_path(staged_prefix), get_idx_path(final_prefix))


def merge(pieces: Sequence[str], prefix: str, dtype: Any, *, multimodal: bool = False) -> None:
    """Write the datasets `pieces`, one behind the other, as the dataset `prefix`."""
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype, multimodal=multimodal)
    try:
        for piece in pieces:
            builder.add_index(piece)
        builder.finalize(get_idx_path(prefix))
    finally:
        builder.close()
