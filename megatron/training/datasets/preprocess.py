"""Text files -> dataset files: lines are encoded by worker processes and written in their order.

input ──lines──▶ chunks of 32 ──▶ worker processes ──▶ in order ──▶ one builder per key
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from .sentences import sentence_splitter
from .text_encoder import BadLineError, Document, Line, PreprocessError, TextEncoder, Tokenizer

_CHUNK_SIZE = 32  # lines a worker is handed at a time
_CHUNKS_PER_WORKER = 4  # in flight: enough to keep workers busy, few enough to bound memory
_SHOWN_PLACES = 10


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """All that a worker process needs to build its encoder."""

    tokenizer: Callable[[], Tokenizer]
    keys: Sequence[str]
    append_eod: bool = False
    split_sentences: bool = False
    language: str = "english"
    keep_newlines: bool = False

    def build(self) -> TextEncoder:
        """Raises a ValueError for a tokenizer or sentence model that cannot be had."""
        split = None
        if self.split_sentences:
            split = sentence_splitter(self.language, keep_newlines=self.keep_newlines)
        return TextEncoder(self.tokenizer(), self.keys, append_eod=self.append_eod, split=split)


class BadLine(NamedTuple):
    """Where a line without a document is, and why it is one."""

    place: str
    reason: str


@dataclass
class Report:
    """What became of the lines."""

    num_documents: int = 0
    num_bytes: int = 0
    num_empty: int = 0  # documents without tokens under one key at least
    bad_places: dict[str, list[str]] = field(default_factory=dict)  # reason -> first places
    bad_counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def add_bad(self, line: BadLine) -> None:
        self.bad_counts[line.reason] += 1
        places = self.bad_places.setdefault(line.reason, [])
        if len(places) < _SHOWN_PLACES:
            places.append(line.place)

    def merge(self, other: Report) -> None:
        """Add what happened to the lines of another partition."""
        self.num_documents += other.num_documents
        self.num_bytes += other.num_bytes
        self.num_empty += other.num_empty
        self.bad_counts += other.bad_counts
        for reason, places in other.bad_places.items():
            mine = self.bad_places.setdefault(reason, [])
            mine += places[: _SHOWN_PLACES - len(mine)]

    def to_text(self) -> str:
        """A line on the whole and one for each kind of bad line."""
        lines = [
            f"{self.num_documents} documents written, {self.num_empty} of them without tokens; "
            f"{self.bad_counts.total()} bad lines left out"
        ]
        for reason, count in self.bad_counts.most_common():
            more = ", ..." if count > len(self.bad_places[reason]) else ""
            lines.append(f"  {count} x {reason}: {', '.join(self.bad_places[reason])}{more}")
        return "\n".join(lines)


class _EncodedChunk(NamedTuple):
    """What a worker returns for a chunk of lines."""

    documents: list[list[Document]]  # for each good line, one document per key
    bad: list[BadLine]
    num_bytes: int


def preprocess(
    lines: Iterable[Line],
    settings: EncoderSettings,
    prefixes: Sequence[str],
    *,
    num_workers: int,
    strict: bool = False,
    on_progress: Callable[[int, int], None] = lambda num_documents, num_bytes: None,
) -> Report:
    """Encode `lines` and write one dataset for each key, under `prefixes`.

    A line without documents is left out of all datasets and reported; with `strict` the first one
    raises PreprocessError. `on_progress` is told of the documents and bytes since the last call.
    """
    dtype = DType.optimal_dtype(settings.tokenizer().vocab_size)
    report = Report()
    with contextlib.ExitStack() as stack:
        builders = [IndexedDatasetBuilder(get_bin_path(prefix), dtype) for prefix in prefixes]
        for builder in builders:
            stack.callback(builder.close)
        chunks = stack.enter_context(
            contextlib.closing(_encode_in_order(lines, settings, num_workers))
        )
        for chunk in chunks:
            if strict and chunk.bad:
                raise PreprocessError(f"{chunk.bad[0].place} {chunk.bad[0].reason} (--strict)")
            _write(chunk, builders, report)
            on_progress(len(chunk.documents), chunk.num_bytes)
        for builder, prefix in zip(builders, prefixes, strict=True):
            builder.finalize(get_idx_path(prefix))
    return report


def _write(chunk: _EncodedChunk, builders: Sequence[IndexedDatasetBuilder], report: Report) -> None:
    for documents in chunk.documents:
        for builder, document in zip(builders, documents, strict=True):
            builder.add_document(document.tokens, document.lengths)
        report.num_empty += any(not document.lengths for document in documents)
    report.num_documents += len(chunk.documents)
    report.num_bytes += chunk.num_bytes
    for line in chunk.bad:
        report.add_bad(line)


def _encode_in_order(
    lines: Iterable[Line], settings: EncoderSettings, num_workers: int
) -> Generator[_EncodedChunk, None, None]:
    """Chunks as the workers encode them, in the order of the lines, with few in flight."""
    # No Event: its lock would outlive a worker that is killed while holding it.
    stop = multiprocessing.RawValue("b", 0)
    pool = ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(settings, stop))
    pending: collections.deque[tuple[Line, Future[_EncodedChunk]]] = collections.deque()
    try:
        remaining = iter(lines)
        while chunk := list(itertools.islice(remaining, _CHUNK_SIZE)):
            pending.append((chunk[0], pool.submit(_encode_chunk, chunk)))
            if len(pending) >= _CHUNKS_PER_WORKER * num_workers:
                yield pending[0][1].result()
                pending.popleft()
        while pending:
            yield pending[0][1].result()
            pending.popleft()
    except BrokenProcessPool:
        raise PreprocessError(
            f"a worker process died behind {pending[0][0].place}, most likely killed for want of "
            "memory; use fewer --workers"
        ) from None
    finally:
        stop.value = 1  # after a failure, workers leave their chunks unfinished
        pool.shutdown(cancel_futures=True)


# A worker process has one encoder, built when the process starts.
_encoder: TextEncoder
_stop: Any  # a shared number, 1 when the parent has given up


def _start_worker(settings: EncoderSettings, stop: Any) -> None:
    follow_parent()
    global _encoder, _stop
    _encoder, _stop = settings.build(), stop


def _encode_chunk(lines: list[Line]) -> _EncodedChunk:
    documents, bad = [], []
    for line in lines:
        if _stop.value:
            break
        try:
            documents.append(_encoder.encode(line))
        except BadLineError as error:
            bad.append(BadLine(line.place, str(error)))
    return _EncodedChunk(documents, bad, sum(len(line.content) for line in lines))


def follow_parent() -> None:
    """Let this child process live and die with its parent.

    Ctrl-C reaches all processes of a terminal; only the parent acts on it and ends its children.
    A parent that is killed cannot, so a thread watches for that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def exit_after_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()
