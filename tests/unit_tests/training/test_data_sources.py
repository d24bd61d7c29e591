"""Which data the flags name, in every way of naming them; and what is wrong with such a file."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import pytest

from megatron.core.datasets.utils import Blend, DatasetError
from megatron.training.data_sources import DataSource, data_source_of


def _source(**given: Any) -> DataSource:
    nothing = {
        "mock_data": False,
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_args_path": None,
        "per_split_data_args_path": None,
        "split": None,
    }
    return data_source_of(argparse.Namespace(**{**nothing, **given}))


def test_one_list_is_cut_by_the_split() -> None:
    source = _source(data_path=["a", "b"], split="98,2,0")
    assert source == DataSource(blend=Blend(["a", "b"], None), split="98,2,0")
    weighted = _source(data_path=["0.3", "a", "0.7", "b"], split="1,0,0")
    assert weighted.blend == Blend(["a", "b"], [0.3, 0.7])


def test_without_a_split_megatrons_default_is_taken() -> None:
    assert _source(data_path=["a"]).split == "969, 30, 1"


def test_a_file_holds_what_would_follow_data_path(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "paths"
    file.write_text('0.25 first\n0.75 "with space"\n')
    source = _source(data_args_path=str(file), split="9,1,0")
    assert source == DataSource(blend=Blend(["first", "with space"], [0.25, 0.75]), split="9,1,0")


def test_a_list_for_each_split_or_some() -> None:
    source = _source(train_data_path=["a"], test_data_path=["1", "b", "3", "c"])
    train, valid, test = Blend(["a"], None), None, Blend(["b", "c"], [1.0, 3.0])
    assert source == DataSource(blend_per_split=[train, valid, test])
    assert source.split is None, "there is nothing to cut"


def test_a_json_file_with_a_list_for_each_split(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [2, "a"], "valid": ["b"]}))
    source = _source(per_split_data_args_path=str(file))
    assert source == DataSource(blend_per_split=[Blend(["a"], [2.0]), Blend(["b"], None), None])


def test_mock_data_have_thirds() -> None:
    assert _source(mock_data=True) == DataSource(split="1,1,1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "must hold an object with lists under train, valid, test"),
        ('{"training": ["a"]}', "must hold an object with lists under train, valid, test"),
        ('{"train": "a"}', "must hold an object with lists under train, valid, test"),
        ('{"train": ["a", ["b"]]}', "must hold an object with lists under train, valid, test"),
    ],
)
def test_a_json_file_that_is_not_that_is_named(
    tmp_path: pathlib.Path, text: str, problem: str
) -> None:
    file = tmp_path / "splits.json"
    file.write_text(text)
    with pytest.raises(DatasetError) as caught:
        _source(per_split_data_args_path=str(file))
    assert str(caught.value).startswith(f"--per-split-data-args-path {file} {problem}")


@pytest.mark.parametrize("name", ["data_args_path", "per_split_data_args_path"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(DatasetError, match=f"^{flag} .*/none cannot be read: No such file"):
        _source(**{name: str(tmp_path / "none")})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match=f"^{flag} .*/binary cannot be read: it is not text"):
        _source(**{name: str(binary)})


def test_quotes_that_do_not_close_are_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "paths"
    file.write_text('1 "first')
    with pytest.raises(DatasetError, match=r"^--data-args-path .*/paths: No closing quotation"):
        _source(data_args_path=str(file))
