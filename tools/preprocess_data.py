r"""Turn JSON-lines text into the dataset files that training reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod --workers 4

writes corpus_text_document.bin and .idx; train with --data-path corpus_text_document. Each line of
the input is a JSON object; each --json-keys value is a string, or a list of strings that become
sequences of one document. A line that is not like that is left out and reported at the end. The
files appear when all is done, or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.cli import REQUIRED, ArgumentGroup, add_group, arg, from_namespace
from megatron.training.config.data import TokenizerArguments
from megatron.training.datasets.dataset_files import publish, staging_folder
from megatron.training.datasets.partitions import preprocess_partitions
from megatron.training.datasets.preprocess import EncoderSettings, Report, preprocess
from megatron.training.datasets.text_encoder import PreprocessError
from megatron.training.datasets.text_input import TextInput, find_inputs, total_bytes


@dataclass(frozen=True, kw_only=True)
class PreprocessArguments(ArgumentGroup):
    """Input and output"""

    input: str = arg(REQUIRED, "JSON-lines file or glob of files, plain or .gz.")
    json_keys: tuple[str, ...] = arg(("text",), "Keys to extract; each makes one dataset.")
    split_sentences: bool = arg(False, "Make each sentence a sequence; needs nltk.")
    keep_newlines: bool = arg(False, "Keep line breaks between sentences when splitting.")
    lang: str = arg("english", "Language of the sentence splitter.")
    append_eod: bool = arg(False, "End each document with the tokenizer's end token.")
    output_prefix: str = arg(REQUIRED, "Output is <prefix>_<key>_document.bin and .idx.")
    workers: int | None = arg(
        None, "Worker processes, a multiple of --partitions (required).", at_least=1
    )
    partitions: int = arg(
        1, "Pieces read and written by processes of their own, then merged.", at_least=1
    )
    keep_sequential_samples: bool = arg(
        False, "Partitions are contiguous pieces, so that the input's order is kept."
    )
    log_interval: int = arg(1000, "Documents between progress lines.", at_least=1)
    strict: bool = arg(False, "Stop at the first bad line instead of leaving it out.")
    find_optimal_num_workers: bool = arg(
        False, "Time --workers-to-check on --max-documents lines, and write nothing."
    )
    workers_to_check: tuple[int, ...] = arg((16, 32, 64), "Numbers of workers to time.", at_least=1)
    max_documents: int = arg(100000, "Lines to time numbers of workers on.", at_least=1)

    def problems(self) -> Iterator[str]:
        if self.input is None:
            yield "--input is missing; name a JSON-lines file"
        if self.output_prefix is None:
            yield "--output-prefix is missing; say where the dataset goes"
        if len(set(self.json_keys)) != len(self.json_keys):
            yield f"--json-keys {' '.join(self.json_keys)} names a key twice"
        if self.find_optimal_num_workers:
            return
        if self.workers is None:
            yield f"--workers is missing; this machine has {os.cpu_count()} processors"
        elif self.workers % self.partitions:
            yield (
                f"--workers {self.workers} is not a multiple of --partitions {self.partitions}; "
                "each partition gets an equal number of workers"
            )

    def prefix_of(self, key: str) -> str:
        """Prefix of the dataset of a key."""
        level = "sentence" if self.split_sentences else "document"
        return f"{self.output_prefix}_{key}_{level}"


class Progress:
    """Shows on stderr how far the work is: a bar on a terminal with tqdm, else lines."""

    def __init__(self, log_interval: int, num_bytes: int | None) -> None:
        self._log_interval = log_interval
        self._total_bytes = num_bytes
        self._start = time.monotonic()
        self._documents = self._bytes = 0
        self._bar: Any = None

    def add(self, num_documents: int, num_bytes: int) -> None:
        """Count what was done since the last call."""
        intervals = self._documents // self._log_interval
        self._documents += num_documents
        self._bytes += num_bytes
        # The bar starts with the first documents: before that, worker processes are forked.
        if self._bar is None:
            self._bar = _progress_bar(self._total_bytes)
        if self._bar is not None:
            self._bar.set_postfix(documents=self._documents, refresh=False)
            self._bar.update(num_bytes)
        elif self._documents // self._log_interval > intervals:
            seconds = time.monotonic() - self._start
            print(
                f"Processed {self._documents} documents ({self._documents / seconds:.2f} docs/s, "
                f"{self._bytes / 2**20 / seconds:.2f} MB/s).",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _progress_bar(num_bytes: int | None) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=num_bytes, unit="B", unit_scale=True, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for an error (shown on stderr), 130 for Ctrl-C."""
    start = time.monotonic()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        args, settings = _parse_args(argv)
        paths = find_inputs(args.input)
        settings.build()  # refuses before any work what the workers could not do
        for path in paths:
            print(f"Opening {path}")
        if args.find_optimal_num_workers:
            _time_numbers_of_workers(args, settings, TextInput(paths))
            return 0
        print(f"Processing data with {args.workers} workers.")
        print(f"Time to startup: {time.monotonic() - start}", flush=True)
        report = _preprocess_files(args, settings, TextInput(paths))
        print(report.to_text())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing is written", file=sys.stderr)
        return 130


