"""tools/preprocess_data.py: its files, its words, its exit status; hostile input; interruption."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tools import preprocess_data

_TOOL = pathlib.Path(preprocess_data.__file__)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Put back the signal handler that the tool sets."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def _options(input_: Any, folder: pathlib.Path, *more: str, workers: int = 1) -> list[str]:
    return [
        "--input",
        str(input_),
        "--output-prefix",
        str(folder / "out"),
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "1000",
        "--workers",
        str(workers),
        *more,
    ]


def _file(folder: pathlib.Path, lines: list[Any], name: str = "in.jsonl") -> pathlib.Path:
    path = folder / name
    path.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
        )
    )
    return path


def _texts(*texts: Any) -> list[Any]:
    return [{"text": text} for text in texts]


def _read(folder: pathlib.Path, name: str = "out_text_document") -> Any:
    dataset = IndexedDataset(str(folder / name))
    return [tokens.tolist() for tokens in dataset[:]], dataset.document_indices.tolist()


def _outputs(folder: pathlib.Path) -> list[str]:
    """All files but the input."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("in"))


def test_from_text_to_dataset(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, _texts("1 2 3", "", ["4", "5 6"], "7"))
    assert preprocess_data.main(_options(path, tmp_path, "--append-eod")) == 0
    assert _read(tmp_path) == ([[1, 2, 3, 999], [4], [5, 6, 999], [7, 999]], [0, 1, 1, 3, 4])
    assert _outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]
    shown = capfd.readouterr().out
    assert f"Opening {path}\n" in shown and "Time to startup: " in shown
    assert "4 documents written, 1 of them without tokens; 0 bad lines left out" in shown


def test_each_key_is_a_dataset(tmp_path: pathlib.Path) -> None:
    path = _file(tmp_path, [{"a": "1", "b": ""}, {"a": "2", "b": "3"}, {"a": "9"}])
    assert preprocess_data.main(_options(path, tmp_path, "--json-keys", "a", "b")) == 0
    assert _read(tmp_path, "out_a_document") == ([[1], [2]], [0, 1, 2])
    assert _read(tmp_path, "out_b_document") == ([[3]], [0, 0, 1])


_HOSTILE = [
    {"text": "1"},
    b"\n",
    b"not json\n",
    b"[1]\n",
    {"Text": "2"},
    {"text": 5},
    b'{"text": "\xff"}\n',
    {"text": ""},
    b'{"text": "\\ud800"}\n',
    {"text": "8"},
    b"\n",
    b'{"text": "9"',  # cut short, no line break
]


def test_hostile_lines_are_left_out_and_reported(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, _HOSTILE)
    assert preprocess_data.main(_options(path, tmp_path)) == 0
    assert _read(tmp_path) == ([[1], [8]], [0, 1, 1, 2])
    shown = capfd.readouterr().out
    for line in (
        "3 documents written, 1 of them without tokens; 9 bad lines left out",
        f"  2 x is blank: {path} line 2, {path} line 11",
        f"  2 x is not JSON: {path} line 3, {path} line 12",
        f"  1 x is not a JSON object: {path} line 4",
        f"  1 x has no key 'text': {path} line 5",
        f"  1 x has under 'text' neither a string nor a list of strings: {path} line 6",
        f"  1 x is not UTF-8: {path} line 7",
        f"  1 x has under 'text' a lone surrogate, which is no text: {path} line 9",
    ):
        assert line + "\n" in shown


def test_strict_stops_at_the_first_bad_line(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, _HOSTILE)
    assert preprocess_data.main(_options(path, tmp_path, "--strict")) == 1
    assert f"error: {path} line 2 is blank (--strict)" in capfd.readouterr().err
    assert _outputs(tmp_path) == []


def test_progress_lines(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, _texts(*["1"] * 100))
    assert preprocess_data.main(_options(path, tmp_path, "--log-interval", "50")) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "Processed 64 documents",
        "Processed 100 documents",
    ]
    assert all(line.endswith(" MB/s).") and " docs/s, " in line for line in lines)


