"""Order of a blend: the published vector, the rule evaluated by hand, exact use of every part."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset, blend_order, count_within
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import DatasetError, Split


class _Part:
    """A dataset of `(name, number)` samples."""

    index_split = Split.train

    def __init__(self, name: str, size: int) -> None:
        self.dataset_path = name
        self.unique_identifiers = {"name": name, "size": size}
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        assert 0 <= idx < self._size
        return {"sample": (self.dataset_path, idx)}


def _blend(
    sizes: Sequence[int], weights: Sequence[float], size: int | None, cache: Any = None
) -> BlendedDataset:
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1, path_to_cache=cache)
    parts: Any = [_Part("abcdef"[k], n) for k, n in enumerate(sizes)]
    return BlendedDataset(parts, weights, size, config)


def test_vector() -> None:
    order = blend_order([0.5, 0.3, 0.2], 10)
    assert order.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert count_within(order, 3).tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert order.dtype == np.int16 and count_within(order, 3).dtype == np.int64


@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    size=st.integers(0, 60),
)
def test_order_is_that_of_the_rule(weights: list[int], size: int) -> None:
    total = sum(weights)
    counts = [0] * len(weights)
    for i, chosen in enumerate(blend_order(weights, size)):
        deficits = [w / total * max(i, 1) - n for w, n in zip(weights, counts, strict=True)]
        assert chosen == deficits.index(max(deficits))
        counts[chosen] += 1
    # No part is ever a whole sample ahead of its share.
    assert all(n < w / total * size + 1 for w, n in zip(weights, counts, strict=True))


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_without_a_size_every_sample_appears_once(sizes: list[int]) -> None:
    blend = _blend(sizes, sizes, None)
    assert len(blend) == sum(sizes)
    seen = [blend[i]["sample"] for i in range(len(blend))]
    assert sorted(seen) == [("abcdef"[k], i) for k, n in enumerate(sizes) for i in range(n)]


def test_weight_zero_is_never_chosen() -> None:
    assert blend_order([0, 1, 0], 4).tolist() == [1, 1, 1, 1]


def test_used_up_parts_are_passed_over() -> None:
    assert blend_order([9, 1], 5, limits=[2, 3]).tolist() == [0, 1, 0, 1, 1]
    assert blend_order([1, 1], 2, limits=[0, 2]).tolist() == [1, 1]


def test_samples_say_where_they_are_from() -> None:
    blend = _blend([10, 10, 10], [0.5, 0.3, 0.2], 10)
    assert [blend[i]["dataset_id"] for i in range(4)] == [0, 1, 2, 0]
    assert [blend[i]["sample"] for i in range(4)] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert blend[-1]["sample"] == ("a", 4)
    with pytest.raises(IndexError):
        blend[10]


def test_a_part_that_is_too_short_is_named() -> None:
    with pytest.raises(DatasetError, match="needs 5 train samples of a, which has 4; lower"):
        _blend([4, 10], [1, 1], 10)


@pytest.mark.parametrize(("num_parts", "num_weights"), [(0, 0), (2, 1), (32768, 32768)])
def test_number_of_parts(num_parts: int, num_weights: int) -> None:
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1)
    parts: Any = [_Part("a", 1)] * num_parts
    with pytest.raises(DatasetError, match=f"{num_weights} weights are given for {num_parts} data"):
        BlendedDataset(parts, [1.0] * num_weights, 1, config)


def test_cached_only_where_a_path_is_given(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    built = _blend([10, 10], [3, 7], 10)
    assert not list(tmp_path.iterdir())
    _blend([10, 10], [3, 7], 10, str(tmp_path))
    suffixes = {path.name[32:] for path in tmp_path.iterdir()}
    assert suffixes == {
        "-BlendedDataset-train-description.txt",
        "-BlendedDataset-train-dataset_index.npy",
        "-BlendedDataset-train-dataset_sample_index.npy",
    }
    monkeypatch.setattr(BlendedDataset, "_build_index", lambda self: pytest.fail("built again"))
    loaded = _blend([10, 10], [3, 7], 10, str(tmp_path))
    assert [loaded[i] for i in range(10)] == [built[i] for i in range(10)]
