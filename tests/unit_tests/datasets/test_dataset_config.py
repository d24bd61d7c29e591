"""Data lists, split strings and settings."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    parse_and_normalize_split,
    split_matrix_of,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import DatasetError, Split, compile_helpers, get_blend_from_list


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (None, None),
        ([], None),
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        (["1", "a"], (["a"], [1.0])),
        (["1", "a", "b"], (["1", "a", "b"], None)),  # odd
        (["1", "a", "b", "c"], (["1", "a", "b", "c"], None)),  # b is no number
    ],
)
def test_data_lists(words: list[str] | None, blend: Any) -> None:
    assert get_blend_from_list(words) == blend


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        ("949,50,1", [0.949, 0.05, 0.001]),
        ("969, 30, 1", [0.969, 0.03, 0.001]),
        ("'99,1,0'", [0.99, 0.01, 0]),
        ('"99,1,0"', [0.99, 0.01, 0]),
        ("1", [1, 0, 0]),
        (".5,.5", [0.5, 0.5, 0]),
    ],
)
def test_split_strings(text: str, fractions: list[float]) -> None:
    assert parse_and_normalize_split(text) == pytest.approx(fractions)


@pytest.mark.parametrize("text", ["", "train", "0,0,0", "1,2,3,4", "1..2,3"])
def test_bad_split_strings(text: str) -> None:
    with pytest.raises(DatasetError, match=f"--split {text!r} is not up to 3 numbers"):
        parse_and_normalize_split(text)


def test_shares_of_sequences() -> None:
    train, valid, test = split_matrix_of([0.949, 0.05, 0.001])
    assert train is not None and train.indices_of(1000) == range(0, 949)
    assert valid is not None and valid.indices_of(1000) == range(949, 999)
    assert test is not None and test.indices_of(1000) == range(999, 1000)
    assert split_matrix_of([0.5, 0.0, 0.5])[1] is None
    assert split_matrix_of([1.0, 0.0, 0.0])[1:] == [None, None]


def test_every_sequence_is_in_one_split() -> None:
    for num_sequences in range(1, 60):
        shares = split_matrix_of(parse_and_normalize_split("969,30,1"))
        chosen = [i for share in shares if share for i in share.indices_of(num_sequences)]
        assert chosen == list(range(num_sequences))


def _config(**options: Any) -> BlendedMegatronDatasetConfig:
    return BlendedMegatronDatasetConfig(**{"random_seed": 1, "sequence_length": 4, **options})


def test_split_has_a_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = _config(blend=(["a"], None))
    assert config.split == "969, 30, 1"
    assert "no --split is given; '969, 30, 1' is used" in caplog.text


def test_without_a_source_data_are_mock() -> None:
    config = _config(split="98,1,1")
    assert config.mock
    assert config.split == "1,1,1"
    assert not _config(blend=(["a"], None), split="1,0,0").mock


def test_blend_per_split() -> None:
    config = _config(blend_per_split=[(["a"], None), None, (["b", "c"], [1.0, 2.0])])
    assert config.split_matrix is None
    assert config.source_of(Split.train) == ((["a"], None), (0.0, 1.0))
    assert config.source_of(Split.valid) is None
    assert config.source_of(Split.test) == ((["b", "c"], [1.0, 2.0]), (0.0, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "--seq-length 0"),
        ({"random_seed": -1}, "--seed -1"),
        ({"num_dataset_builder_threads": 0}, "--num-dataset-builder-threads 0"),
        ({"mid_level_dataset_surplus": -0.1}, "--mid-level-dataset-surplus -0.1"),
        ({"blend": ([], None)}, "without prefixes"),
        ({"blend": (["a"], [1.0, 2.0])}, "2 weights are given for 1 prefixes"),
        ({"blend": (["a", "b"], [1.0, -1.0])}, r"\[1.0, -1.0\] must be finite"),
        ({"blend": (["a", "b"], [1.0, float("nan")])}, "must be finite"),
        ({"blend": (["a", "b"], [0.0, 0.0])}, "not all 0"),
        ({"blend": (["a"], None), "blend_per_split": [None] * 3}, "both given"),
        ({"blend_per_split": [(["a"], None), None, None], "split": "1,0,0"}, "leave --split out"),
        ({"blend_per_split": [None] * 3}, "not all of them None"),
        ({"blend_per_split": [(["a"], None)]}, "has 1 entries; three"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        _config(**options)


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_options_on_eod_need_a_tokenizer(option: str) -> None:
    settings: dict[str, Any] = {option: True}
    with pytest.raises(DatasetError, match="need a tokenizer"):
        GPTDatasetConfig(random_seed=1, sequence_length=4, **settings)


def test_there_is_nothing_to_compile() -> None:
    assert compile_helpers() is None  # type: ignore[func-returns-value]
