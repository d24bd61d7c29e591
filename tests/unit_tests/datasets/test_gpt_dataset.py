"""GPT samples against samples cut by hand; padding, masks, cache, mock data."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import DatasetError, Split

_EOD = 9


class _Sequences:
    """Documents in memory, with the interface of IndexedDataset."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = [np.array(document, np.int64) for document in documents]
        self.sequence_lengths = np.array([len(document) for document in documents], np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        return self._documents[idx][offset : None if length is None else offset + length]


def _tokenizer(**ids: int) -> SimpleNamespace:
    return SimpleNamespace(vocab_size=100, unique_identifiers={"class": "Fake"}, eod=_EOD, **ids)


def _dataset(
    documents: Sequence[Sequence[int]],
    *,
    num_samples: int | None = None,
    split: Split = Split.train,
    tokenizer: Any = None,
    **options: Any,
) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=1234,
        tokenizer=tokenizer or _tokenizer(),
        **{"sequence_length": 4, "split": "1,0,0", "blend": (["x"], None), **options},
    )
    indices = np.arange(len(documents), dtype=np.int32)
    return GPTDataset(_Sequences(documents), None, indices, num_samples, split, config)


def _in_order(dataset: GPTDataset) -> list[dict[str, torch.Tensor]]:
    """Samples in the order of the token stream."""
    return [dataset[int(i)] for i in np.argsort(dataset.shuffle_index)]


def _stream(dataset: GPTDataset, documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for i in dataset.document_index for token in documents[i]]


_DOCUMENTS = [[10, 11, 12, 13, 14], [20, 21, 22], [], [30], [40, 41, 42, 43, 44, 45, 46]]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 15])
@pytest.mark.parametrize("extra", [True, False])
def test_samples_are_consecutive_pieces_of_the_stream(length: int, extra: bool) -> None:
    dataset = _dataset(
        _DOCUMENTS, num_samples=9, sequence_length=length, add_extra_token_to_sequence=extra
    )
    stream = _stream(dataset, _DOCUMENTS)
    assert len(dataset) == (len(stream) - extra) // length >= 9
    for k, sample in enumerate(_in_order(dataset)):
        piece = stream[k * length : (k + 1) * length + extra]
        assert sample["tokens"].tolist() == piece[:length]
        last = [piece[length]] if extra else [0]
        assert sample["labels"].tolist() == piece[1:length] + last
        assert sample["loss_mask"].tolist() == [1.0] * (length - 1) + [float(extra)]
        assert sample["position_ids"].tolist() == list(range(length))


def test_types_and_shapes() -> None:
    sample = _dataset(_DOCUMENTS)[0]
    assert list(sample) == ["tokens", "labels", "loss_mask", "position_ids", "attention_mask"]
    for name in ("tokens", "labels", "position_ids"):
        assert sample[name].dtype == torch.int64 and sample[name].shape == (4,)
    assert sample["loss_mask"].dtype == torch.float32 and sample["loss_mask"].shape == (4,)
    assert sample["attention_mask"].tolist() == [
        [[col > row for col in range(4)] for row in range(4)]
    ]
    assert "attention_mask" not in _dataset(_DOCUMENTS, create_attention_mask=False)[0]


def test_none_is_a_sample_without_loss() -> None:
    dataset = _dataset(_DOCUMENTS)
    sample = dataset[None]
    assert torch.equal(sample["tokens"], dataset[0]["tokens"])
    assert not sample["loss_mask"].any()
    assert dataset[0]["loss_mask"].all()


def test_a_last_partial_validation_sample_is_padded() -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7], []]
    options: dict[str, Any] = {"split": Split.valid, "drop_last_partial_validation_sequence": False}
    dataset = _dataset(documents, **options)
    assert len(dataset) == 2 and len(_dataset(documents, split=Split.valid)) == 1
    assert len(_dataset(documents, **{**options, "split": Split.train})) == 1
    last = _in_order(dataset)[1]
    assert last["tokens"].tolist() == [5, 6, 7, 0]
    assert last["labels"].tolist() == [6, 7, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 0, 0]


