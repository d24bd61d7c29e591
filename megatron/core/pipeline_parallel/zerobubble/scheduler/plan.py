"""A plan: every rank's list of instructions, the placement they assume, and a text form.

The text form is what `tools/plan_schedule.py --save` writes and `--pipeline-schedule FILE` reads:

    # pipeline plan
    schedule: 1f1b
    microbatches: 2
    placement: 0.0 1.0
    rank 0: 0F0 0F1 0BW0 0BW1
    rank 1: 1F0 1BW0 1F1 1BW1

`placement` lists `<rank>.<chunk>` for each stage in model order.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .instruction import Instruction, Op, ScheduleError
from .placement import Placement, Slot

Program = tuple[Instruction, ...]

_HEADER = "# pipeline plan"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What each rank runs, in order. Immutable; `validate` says whether it can run."""

    schedule: str  # the name it was planned under, or the user's own
    placement: Placement
    num_microbatches: int
    programs: tuple[Program, ...]  # one per rank

    @classmethod
    def of(
        cls,
        schedule: str,
        placement: Placement,
        num_microbatches: int,
        programs: Sequence[Sequence[Instruction]],
    ) -> Plan:
        return cls(schedule, placement, num_microbatches, tuple(tuple(p) for p in programs))

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def forward_only(self) -> bool:
        """Whether this is an evaluation plan: forwards and nothing else."""
        return all(ins.op is Op.F for ins in self.instructions())

    def instructions(self) -> Iterator[Instruction]:
        for program in self.programs:
            yield from program

    def to_text(self) -> str:
        slots = " ".join(f"{slot.rank}.{slot.chunk}" for slot in self.placement.slots)
        lines = [
            _HEADER,
            f"schedule: {self.schedule}",
            f"microbatches: {self.num_microbatches}",
            f"placement: {slots}",
        ]
        lines += [
            f"rank {rank}: " + " ".join(map(str, program))
            for rank, program in enumerate(self.programs)
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, source: str = "plan") -> Plan:
        """Read the text form; a `ScheduleError` names `source` and the first bad line."""
        fields = _read_fields(text, source)
        microbatches = _take(fields, "microbatches", source)
        placement = _take(fields, "placement", source).read(_read_placement)
        programs = [
            _take(fields, f"rank {rank}", source).read(_read_program)
            for rank in range(placement.num_ranks)
        ]
        schedule = _take(fields, "schedule", source).text
        for name, field in fields.items():
            raise ScheduleError(
                f"{field.where}: {name!r} is not a field of a plan whose placement "
                f"has {placement.num_ranks} ranks"
            )
        return cls.of(schedule, placement, microbatches.read(_read_count), programs)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the text form."""
        pathlib.Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        """Read a plan file; a `ScheduleError` names the file and what is wrong with it."""
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ScheduleError(f"plan file {path} cannot be read: {reason}") from None
        return cls.from_text(text, source=str(path))


class _Field(NamedTuple):
    """The value of one line of a plan file."""

    text: str
    where: str  # file and line, for messages

    def read(self, reader: Callable[[str], _T]) -> _T:
        try:
            return reader(self.text)
        except ScheduleError as error:
            raise ScheduleError(f"{self.where}: {error}") from None


def _read_fields(text: str, source: str) -> dict[str, _Field]:
    fields: dict[str, _Field] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        name, colon, value = (part.strip() for part in content.partition(":"))
        where = f"{source} line {number}"
        if not colon:
            raise ScheduleError(f"{where}: {content[:60]!r} is not of the form 'name: value'")
        if name in fields:
            raise ScheduleError(f"{where}: {name!r} is given twice")
        fields[name] = _Field(value, where)
    return fields


def _take(fields: dict[str, _Field], name: str, source: str) -> _Field:
    if name not in fields:
        raise ScheduleError(f"{source}: the line '{name}: ...' is missing")
    return fields.pop(name)


def _read_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ScheduleError(f"microbatches is {text!r}; it must be a number from 1")
    return int(text)


def _read_placement(text: str) -> Placement:
    slots = []
    for word in text.split():
        match = re.fullmatch(r"(\d+)\.(\d+)", word)
        if match is None:
            raise ScheduleError(f"{word!r} is not a slot; write it as <rank>.<chunk>, such as 0.1")
        slots.append(Slot(int(match[1]), int(match[2])))
    return Placement(tuple(slots))


def _read_program(text: str) -> list[Instruction]:
    return [Instruction.parse(word) for word in text.split()]