def _parse_args(argv: Sequence[str] | None) -> tuple[PreprocessArguments, EncoderSettings]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_group(parser, PreprocessArguments)
    add_group(parser, TokenizerArguments)
    namespace = parser.parse_args(argv)
    args = from_namespace(PreprocessArguments, namespace)
    settings = EncoderSettings(
        tokenizer=functools.partial(build_tokenizer, from_namespace(TokenizerArguments, namespace)),
        keys=args.json_keys,
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        language=args.lang,
        keep_newlines=args.keep_newlines,
    )
    return args, settings


def _preprocess_files(
    args: PreprocessArguments, settings: EncoderSettings, lines: TextInput
) -> Report:
    """Write the datasets of all keys; on any failure, none."""
    assert args.workers is not None, "checked in PreprocessArguments.problems"
    finals = [args.prefix_of(key) for key in args.json_keys]
    for final in finals:
        pathlib.Path(final).parent.mkdir(parents=True, exist_ok=True)
    with (
        staging_folder(args.output_prefix) as folder,
        contextlib.closing(Progress(args.log_interval, total_bytes(lines.paths))) as progress,
    ):
        staged = [str(folder / str(number)) for number in range(len(finals))]
        options: dict[str, Any] = {
            "num_workers": args.workers,
            "strict": args.strict,
            "on_progress": progress.add,
        }
        if args.partitions == 1:
            report = preprocess(lines, settings, staged, **options)
        else:
            inputs = lines.partitions(args.partitions, contiguous=args.keep_sequential_samples)
            report = preprocess_partitions(inputs, settings, folder, staged, **options)
        if report.num_documents == 0:
            raise PreprocessError(f"--input {args.input} holds no document\n{report.to_text()}")
        for staged_prefix, final in zip(staged, finals, strict=True):
            publish(staged_prefix, final)
    return report


def _time_numbers_of_workers(
    args: PreprocessArguments, settings: EncoderSettings, lines: TextInput
) -> None:
    """Print how fast each number of workers is, and the fastest."""
    speeds: dict[int, float] = {}
    for num_workers in args.workers_to_check:
        with staging_folder(args.output_prefix) as folder:
            staged = [str(folder / str(number)) for number in range(len(args.json_keys))]
            start = time.monotonic()
            some = itertools.islice(lines, args.max_documents)
            report = preprocess(some, settings, staged, num_workers=num_workers)
        speeds[num_workers] = report.num_documents / (time.monotonic() - start)
        print(f"{num_workers} workers: {speeds[num_workers]:.2f} docs/s", flush=True)
    best = max(speeds, key=lambda num_workers: speeds[num_workers])
    print(f"The optimal number of workers is {best}.")


def _exit_on_signal(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)  # unwinds, so that unfinished files are removed


if __name__ == "__main__":
    sys.exit(main())