def test_loss_is_masked_where_the_label_is_the_tokenizers_pad() -> None:
    dataset = _dataset([[1, 7, 2, 3, 7]], tokenizer=_tokenizer(pad=7))
    (sample,) = _in_order(dataset)
    assert sample["tokens"].tolist() == [1, 0, 2, 3]
    assert sample["labels"].tolist() == [0, 2, 3, 0]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 0]


def test_pad_that_is_also_eod_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    documents, tokenizer = [[1, _EOD, 2, 3, _EOD]], _tokenizer(pad=_EOD)
    with caplog.at_level(logging.WARNING):
        (sample,) = _in_order(_dataset(documents, tokenizer=tokenizer))
    assert "pad id 9 is also its eod id" in caplog.text
    assert sample["labels"].tolist() == [_EOD, 2, 3, _EOD]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 1]
    (allowed,) = _in_order(
        _dataset(documents, tokenizer=tokenizer, allow_ambiguous_pad_tokens=True)
    )
    assert allowed["loss_mask"].tolist() == [0, 1, 1, 0]


_WITH_EOD = [[1, _EOD, 2, 3, _EOD, _EOD, 4, 5, 6]]  # eight tokens and the last label


def test_eod_mask_loss_looks_at_tokens() -> None:
    (sample,) = _in_order(_dataset(_WITH_EOD, sequence_length=8, eod_mask_loss=True))
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0, 1, 1]
    assert sample["position_ids"].tolist() == list(range(8))


def test_positions_restart_behind_eod() -> None:
    (sample,) = _in_order(_dataset(_WITH_EOD, sequence_length=8, reset_position_ids=True))
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert sample["loss_mask"].all()


def test_attention_does_not_cross_eod() -> None:
    (sample,) = _in_order(_dataset(_WITH_EOD, sequence_length=8, reset_attention_mask=True))
    document = [0, 0, 1, 1, 1, 2, 3, 3]
    expected = [[j > i or document[j] != document[i] for j in range(8)] for i in range(8)]
    assert sample["attention_mask"].tolist() == [expected]


def test_shortest_sequence_with_all_options() -> None:
    dataset = _dataset(
        [[_EOD, 2]],
        sequence_length=1,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    sample = dataset[0]
    assert sample["position_ids"].tolist() == [0]
    assert sample["loss_mask"].tolist() == [0]
    assert sample["attention_mask"].tolist() == [[[False]]]


@pytest.mark.parametrize("options", [{}, {"eod_mask_loss": True, "reset_attention_mask": True}])
def test_a_consumer_may_change_a_sample(options: dict[str, bool]) -> None:
    dataset = _dataset(_WITH_EOD, sequence_length=2, **options)
    before = [{name: value.clone() for name, value in dataset[i].items()} for i in range(4)]
    for i in range(4):
        sample = dataset[i]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            sample[name].zero_()
    dataset[None]
    for i in range(4):
        for name, value in dataset[i].items():
            assert torch.equal(value, before[i][name]), name


def test_a_tokenizer_without_end_token_is_refused_at_once() -> None:
    class NoEod(SimpleNamespace):
        @property
        def eod(self) -> int:
            raise ValueError("no eod token")

    tokenizer = NoEod(vocab_size=100, unique_identifiers={})
    assert len(_dataset(_DOCUMENTS, tokenizer=tokenizer)) == 3
    with pytest.raises(ValueError, match="no eod token"):
        _dataset(_DOCUMENTS, tokenizer=tokenizer, eod_mask_loss=True)


def test_tiny_data_are_repeated() -> None:
    dataset = _dataset([[5]], num_samples=3)
    assert len(dataset) >= 3
    assert all(sample["tokens"].tolist() == [5] * 4 for sample in _in_order(dataset))


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_no_tokens_is_an_error_with_numbers(documents: list[list[int]]) -> None:
    message = rf"needs 3 samples of 4 tokens, .* is {len(documents)} of .* sequences with 0 tokens"
    with pytest.raises(DatasetError, match=message):
        _dataset(documents, num_samples=3)
    assert len(_dataset(documents)) == 0  # one epoch of nothing


# The cache


def _on_disk(folder: pathlib.Path, documents: Sequence[Sequence[int]] = _DOCUMENTS) -> str:
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(folder / "data.idx"))
    return str(folder / "data")


