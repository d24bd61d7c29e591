"""Small names shared by the datasets."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class DatasetError(ValueError):
    """A dataset file, or what was asked of a dataset, is wrong; the message says what to change."""


class Split(enum.Enum):
    """The three uses of data; the values index `[train, valid, test]` lists."""

    train = 0
    valid = 1
    test = 2


class Blend(NamedTuple):
    """Dataset prefixes and their weights; without weights each prefix contributes one epoch."""

    prefixes: list[str]
    weights: list[float] | None


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Read what follows `--data-path`: prefixes, or `weight prefix weight prefix ...`.

    The list is weighted if its length is even and everything at the weights' places is a number.
    """
    if not blend:
        return None
    weights = [_as_number(text) for text in blend[0::2]]
    numbers = [weight for weight in weights if weight is not None]
    if len(blend) % 2 == 0 and len(numbers) == len(weights):
        return Blend(list(blend[1::2]), numbers)
    return Blend(list(blend), None)


def compile_helpers() -> None:
    """Do nothing. Kept because Megatron's launch scripts call it: the index builders here are
    numpy and need no compiler on any node."""


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
