"""Many lines through worker processes: order, memory, failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.datasets.dataset_files import publish, staging_folder
from megatron.training.datasets.partitions import preprocess_partitions
from megatron.training.datasets.preprocess import BadLine, EncoderSettings, Report, preprocess
from megatron.training.datasets.text_encoder import Line, PreprocessError
from megatron.training.datasets.text_input import TextInput, find_inputs


class _Tokenizer:
    """Ids are the numbers in the text; some words do something else."""

    vocab_size = 1000
    eod = 999

    def tokenize(self, text: str) -> list[int]:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            time.sleep(3600)
        if text == "slow":
            time.sleep(0.2)
            return [7]
        return [int(word) for word in text.split()]


_SETTINGS = EncoderSettings(tokenizer=_Tokenizer, keys=["text"])


def _line(number: int, text: str) -> Line:
    return Line("in.jsonl", number, json.dumps({"text": text}).encode())


def _file(folder: pathlib.Path, texts: list[str], name: str = "in.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def _preprocess(lines: Any, folder: pathlib.Path, num_workers: int = 2, **opts: Any) -> Report:
    return preprocess(lines, _SETTINGS, [str(folder / "out")], num_workers=num_workers, **opts)


def _read(folder: pathlib.Path) -> list[list[int]]:
    return [tokens.tolist() for tokens in IndexedDataset(str(folder / "out"))[:]]


def test_order_is_kept_when_early_lines_take_longer(tmp_path: pathlib.Path) -> None:
    lines = [_line(1, "slow"), *(_line(n, str(n)) for n in range(2, 301))]
    report = _preprocess(lines, tmp_path)
    assert _read(tmp_path) == [[7], *([n] for n in range(2, 301))]
    assert report.num_documents == 300
    assert report.num_bytes == sum(len(line.content) for line in lines)


def test_progress_adds_up(tmp_path: pathlib.Path) -> None:
    steps: list[tuple[int, int]] = []
    lines = [_line(n, "1") for n in range(100)]
    report = _preprocess(lines, tmp_path, on_progress=lambda *step: steps.append(step))
    assert [num_documents for num_documents, _ in steps] == [32, 32, 32, 4]
    assert sum(num_bytes for _, num_bytes in steps) == report.num_bytes


def test_input_is_read_no_faster_than_it_is_written(tmp_path: pathlib.Path) -> None:
    read = written = furthest = 0

    def lines() -> Iterator[Line]:
        nonlocal read, furthest
        for number in range(3000):
            read += 1
            furthest = max(furthest, read - written)
            yield _line(number, "1")

    def on_progress(num_documents: int, num_bytes: int) -> None:
        nonlocal written
        written += num_documents

    _preprocess(lines(), tmp_path, on_progress=on_progress)
    assert written == 3000
    assert furthest <= 2 * 4 * 32 + 32  # 2 workers, 4 chunks of 32 lines each, and the next


def test_a_worker_that_is_killed_ends_the_work(tmp_path: pathlib.Path) -> None:
    lines = [_line(n, "die" if n == 500 else "1") for n in range(1, 2000)]
    message = r"a worker process died behind in\.jsonl line \d+, .* use fewer --workers"
    with pytest.raises(PreprocessError, match=message):
        _preprocess(lines, tmp_path)
    assert not IndexedDataset.exists(str(tmp_path / "out"))


def test_an_interrupt_ends_the_work(tmp_path: pathlib.Path) -> None:
    def lines() -> Iterator[Line]:
        yield from (_line(n, "1") for n in range(500))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), staging_folder(str(tmp_path / "out")) as folder:
        _preprocess(lines(), folder)
    assert list(tmp_path.iterdir()) == []


def test_workers_leave_their_chunks_after_a_failure(tmp_path: pathlib.Path) -> None:
    texts = ["x", *["slow"] * 3000]  # ten minutes of work in 95 chunks, some begun at once
    with pytest.raises(PreprocessError, match="line 0 cannot be tokenized"):
        _preprocess([_line(n, text) for n, text in enumerate(texts)], tmp_path)


def test_strict_names_the_first_bad_line(tmp_path: pathlib.Path) -> None:
    lines = [_line(n, "1") for n in range(1, 100)]
    lines[40] = Line("in.jsonl", 41, b"[]")
    lines[70] = Line("in.jsonl", 71, b"{}")
    with pytest.raises(PreprocessError, match=r"^in.jsonl line 41 is not a JSON object \(--stri"):
        _preprocess(lines, tmp_path, strict=True)


def test_report_keeps_the_first_places() -> None:
    first, second = Report(num_documents=5, num_empty=1), Report(num_documents=2)
    for number in range(1, 8):
        first.add_bad(BadLine(f"a line {number}", "is blank"))
        second.add_bad(BadLine(f"b line {number}", "is blank"))
    second.add_bad(BadLine("b line 9", "is not JSON"))
    first.merge(second)
    assert first.to_text().splitlines() == [
        "7 documents written, 1 of them without tokens; 15 bad lines left out",
        "  14 x is blank: a line 1, a line 2, a line 3, a line 4, a line 5, a line 6, a line 7, "
        "b line 1, b line 2, b line 3, ...",
        "  1 x is not JSON: b line 9",
    ]


# Partitions


def _partitions(path: str, folder: pathlib.Path, *, contiguous: bool, strict: bool = False) -> Any:
    steps: list[int] = []
    report = preprocess_partitions(
        TextInput((path,)).partitions(3, contiguous=contiguous),
        _SETTINGS,
        folder,
        [str(folder / "out")],
        num_workers=3,
        strict=strict,
        on_progress=lambda num_documents, num_bytes: steps.append(num_documents),
    )
    return report, sum(steps)


@pytest.mark.parametrize("count", [1, 100])  # with one line, two partitions have none
def test_contiguous_partitions_equal_one(tmp_path: pathlib.Path, count: int) -> None:
    path = _file(tmp_path, [str(n) for n in range(count)])
    report, progress = _partitions(path, tmp_path, contiguous=True)
    assert report.num_documents == progress == count
    assert _read(tmp_path) == [[n] for n in range(count)]


def test_partitions_take_lines_in_turn(tmp_path: pathlib.Path) -> None:
    path = _file(tmp_path, [str(n) for n in range(100)])
    _partitions(path, tmp_path, contiguous=False)
    assert _read(tmp_path) == [[n] for start in range(3) for n in range(start, 100, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("die", r"worker process died behind .*in\.jsonl line"),
        ("x", r"in\.jsonl line 51 cannot be tokenized"),
        ("1000", r"in\.jsonl line 51: token id 1000 is outside the vocabulary of 1000"),
    ],
)
def test_a_failing_partition_ends_all(tmp_path: pathlib.Path, text: str, message: str) -> None:
    texts = ["hang", "hang", "1"] * 20  # the third partition is the only one that gets on
    texts[50] = text
    before = set(multiprocessing.active_children())  # the session's worker pool
    with pytest.raises(PreprocessError, match=message):
        _partitions(_file(tmp_path, texts), tmp_path, contiguous=False)
    assert set(multiprocessing.active_children()) == before


def test_an_interrupt_ends_all_partitions(tmp_path: pathlib.Path) -> None:
    def interrupt(num_documents: int, num_bytes: int) -> None:
        raise KeyboardInterrupt

    path = _file(tmp_path, ["hang", "1"] * 100)
    inputs = TextInput((path,)).partitions(2, contiguous=False)
    out = [str(tmp_path / "out")]
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        preprocess_partitions(
            inputs, _SETTINGS, tmp_path, out, num_workers=2, strict=False, on_progress=interrupt
        )
    assert set(multiprocessing.active_children()) == before


def test_a_pipe_cannot_be_partitioned(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PreprocessError, match=r"pipe is a pipe or device.*use --partitions 1"):
        TextInput((str(tmp_path / "pipe"),)).partitions(2, contiguous=False)


# Files


def test_inputs_are_found_in_name_order(tmp_path: pathlib.Path) -> None:
    paths = [_file(tmp_path, ["1"], name) for name in ("b.jsonl", "a.jsonl", "c.txt", "[d].jsonl")]
    assert find_inputs(str(tmp_path / "*.jsonl")) == (paths[3], paths[1], paths[0])
    assert find_inputs(paths[3]) == (paths[3],)  # a name, though it reads like a pattern
    with pytest.raises(PreprocessError, match=r"--input .*none\*: no such file"):
        find_inputs(str(tmp_path / "none*"))
    with pytest.raises(PreprocessError, match="is a directory; give a file or"):
        find_inputs(str(tmp_path))


def test_lines_are_numbered_in_each_file(tmp_path: pathlib.Path) -> None:
    paths = (_file(tmp_path, ["1", "2"], "a.jsonl"), _file(tmp_path, ["3"], "b.jsonl"))
    assert [line.place for line in TextInput(paths)] == [
        f"{paths[0]} line 1",
        f"{paths[0]} line 2",
        f"{paths[1]} line 1",
    ]


def test_a_dataset_is_replaced_as_a_whole(tmp_path: pathlib.Path) -> None:
    final = str(tmp_path / "final")
    for text in ("1 2", "3"):
        with staging_folder(final) as folder:
            _preprocess([_line(1, text)], folder)
            publish(str(folder / "out"), final)
    assert IndexedDataset(final)[0].tolist() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final.bin", "final.idx"]
