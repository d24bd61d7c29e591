"""From a config to train, valid and test datasets, in one process."""

from __future__ import annotations

import logging
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset, blend_order
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
    part_sizes,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import DatasetError, get_blend_from_list

_TOKENIZER = SimpleNamespace(vocab_size=100, eod=99, unique_identifiers={"class": "Fake"})


def _write(folder: pathlib.Path, name: str, num_documents: int, first_token: int = 0) -> str:
    """Documents of five equal tokens: first_token, first_token + 1, ..."""
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), np.uint16)
    for number in range(num_documents):
        builder.add_document([first_token + number] * 5, [5])
    builder.finalize(str(folder / f"{name}.idx"))
    return str(folder / name)


def _build(cls: Any = GPTDataset, sizes: Any = (1, 1, 1), **options: Any) -> list[Any]:
    config = GPTDatasetConfig(
        **{"random_seed": 1234, "sequence_length": 4, "tokenizer": _TOKENIZER, **options}
    )
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


def _tokens(dataset: Any) -> set[int]:
    return {int(token) for sample in dataset for token in sample["tokens"]}


def test_one_dataset_is_split_by_documents(tmp_path: pathlib.Path) -> None:
    prefix = _write(tmp_path, "a", 10)
    train, valid, test = _build(sizes=(20, 5, 3), blend=([prefix], None), split="6,3,1")
    assert (_tokens(train), _tokens(valid), _tokens(test)) == (set(range(6)), {6, 7, 8}, {9})
    assert len(train) >= 20 and len(valid) >= 5 and len(test) >= 3
    assert all(type(dataset) is GPTDataset for dataset in (train, valid, test))


def test_no_share_and_no_samples_are_no_dataset(tmp_path: pathlib.Path) -> None:
    blend = ([_write(tmp_path, "a", 10)], None)
    train, valid, test = _build(blend=blend, split="'99,1,0'", sizes=(1, 0, 5))
    assert train is not None and valid is None and test is None


def test_nothing_is_built_where_nothing_is_read(tmp_path: pathlib.Path) -> None:
    config = GPTDatasetConfig(random_seed=1, sequence_length=4, blend=(["none"], None), split="1")
    builder = BlendedMegatronDatasetBuilder(GPTDataset, (1, 1, 1), lambda: False, config)
    assert builder.build() == [None, None, None]


def test_weighted_blend(tmp_path: pathlib.Path) -> None:
    blend = get_blend_from_list(
        ["3", _write(tmp_path, "a", 10), "1", _write(tmp_path, "b", 10, first_token=50)]
    )
    train, valid, test = _build(blend=blend, split="8,1,1", sizes=(40, 8, 4))
    assert isinstance(train, BlendedDataset)
    assert (len(train), len(valid), len(test)) == (40, 8, 4)
    ids = [sample["dataset_id"] for sample in train]
    assert (ids.count(0), ids.count(1)) == (30, 10)
    for sample in train:
        assert all((token >= 50) == sample["dataset_id"] for token in sample["tokens"].tolist())
    # ceil(ceil(size * weight) * 1.005)
    assert [part.num_samples for part in train.datasets] == [31, 11]
    assert [part.num_samples for part in _build(
        blend=blend, split="1", sizes=(40, 0, 0), mid_level_dataset_surplus=0.5
    )[0].datasets] == [45, 15]  # fmt: skip


def test_blend_without_weights_takes_each_part_once(tmp_path: pathlib.Path) -> None:
    prefixes = [_write(tmp_path, "a", 9), _write(tmp_path, "b", 5, first_token=50)]
    blend = get_blend_from_list(prefixes)
    # 45 and 25 tokens: 11 and 6 samples of 4 tokens and a label.
    (all_of_it, _, _) = _build(blend=blend, split="1,0,0", sizes=(1000, 0, 0))
    assert len(all_of_it) == 17
    seen = [sample["dataset_id"] for sample in all_of_it]
    assert (seen.count(0), seen.count(1)) == (11, 6)
    assert len(_build(blend=blend, split="1,0,0", sizes=(5, 0, 0))[0]) == 5
    assert len(_build(blend=blend, split="1,0,0", sizes=(None, 0, 0))[0]) == 17


