"""Preprocessing in independent partitions, for when one reader and writer cannot keep up.

Each partition is a process with workers of its own. It reads the input files itself and takes its
lines, so no piece of the input is written anywhere; the partitions' datasets are then merged.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pathlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

from megatron.core.datasets.indexed_dataset import DType

from .dataset_files import merge
from .preprocess import EncoderSettings, Report, follow_parent, preprocess
from .text_encoder import PreprocessError
from .text_input import TextInput

Connection = multiprocessing.connection.Connection
Progress = tuple[int, int]  # documents and bytes since the last one


def preprocess_partitions(
    inputs: Sequence[TextInput],
    settings: EncoderSettings,
    folder: pathlib.Path,
    prefixes: Sequence[str],
    *,
    num_workers: int,
    strict: bool,
    on_progress: Callable[[int, int], None],
) -> Report:
    """Preprocess each of `inputs` in its own process with an equal share of the workers, and merge
    the results, in order, into `prefixes` (one per key). `folder` takes the partitions' files."""
    parts = [
        [str(folder / f"partition_{number}_{key}") for key in range(len(prefixes))]
        for number in range(len(inputs))
    ]
    jobs = [
        (lines, settings, part, num_workers // len(inputs), strict)
        for lines, part in zip(inputs, parts, strict=True)
    ]
    reports = _run_together(jobs, on_progress)
    dtype = DType.optimal_dtype(settings.tokenizer().vocab_size)
    for prefix, pieces in zip(prefixes, zip(*parts, strict=True), strict=True):
        merge(pieces, prefix, dtype)
    for report in reports[1:]:
        reports[0].merge(report)
    return reports[0]


def _run_together(
    jobs: Sequence[tuple[Any, ...]], on_progress: Callable[[int, int], None]
) -> list[Report]:
    """Run `_run_partition` on each job, all at once; end all of them when one fails."""
    reports: dict[int, Report] = {}
    numbers: dict[Connection, int] = {}
    with ExitStack() as stack:
        for number, job in enumerate(jobs):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.Process(target=_run_partition, args=(sender, *job))
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            sender.close()  # the process now holds the only one: its death ends the connection
            numbers[receiver] = number
        while numbers:
            for ready in multiprocessing.connection.wait(list(numbers)):
                receiver = cast(Connection, ready)
                message = _receive(receiver, numbers[receiver])
                if isinstance(message, Report):
                    reports[numbers.pop(receiver)] = message
                else:
                    on_progress(*message)
    return [reports[number] for number in range(len(jobs))]


def _receive(receiver: Connection, number: int) -> Progress | Report:
    try:
        message = receiver.recv()
    except EOFError:
        raise PreprocessError(
            f"the process of partition {number} died, most likely killed for want of memory; use "
            "fewer --workers"
        ) from None
    if isinstance(message, Exception):
        raise message
    return message


def _run_partition(sender: Connection, *job: Any) -> None:
    """What a partition's process does; sends progress, and at the end its report or the error."""
    follow_parent()
    lines, settings, prefixes, num_workers, strict = job
    try:
        report = preprocess(
            lines,
            settings,
            prefixes,
            num_workers=num_workers,
            strict=strict,
            on_progress=lambda *progress: sender.send(progress),
        )
        sender.send(report)
    except Exception as error:  # whatever it is, the parent must hear of it
        sender.send(PreprocessError(str(error)))