def _cached(prefix: str, cache: pathlib.Path | None = None, **options: Any) -> GPTDataset:
    config = GPTDatasetConfig(
        sequence_length=4,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=_tokenizer(),
        path_to_cache=None if cache is None else str(cache),
        **{"random_seed": 1234, **options},
    )
    sequences = GPTDataset.build_low_level_dataset(prefix, config)
    indices = np.arange(GPTDataset.numel_low_level_dataset(sequences), dtype=np.int32)
    return GPTDataset(sequences, prefix, indices, 10, Split.train, config)


def test_cache_files_are_named_as_megatron_does(tmp_path: pathlib.Path) -> None:
    dataset = _cached(_on_disk(tmp_path))
    (description,) = (tmp_path / "data/cache/GPTDataset_indices").glob("*-description.txt")
    base = description.name.removesuffix("-description.txt")
    assert len(base.removesuffix("-GPTDataset-train")) == 32
    assert {path.name for path in description.parent.iterdir()} == {
        f"{base}-{suffix}"
        for suffix in (
            "description.txt",
            "document_index.npy",
            "sample_index.npy",
            "shuffle_index.npy",
        )
    }
    fields = json.loads(description.read_text())
    assert list(fields)[:9] == [
        "class",
        "dataset_path",
        "num_samples",
        "index_split",
        "random_seed",
        "sequence_length",
        "split",
        "split_matrix",
        "tokenizer",
    ]
    assert (fields["class"], fields["num_samples"], fields["index_split"]) == (
        "GPTDataset",
        10,
        "train",
    )
    assert fields["tokenizer"] == {"class": "Fake"}
    saved = np.load(description.with_name(f"{base}-shuffle_index.npy"))
    assert saved.tolist() == dataset.shuffle_index.tolist()


def test_second_build_reads_the_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, cache = _on_disk(tmp_path), tmp_path / "cache"
    built = _cached(prefix, cache)
    monkeypatch.setattr(GPTDataset, "_build_index", lambda self: pytest.fail("built again"))
    loaded = _cached(prefix, cache)
    assert isinstance(loaded.shuffle_index, np.memmap)
    for i in range(len(built)):
        assert torch.equal(loaded[i]["tokens"], built[i]["tokens"])


@pytest.mark.parametrize(
    "options", [{"random_seed": 5}, {"add_extra_token_to_sequence": False}], ids=str
)
def test_other_settings_are_another_cache(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    prefix, cache = _on_disk(tmp_path), tmp_path / "cache"
    _cached(prefix, cache)
    _cached(prefix, cache, **options)
    assert len(list(cache.glob("*-description.txt"))) == 2


def test_data_written_anew_do_not_meet_an_old_cache(tmp_path: pathlib.Path) -> None:
    prefix, cache = _on_disk(tmp_path), tmp_path / "cache"
    _cached(prefix, cache)
    turned = _DOCUMENTS[::-1]  # as many tokens and documents as before
    dataset = _cached(_on_disk(tmp_path, turned), cache)
    stream = _stream(dataset, turned)
    for k, sample in enumerate(_in_order(dataset)):
        assert sample["tokens"].tolist() == stream[4 * k : 4 * k + 4]


# Mock data


def test_mock_documents_follow_the_rule() -> None:
    sequences = MockGPTLowLevelDataset(SimpleNamespace(vocab_size=50, eod=49))
    lengths = np.random.default_rng(seed=0).integers(low=1, high=4096, size=100000, dtype=np.int32)
    assert np.array_equal(sequences.sequence_lengths, lengths)
    number = int(np.flatnonzero(lengths > 100)[0])
    document = sequences[number]
    assert len(document) == lengths[number] and document[-1] == 49
    assert document[:-1].tolist() == [i % 50 for i in range(1, lengths[number])]
    assert sequences.get(number, offset=98, length=4).tolist() == [49, 0, 1, 2]
    shortest = int(lengths.argmin())
    assert lengths[shortest] == 1 and sequences[shortest].tolist() == [49]


def test_mock_data_need_a_tokenizer() -> None:
    config = GPTDatasetConfig(random_seed=1, sequence_length=4)
    with pytest.raises(DatasetError, match="mock data need a tokenizer"):
        MockGPTDataset.build_low_level_dataset(None, config)
    with pytest.raises(DatasetError, match="give --data-path, or --mock-data"):
        GPTDataset.build_low_level_dataset(None, config)