def test_blend_per_split(tmp_path: pathlib.Path) -> None:
    a, b = _write(tmp_path, "a", 4), _write(tmp_path, "b", 4, first_token=50)
    train, valid, test = _build(
        blend_per_split=[
            get_blend_from_list(["1", a, "1", b]),
            None,
            get_blend_from_list([b]),
        ],
        sizes=(8, 8, 3),
    )
    assert isinstance(train, BlendedDataset) and valid is None and type(test) is GPTDataset
    assert _tokens(train) == {0, 1, 2, 3, 50, 51, 52, 53}
    assert _tokens(test) == {50, 51, 52, 53}


def test_mock_data() -> None:
    train, valid, test = _build(MockGPTDataset, sizes=(10, 5, None), sequence_length=4096)
    assert all(type(dataset) is MockGPTDataset for dataset in (train, valid, test))
    # A third of the documents each: one epoch of the test set is its 33333 documents.
    lengths = train.dataset.sequence_lengths
    assert len(test) == (int(lengths[66667:].sum()) - 1) // 4096
    assert int(train[0]["tokens"].max()) < 100


def test_threads_build_the_same(tmp_path: pathlib.Path) -> None:
    words = [w for k in range(4) for w in ("1", _write(tmp_path, f"part{k}", 5, first_token=9 * k))]
    blend = get_blend_from_list(words)
    alone, threaded = (
        _build(blend=blend, split="1", sizes=(20, 0, 0), num_dataset_builder_threads=n)[0]
        for n in (1, 4)
    )
    assert [s["tokens"].tolist() for s in alone] == [s["tokens"].tolist() for s in threaded]


def test_tiny_data_work_or_say_what_is_missing(tmp_path: pathlib.Path) -> None:
    blend = ([_write(tmp_path, "a", 3)], None)
    train, valid, test = _build(blend=blend, split="1,1,1", sizes=(100, 20, 10))
    assert len(train) >= 100 and len(valid) >= 20 and len(test) >= 10
    with pytest.raises(
        DatasetError, match=r"valid dataset of .*a needs 20 samples of 4 tokens.* is 0 of 3 sequ"
    ):
        _build(blend=blend, split="969,30,1", sizes=(100, 20, 10))
    with pytest.raises(DatasetError, match=r"the valid split of .*a has 0 sequences and not one"):
        _build(blend=blend, split="969,30,1", sizes=(100, None, 0))


def test_parts_without_a_sample_are_left_out_of_a_blend_of_whole_parts(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    blend = get_blend_from_list([_write(tmp_path, "empty", 0), _write(tmp_path, "a", 2)])
    with caplog.at_level(logging.WARNING):
        (train, _, _) = _build(blend=blend, split="1", sizes=(1, 0, 0))
    assert "empty has no train sample and is left out" in caplog.text
    assert len(train) == 1 and _tokens(train) <= {0, 1}


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, -1)])
def test_bad_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(DatasetError, match=r"three .train, valid, test. of 0 or more"):
        _build(MockGPTDataset, sizes=sizes)


def test_parts_are_large_enough_for_any_blend() -> None:
    random = np.random.default_rng(0)
    grown = 0
    for _ in range(200):
        weights = (lambda w: w / w.sum())(random.random(random.integers(2, 60)) ** 4).tolist()
        size = int(random.integers(1, 300))
        targets = [int(np.ceil(size * weight)) for weight in weights]
        sizes = part_sizes(weights, targets, 0.005)
        rule = [int(np.ceil(target * 1.005)) for target in targets]
        used = np.bincount(blend_order(weights, sum(targets)), minlength=len(weights))
        assert sizes == np.maximum(rule, used).tolist()
        grown += sizes != rule
    assert grown > 0  # the rule alone is too small for some of them
