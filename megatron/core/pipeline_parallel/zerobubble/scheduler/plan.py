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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .instruction import Instruction, Op, ScheduleError
from .placement import Placement, Slot

Program = tuple[Instruction, ...]

_HEADER = "# pipeline plan"


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
        fields: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            stripped = line.split("#", 1)[0].strip()
            if not stripped:
                continue
            key, colon, value = stripped.partition(":")
            if not colon or key in fields:
                problem = "is given twice" if colon else "has no 'key: value' form"
                raise ScheduleError(f"{source} line {number}: {stripped[:60]!r} {problem}")
            fields[key.strip()] = value.strip()
        try:
            return cls._from_fields(fields)
        except (KeyError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ScheduleError(f"{source}: {reason}") from None

    @classmethod
    def _from_fields(cls, fields: dict[str, str]) -> Plan:
        slots = [Slot(*map(int, text.split("."))) for text in fields["placement"].split()]
        placement = Placement(tuple(slots))
        programs = [
            [Instruction.parse(word) for word in fields[f"rank {rank}"].split()]
            for rank in range(placement.num_ranks)
        ]
        return cls.of(fields["schedule"], placement, int(fields["microbatches"]), programs)

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(self.to_text())

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Plan:
        return cls.from_text(pathlib.Path(path).read_text(), source=str(path))
