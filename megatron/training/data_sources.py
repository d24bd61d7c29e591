"""Which data a run reads: from the command line's data flags to what the dataset config takes."""

from __future__ import annotations

import argparse
import json
import pathlib
import shlex
from typing import Any, NamedTuple

from megatron.core.datasets.utils import DatasetError, get_blend_from_list

_DEFAULT_SPLIT = "969, 30, 1"
_SPLITS = ("train", "valid", "test")


class DataSource(NamedTuple):
    """One of: one blend cut by `split`; a blend for each of train, valid, test; nothing (mock)."""

    blend: Any = None
    blend_per_split: list[Any] | None = None
    split: str | None = None


def data_source_of(args: argparse.Namespace) -> DataSource:
    """The source that the flat arguments name (spec section 1.5).

    Raises DatasetError, naming the flag, for a file that does not hold what it should.
    """
    if args.mock_data:
        return DataSource(split="1,1,1")
    if args.per_split_data_args_path is not None:
        lists = _read_per_split(args.per_split_data_args_path)
        return DataSource(blend_per_split=[get_blend_from_list(lists.get(s)) for s in _SPLITS])
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if any(paths is not None for paths in per_split):
        return DataSource(blend_per_split=[get_blend_from_list(paths) for paths in per_split])
    paths = args.data_path
    if args.data_args_path is not None:
        paths = _read_words(args.data_args_path)
    return DataSource(blend=get_blend_from_list(paths), split=args.split or _DEFAULT_SPLIT)


def _read_per_split(path: str) -> dict[str, list[str]]:
    text = _read(path, "--per-split-data-args-path")
    try:
        lists = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"--per-split-data-args-path {path} is not JSON: {error}") from None
    valid = isinstance(lists, dict) and set(lists) <= set(_SPLITS)
    if not valid or not all(_is_list_of_words(words) for words in lists.values()):
        raise DatasetError(
            f"--per-split-data-args-path {path} must hold an object with lists under "
            f"{', '.join(_SPLITS)}; a list has what would follow --train-data-path"
        )
    return {split: [str(word) for word in words] for split, words in lists.items()}


def _is_list_of_words(words: Any) -> bool:
    return isinstance(words, list) and all(isinstance(w, (str, int, float)) for w in words)


def _read_words(path: str) -> list[str]:
    text = _read(path, "--data-args-path")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise DatasetError(f"--data-args-path {path}: {error}") from None


def _read(path: str, flag: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError as error:
        raise DatasetError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{flag} {path} cannot be read: it is not text") from None
