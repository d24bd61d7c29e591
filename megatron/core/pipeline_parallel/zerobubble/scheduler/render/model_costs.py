"""Costs of a model that can be cut for any placement, so that schedules can be compared fairly.

Two kinds: `EqualRanks` (the same figures for every rank) and `StageCosts` (unequal stages, from a
JSON file). A file holds one JSON object:

    {
      "forward":     [21.0, 18.5, 18.5, 24.0],      per stage in model order, in microseconds
      "input_grad":  [18.0, 18.0, 18.0, 23.5],
      "weight_grad": [ 9.5,  9.3,  9.3, 14.6],
      "transfer":    0.6,                           one message between two ranks
      "held_f_to_b": [1, 1, 1, 1],                  optional: memory from F to B, any unit
      "held_b_to_w": [0.4, 0.4, 0.4, 0.4],          optional: memory from B to W
      "embedding":   {"forward": 0.2, "weight_grad": 0.2},          optional
      "head":        {"forward": 5.5, "input_grad": 5.5, "weight_grad": 5.3}   optional
    }

The lists have one entry per rank, or a multiple of that. A placement with another number of stages
is served by cutting the model anew: each given stage is a run of layers over which its cost is
spread evenly, and stage s of S takes the part from s/S to (s+1)/S of the whole model. `embedding`
and `head` name the part of the first and last entry that is not spread over layers: it stays whole
in the first and in the last stage. Totals are the same for every placement.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..costs import Costs
from ..instruction import ScheduleError
from ..placement import Placement

_TIMES = ("forward", "input_grad", "weight_grad")
_MEMORY = ("held_f_to_b", "held_b_to_w")
_PARTS = ("embedding", "head")


class ModelCosts(Protocol):
    """What a model costs, for any placement."""

    def cut(self, placement: Placement) -> Costs: ...


@dataclass(frozen=True, kw_only=True)
class EqualRanks:
    """One micro-batch through all layers of one rank, the same for every rank."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0
    held_f_to_b: float = 1.0
    held_b_to_w: float = 1.0

    def cut(self, placement: Placement) -> Costs:
        return Costs.uniform(placement, **vars(self))


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs given for some number of stages; see the module's docstring for the cut."""

    lists: Mapping[str, tuple[float, ...]]  # name in Costs -> one entry per given stage
    transfer: float = 0.0
    per_rank: EqualRanks = field(default_factory=EqualRanks)  # memory, where `lists` has none
    embedding: Mapping[str, float] = field(default_factory=dict)  # part of the first entries
    head: Mapping[str, float] = field(default_factory=dict)  # part of the last entries

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.lists.items()}
        if len(set(lengths.values())) != 1:
            raise ScheduleError(f"the lists have different lengths: {lengths}")
        for name, values in self.lists.items():
            embedding, head = self.embedding.get(name, 0.0), self.head.get(name, 0.0)
            first, last = (values[0], values[-1]) if len(values) > 1 else (values[0],) * 2
            if embedding > first or head > last or embedding + head > sum(values):
                raise ScheduleError(
                    f"embedding has {embedding:g} and head {head:g} of {name}, more than its "
                    f"first and last entries, {first:g} and {last:g}, which they are parts of"
                )

    def cut(self, placement: Placement) -> Costs:
        given = len(self.lists["forward"])
        if given % placement.num_ranks:
            raise ScheduleError(
                f"costs are given for {given} stages, but there are {placement.num_ranks} ranks; "
                "give one entry per rank, or a multiple of that"
            )
        cut = {name: self._cut(name, placement.num_stages) for name in self.lists}
        equal = self.per_rank.cut(placement)
        memory = {name: cut.get(name, getattr(equal, name)) for name in _MEMORY}
        times = {name: cut[name] for name in _TIMES}
        return Costs(transfer=self.transfer, **times, **memory)

    def _cut(self, name: str, num_stages: int) -> tuple[float, ...]:
        if num_stages == len(self.lists[name]):
            return self.lists[name]
        embedding, head = self.embedding.get(name, 0.0), self.head.get(name, 0.0)
        body = list(self.lists[name])
        body[0] -= embedding
        body[-1] -= head
        stages = _spread(body, num_stages)
        stages[0] += embedding
        stages[-1] += head
        return tuple(stages)


def _spread(values: Sequence[float], num_parts: int) -> list[float]:
    """`values` lie end to end on a line, each spread evenly; cut the line into equal parts."""
    # In units of 1 / (len(values) * num_parts) of the line all borders are whole numbers.
    num_values = len(values)
    parts = []
    for part in range(num_parts):
        start, end = part * num_values, (part + 1) * num_values
        overlaps = (
            (max(0, min(end, (k + 1) * num_parts) - max(start, k * num_parts)), value)
            for k, value in enumerate(values)
        )
        parts.append(math.fsum(length / num_parts * value for length, value in overlaps))
    return parts


def load_stage_costs(path: str | pathlib.Path, per_rank: EqualRanks | None = None) -> StageCosts:
    """Read a costs file. The memory of `per_rank` stands in for lists that the file lacks.

    Raises ScheduleError, naming the file, for anything it does not understand.
    """
    try:
        return _parse(json.loads(pathlib.Path(path).read_text()), per_rank or EqualRanks())
    except OSError as error:
        raise ScheduleError(f"costs file {path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScheduleError(f"costs file {path} is not JSON: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"costs file {path}: {error}") from None


def _parse(data: Any, per_rank: EqualRanks) -> StageCosts:
    if not isinstance(data, dict):
        raise ScheduleError("the file holds no JSON object")
    known = (*_TIMES, "transfer", *_MEMORY, *_PARTS)
    for name in data:
        if name not in known:
            raise ScheduleError(f"{name!r} is unknown; use {', '.join(known)}")
    given = (*_TIMES, *(name for name in _MEMORY if name in data))
    return StageCosts(
        lists={name: _numbers(data, name) for name in given},
        transfer=_number(data.get("transfer", 0.0), "transfer"),
        per_rank=per_rank,
        **{name: _part(data, name) for name in _PARTS},
    )


def _numbers(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = data.get(name)
    if not isinstance(values, list) or not values:
        raise ScheduleError(f"{name} is {values!r}; it must be a list, one number per stage")
    return tuple(_number(value, name) for value in values)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScheduleError(f"{name} has {value!r}, which is not a number")
    if not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{name} has {value}; costs are finite and not below 0")
    return float(value)


def _part(data: Mapping[str, Any], name: str) -> dict[str, float]:
    part = data.get(name, {})
    if not isinstance(part, dict) or not set(part) <= {*_TIMES, *_MEMORY}:
        raise ScheduleError(
            f"{name} is {part!r}; it must be an object with some of {', '.join(_TIMES + _MEMORY)}"
        )
    return {key: _number(value, f"{name}.{key}") for key, value in part.items()}
