"""Read training logs: the line that a Megatron-shaped run prints every `--log-interval` iterations.

    [2024-05-01 12:00:00] iteration 100/ 50000 | lm loss: 2.345678E+00 | grad norm: 0.512 | ...

Fields are read by their names, whatever they are, so logs of any version are understood: with or
without a time stamp, with fields missing or added. Around a record there may be anything: rank
prefixes, progress bars, other records on the same physical line. Files are streamed, may be
gzip, and may hold lines of any length.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

LOSS = "lm loss"
ELAPSED_MS = "elapsed time per iteration (ms)"
GRAD_NORM = "grad norm"
LEARNING_RATE = "learning rate"
GLOBAL_BATCH_SIZE = "global batch size"
SKIPPED_ITERATIONS = "number of skipped iterations"
NAN_ITERATIONS = "number of nan iterations"

EXAMPLE = (
    " iteration        1/     100 | consumed samples:           64 | "
    "elapsed time per iteration (ms): 1234.5 | lm loss: 1.037349E+01 |"
)

_HEAD = re.compile(
    r"(?:\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s*)?"
    r"\biteration\s+(?P<iteration>\d+)/\s*(?P<train_iters>\d+)\s*\|"
)
# The first Megatron-LM versions wrote these without a colon.
_FIELD_WITHOUT_COLON = re.compile(
    r"(?P<name>learning rate|loss scale|[a-z]+ loss) +(?P<value>[-+.\dEe]+|nan|inf)"
)
# A line of the argument dump; a word before the name would make it another kind of line.
_ARGUMENT = re.compile(r"(?:^|[:\]|-])\s*(?P<name>[A-Za-z_]\w*) \.{2,} (?P<value>\S.*?)\s*$")
_PADDED_VOCAB = re.compile(
    r"padded vocab \(size: (?P<size>\d+)\) with \d+ dummy tokens \(new size: (?P<padded>\d+)\)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_LINE = 1 << 20  # characters; a longer physical line is cut between records
_LONGEST_HEAD = 200  # characters


class LogError(ValueError):
    """A log cannot be read or compared; the message names the file and what was looked for."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One training line."""

    iteration: int
    train_iters: int
    time: str | None  # as printed
    fields: dict[str, str]  # name -> value as printed, in order

    def number(self, name: str) -> float | None:
        """Value of a field; None if the record lacks it or it is no number."""
        try:
            return float(self.fields[name])
        except (KeyError, ValueError):
            return None


@dataclass(frozen=True)
class TrainingLog:
    """What one log file says about a run."""

    path: Path
    records: tuple[LogRecord, ...]  # one per iteration, in order; the last of several that differ
    arguments: dict[str, str]  # from the argument dump and the line about vocabulary padding
    repeated: tuple[int, ...]  # iterations that were logged more than once, differently

    def argument(self, name: str) -> int | None:
        """An argument of the run as a whole number; None if absent or not one."""
        value = self.arguments.get(name, "")
        return int(value) if value.isdecimal() else None


def read_log(path: str | Path) -> TrainingLog:
    """Read a log file, plain or gzip. Raises LogError if it is unreadable or holds no record."""
    path = Path(path)
    records: dict[int, LogRecord] = {}
    arguments: dict[str, str] = {}
    repeated: set[int] = set()
    try:
        with _open_text(path) as stream:
            for line in _lines(stream):
                for record in parse_records(line):
                    earlier = records.get(record.iteration)
                    if earlier is not None and earlier.fields != record.fields:
                        repeated.add(record.iteration)
                    records[record.iteration] = record
                arguments |= _parse_arguments(line)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged gzip file
        raise LogError(f"{path} cannot be read: {error}") from error
    if not records:
        raise LogError(f"{path} holds no training record; looked for lines like `{EXAMPLE}`")
    ordered = tuple(records[iteration] for iteration in sorted(records))
    return TrainingLog(path, ordered, arguments, tuple(sorted(repeated)))


def parse_records(line: str) -> Iterator[LogRecord]:
    """The records of one physical line, however many it holds."""
    if "iteration" not in line:
        return
    line = _COLOUR.sub("", line)
    heads = list(_HEAD.finditer(line))
    ends = [*(head.start() for head in heads[1:]), len(line)]
    for head, end in zip(heads, ends, strict=False):
        yield LogRecord(
            iteration=int(head["iteration"]),
            train_iters=int(head["train_iters"]),
            time=head["time"],
            fields=_parse_fields(line[head.end() : end]),
        )


def _parse_fields(text: str) -> dict[str, str]:
    """Fields `name: value |` from the start of `text` to the first thing that is none."""
    fields: dict[str, str] = {}
    for segment in text.split("|")[:-1]:  # what follows the last bar may be cut off
        name, colon, value = segment.rpartition(":")
        if not colon:
            old_field = _FIELD_WITHOUT_COLON.fullmatch(segment.strip())
            if old_field is None:
                break
            name, value = old_field["name"], old_field["value"]
        fields.setdefault(sys.intern(" ".join(name.split())), value.strip())
    return fields


def _parse_arguments(line: str) -> dict[str, str]:
    if " .." in line and (argument := _ARGUMENT.search(line)):
        return {argument["name"]: argument["value"]}
    if "padded vocab" in line and (vocab := _PADDED_VOCAB.search(line)):
        return {"vocab_size": vocab["size"], "padded_vocab_size": vocab["padded"]}
    return {}


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    opener = gzip.open if is_gzip else open
    # newline=None: a carriage return, which progress bars write, ends a line too.
    return cast(TextIO, opener(path, "rt", encoding="utf-8", errors="replace", newline=None))


def _lines(stream: TextIO) -> Iterator[str]:
    """Physical lines; one that is too long to hold comes in parts, cut before a record."""
    line = ""
    while part := stream.readline(_LONGEST_LINE):
        line += part
        if line.endswith("\n"):
            yield line
            line = ""
            continue
        # What follows the last head may be half a record, and the end of the text half a head.
        last_head = max((head.start() for head in _HEAD.finditer(line)), default=0)
        cut = last_head or max(0, len(line) - _LONGEST_HEAD)
        yield line[:cut]
        line = line[cut:]
    if line:
        yield line
