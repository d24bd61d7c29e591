"""tools/merge_datasets.py: what it merges, and what it refuses."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tools import merge_datasets


def _write(prefix: pathlib.Path, documents: list[list[int]], dtype: Any = np.uint16) -> None:
    prefix.parent.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def _merge(folder: pathlib.Path, output: pathlib.Path, *more: str) -> int:
    return merge_datasets.main(["--input", str(folder), "--output-prefix", str(output), *more])


def test_merges_in_name_order(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces, output = tmp_path / "pieces", tmp_path / "new" / "all"
    _write(pieces / "b", [[4, 5]])
    _write(pieces / "a", [[1], [2, 3]])
    _write(pieces / "a.1", [[], [9]])
    (pieces / "notes.txt").write_text("not a dataset")
    tool = [sys.executable, merge_datasets.__file__]
    subprocess.run([*tool, "--input", pieces, "--output-prefix", output], check=True)
    dataset = IndexedDataset(str(output))
    assert [tokens.tolist() for tokens in dataset[:]] == [[1], [2, 3], [], [9], [4, 5]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(list(output.parent.iterdir())) == 2
    assert _merge(pieces, output) == 0  # again: replaces the result
    assert "merged 3 datasets" in (shown := capsys.readouterr().out)
    assert "5 documents, 5 sequences, 6 tokens" in shown


def test_merges_modes(tmp_path: pathlib.Path) -> None:
    for name, mode in (("a", 1), ("b", 2)):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), multimodal=True)
        builder.add_item([5], mode=mode)
        builder.end_document()
        builder.finalize(str(tmp_path / f"{name}.idx"))
    output = tmp_path / "out" / "all"
    assert _merge(tmp_path, output, "--multimodal") == 0
    modes = IndexedDataset(str(output), multimodal=True).sequence_modes
    assert modes is not None and modes.tolist() == [1, 2]


def _two_types(folder: pathlib.Path) -> None:
    _write(folder / "a", [[1]])
    _write(folder / "b", [[2]], np.int32)


def _half_a_pair(folder: pathlib.Path) -> None:
    _write(folder / "a", [[1]])
    (folder / "b.idx").touch()


def _damaged(folder: pathlib.Path) -> None:
    _write(folder / "a", [[1]])
    _write(folder / "b", [[1, 2, 3]])
    (folder / "b.bin").write_bytes(b"\x01\x00")


def _own_output(folder: pathlib.Path) -> None:
    _write(folder / "a", [[1]])
    _write(folder / "out", [[1]])


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "holds no .bin and .idx files"),
        (lambda folder: folder.rmdir(), "is not a directory"),
        (_half_a_pair, "b.idx has no b.bin beside it"),
        (_two_types, "b holds int32 tokens, what it is added to holds uint16"),
        (_damaged, "sequence 0 within the 2 bytes of"),
        (_own_output, "out is one of the datasets to merge"),
    ],
    ids=range(6),
)
def test_refuses(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], prepare: Any, message: str
) -> None:
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    prepare(pieces)
    before = sorted(tmp_path.rglob("*"))
    output = pieces / "out" if prepare is _own_output else tmp_path / "out"
    assert _merge(pieces, output) == 1
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