@pytest.mark.parametrize("installed", [True, False])
def test_a_terminal_shows_a_bar_if_tqdm_is_there(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    path = _file(tmp_path, _texts(*["1"] * 100))
    assert preprocess_data.main(_options(path, tmp_path, "--log-interval", "1")) == 0
    shown = capsys.readouterr().err
    assert ("documents=100" in shown) == installed
    assert ("Processed 100 documents" in shown) == (not installed)


def test_compressed_input(tmp_path: pathlib.Path) -> None:
    for number, name in enumerate(("in-b.jsonl.gz", "in-a.jsonl.gz")):
        with gzip.open(tmp_path / name, "wb") as file:
            file.write(json.dumps({"text": str(number)}).encode())
    single = _options(tmp_path / "in-b.jsonl.gz", tmp_path)
    assert preprocess_data.main(single) == 0
    assert _read(tmp_path)[0] == [[0]]
    assert preprocess_data.main(_options(tmp_path / "in-*.gz", tmp_path)) == 0
    assert _read(tmp_path)[0] == [[1], [0]]


def test_damaged_compressed_input(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "1"}\n' * 5000)[:-30])
    assert preprocess_data.main(_options(path, tmp_path)) == 1
    assert f"error: {path} cannot be read behind line " in capfd.readouterr().err
    assert _outputs(tmp_path) == []


@pytest.mark.parametrize("sequential", [True, False])
def test_partitions(tmp_path: pathlib.Path, sequential: bool) -> None:
    _file(tmp_path, _texts("0", "1", "2"), "in1.jsonl")
    _file(tmp_path, _texts("3", "4"), "in2.jsonl")
    more = ["--partitions", "2"] + ["--keep-sequential-samples"] * sequential
    options = _options(tmp_path / "in*.jsonl", tmp_path, *more, workers=2)
    assert preprocess_data.main(options) == 0
    order = [0, 1, 2, 3, 4] if sequential else [0, 2, 4, 1, 3]
    assert _read(tmp_path) == ([[n] for n in order], [0, 1, 2, 3, 4, 5])
    assert _outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


def test_timing_numbers_of_workers_writes_nothing(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, _texts(*["1"] * 100))
    options = _options(path, tmp_path, "--find-optimal-num-workers", "--workers-to-check", "1", "2")
    assert preprocess_data.main(options) == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[-3].startswith("1 workers: ") and shown[-2].startswith("2 workers: ")
    assert shown[-1] in {f"The optimal number of workers is {n}." for n in (1, 2)}
    assert _outputs(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ([], [], "holds no document"),
        ([b"\n"], [], "holds no document\n0 documents written"),
        (_texts("1", "1000"), [], "in.jsonl line 2 cannot be tokenized: id 1000 is outside"),
        (_texts("1"), ["--workers", "3", "--partitions", "2"], "--workers 3 is not a multiple"),
        (_texts("1"), ["--json-keys", "a", "a"], "--json-keys a a names a key twice"),
        (_texts("1"), ["--log-interval", "0"], "--log-interval 0 is too small"),
        (_texts("1"), ["--tokenizer-type", "NoSuch"], "--tokenizer-type NoSuch is not known"),
        (_texts("1"), ["--input", "nowhere.jsonl"], "--input nowhere.jsonl: no such file"),
    ],
    ids=range(8),
)
def test_errors(
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    lines: list[Any],
    more: list[str],
    message: str,
) -> None:
    assert preprocess_data.main(_options(_file(tmp_path, lines), tmp_path, *more)) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ") and message in error
    assert _outputs(tmp_path) == []


def test_missing_flags_are_told_together(capfd: pytest.CaptureFixture[str]) -> None:
    assert preprocess_data.main([]) == 1
    error = capfd.readouterr().err
    for flag in ("--input", "--output-prefix", "--workers"):
        assert f"{flag} is missing" in error


def test_a_tokenizer_without_end_token_is_refused_before_any_work(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoEod:
        vocab_size = 10

        @property
        def eod(self) -> int:
            raise ValueError("NoEod has no eod token")

    monkeypatch.setattr(preprocess_data, "build_tokenizer", lambda args: NoEod())
    path = _file(tmp_path, _texts("1"))
    assert preprocess_data.main(_options(path, tmp_path, "--append-eod")) == 1
    shown = capfd.readouterr()
    assert "NoEod has no eod token" in shown.err and "Opening" not in shown.out
    assert _outputs(tmp_path) == []


def test_earlier_output_survives_a_failure(tmp_path: pathlib.Path) -> None:
    assert preprocess_data.main(_options(_file(tmp_path, _texts("1")), tmp_path)) == 0
    bad = _file(tmp_path, [*_texts("2"), b"[]\n"])
    assert preprocess_data.main(_options(bad, tmp_path, "--strict")) == 1
    assert _read(tmp_path)[0] == [[1]]


def test_help_explains_the_tool() -> None:
    shown = subprocess.run(
        [sys.executable, _TOOL, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "python tools/preprocess_data.py --input corpus.jsonl" in shown
    for flag in ("--split-sentences", "--keep-newlines", "--lang", "--merge-file", "--strict"):
        assert flag in shown


@pytest.fixture
def busy_tool(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """The tool midway: its input is a pipe that goes quiet after many lines."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    options = _options(pipe, tmp_path, "--log-interval", "32", workers=2)
    tool = subprocess.Popen([sys.executable, _TOOL, *options], stderr=subprocess.PIPE, text=True)
    assert tool.stderr is not None
    with open(pipe, "w") as writer:
        writer.write('{"text": "1"}\n' * 3000)
        writer.flush()
        assert tool.stderr.readline().startswith("Processed ")
        assert len(_outputs(tmp_path)) == 1  # the folder of unfinished files
        yield tool
        tool.kill()
        tool.wait()
        tool.stderr.close()


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_interruption_leaves_nothing(
    tmp_path: pathlib.Path, busy_tool: subprocess.Popen[str], sent: signal.Signals, status: int
) -> None:
    busy_tool.send_signal(sent)
    assert busy_tool.wait(timeout=60) == status
    assert _outputs(tmp_path) == []


def test_workers_do_not_outlive_a_killed_tool(busy_tool: subprocess.Popen[str]) -> None:
    children = pathlib.Path(f"/proc/{busy_tool.pid}/task/{busy_tool.pid}/children")
    workers = children.read_text().split()
    assert len(workers) == 2
    busy_tool.kill()
    busy_tool.wait()
    while any(_runs(worker) for worker in workers):  # pytest's time limit ends a failing test
        time.sleep(0.01)


def _runs(pid: str) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended; whoever adopted it has yet to notice
