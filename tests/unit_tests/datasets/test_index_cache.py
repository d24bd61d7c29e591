"""The index cache: damage, read-only folders, many processes at once."""

from __future__ import annotations

import logging
import multiprocessing
import pathlib
import time
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.index_cache import IndexCache

_SHAPES = {"small": (3,), "large": (200_000,)}


def _build() -> dict[str, Any]:
    return {"small": np.arange(3), "large": np.arange(200_000)}


def _cache(folder: pathlib.Path) -> IndexCache:
    return IndexCache(folder, "Name-train", "what it is made from")


def _no_build() -> dict[str, Any]:
    pytest.fail("built again")


def test_missing_is_built_then_loaded(tmp_path: pathlib.Path) -> None:
    cache = _cache(tmp_path / "deep" / "folder")
    first = cache.load_or_build(_SHAPES, _build)
    again = cache.load_or_build(_SHAPES, _no_build)
    for name in _SHAPES:
        assert isinstance(first[name], np.memmap) and isinstance(again[name], np.memmap)
        assert np.array_equal(again[name], _build()[name])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not numpy"),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: np.save(path, np.arange(5)),
        lambda path: path.unlink(),
    ],
    ids=["empty", "other", "cut", "shape", "gone"],
)
def test_damaged_is_built_again_with_a_warning(
    tmp_path: pathlib.Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _cache(tmp_path)
    cache.load_or_build(_SHAPES, _build)
    damage(cache.path("large.npy"))
    with caplog.at_level(logging.WARNING):
        arrays = cache.load_or_build(_SHAPES, _build)
    assert f"{cache.path('large.npy')} is damaged and is built again" in caplog.text
    assert np.array_equal(arrays["large"], np.arange(200_000))
    cache.load_or_build(_SHAPES, _no_build)


def test_an_index_without_description_is_not_trusted(tmp_path: pathlib.Path) -> None:
    cache = _cache(tmp_path)
    cache.load_or_build(_SHAPES, _build)
    cache.path("description.txt").unlink()
    np.save(cache.path("small.npy"), np.zeros(3, np.int64))  # a builder that died half-way
    assert cache.load_or_build(_SHAPES, _build)["small"].tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    with caplog.at_level(logging.WARNING):
        arrays = _cache(tmp_path / "file").load_or_build(_SHAPES, _build)
    assert "is not cached" in caplog.text and "--data-cache-path" in caplog.text
    assert arrays["small"].tolist() == [0, 1, 2]


def test_empty_arrays_are_cached(tmp_path: pathlib.Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"none": (0,)}
    cache = _cache(tmp_path)
    cache.load_or_build(shapes, lambda: {"none": np.zeros(0, np.int32)})
    assert cache.load_or_build(shapes, _no_build)["none"].shape == (0,)


def _build_repeatedly(folder: pathlib.Path, barrier: Any, results: Any) -> None:
    try:
        for run in range(10):
            cache = IndexCache(folder, "Name-train", f"run {run}")
            barrier.wait(timeout=30)
            arrays = cache.load_or_build(_SHAPES, _build_slowly)
            assert all(np.array_equal(arrays[name], _build()[name]) for name in _SHAPES)
        results.put(None)
    except BaseException as error:
        barrier.abort()
        results.put(repr(error))


def _build_slowly() -> dict[str, Any]:
    time.sleep(0.01)  # so that all of them find nothing and build
    return _build()


def test_many_processes_at_once(tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_build_repeatedly, args=(tmp_path, barrier, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [None] * 4
    for process in processes:
        process.join()
    assert not list(tmp_path.glob("*.tmp"))
    assert len(list(tmp_path.iterdir())) == 10 * 3
