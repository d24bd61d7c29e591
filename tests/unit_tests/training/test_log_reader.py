"""Training logs of every age and in every surrounding give the same records."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from megatron.training import log_reader
from megatron.training.log_reader import LogError, LogRecord, parse_records, read_log

# The line that the compatibility specification gives to test scrapers with.
SPEC_LINE = (
    " [2024-05-01 12:00:00] iteration      100/   50000 | consumed samples:        25600 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 310.2 | "
    "learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 2.345678E+00 | "
    "loss scale: 1.0 | grad norm: 0.512 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)
SPEC_FIELDS = {
    "consumed samples": "25600",
    "elapsed time per iteration (ms)": "1234.5",
    "throughput per GPU (TFLOP/s/GPU)": "310.2",
    "learning rate": "3.000000E-04",
    "global batch size": "256",
    "lm loss": "2.345678E+00",
    "loss scale": "1.0",
    "grad norm": "0.512",
    "number of skipped iterations": "0",
    "number of nan iterations": "0",
}


def line(iteration: int, loss: str = "1.0E+00") -> str:
    """A short record without a time stamp."""
    return f" iteration {iteration:8d}/{100:8d} | lm loss: {loss} | grad norm: 0.500 |"


def only(text: str) -> LogRecord:
    (record,) = parse_records(text)
    return record


def write(folder: Path, text: str) -> Path:
    path = folder / "run.log"
    path.write_bytes(text.encode())
    return path


def test_the_specifications_line() -> None:
    record = only(SPEC_LINE)
    assert (record.iteration, record.train_iters) == (100, 50000)
    assert record.time == "2024-05-01 12:00:00"
    assert record.fields == SPEC_FIELDS
    assert list(record.fields) == list(SPEC_FIELDS)
    assert record.number("lm loss") == 2.345678
    assert record.number("no such field") is None


def test_newer_form() -> None:
    text = SPEC_LINE.replace("12:00:00]", "12:00:00.123456]").replace(
        "elapsed", "skipped samples:          512 | elapsed", 1
    )
    record = only(
        text.replace(" number of sk", " num zeros: 12 | params norm: 7.250 | number of sk")
    )
    assert record.time == "2024-05-01 12:00:00.123456"
    assert record.number("skipped samples") == 512
    assert record.number("num zeros") == 12
    assert record.number("params norm") == 7.25
    assert record.number("number of nan iterations") == 0


def test_oldest_form_without_colons() -> None:
    record = only(
        " iteration        7/  320000 | elapsed time per iteration (ms): 512.3 | "
        "learning rate 1.000E-04 | lm loss 6.930000E+00 | loss scale 4294967296.0 |"
    )
    assert record.time is None
    assert record.number("learning rate") == 1e-4
    assert record.number("lm loss") == 6.93
    assert record.number("loss scale") == 2.0**32


@pytest.mark.parametrize(
    ("value", "number"),
    [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf), ("-1.5e-300", -1.5e-300)],
)
def test_numbers_of_every_kind(value: str, number: float) -> None:
    found = only(line(1, value)).number("lm loss")
    assert found == number or (math.isnan(number) and found is not None and math.isnan(found))


def test_fields_of_any_name_and_kind_are_kept() -> None:
    record = only(" iteration 1/ 2 | schedule: zb-v | bubble rate (%): 3.5 | lm loss: 2.0 |")
    assert record.fields == {"schedule": "zb-v", "bubble rate (%)": "3.5", "lm loss": "2.0"}
    assert record.number("schedule") is None


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ",
        "0: ",
        "[default0]:",
        " 45%|████▌     | 9/20 [00:12<00:15,  1.4s/it]",
        "\x1b[32m",
        "INFO:megatron:",
        "epoch: 3 | ",
    ],
)
def test_text_before_a_record(prefix: str) -> None:
    assert only(prefix + SPEC_LINE.lstrip()).fields == SPEC_FIELDS


@pytest.mark.parametrize(
    "suffix",
    [
        " 45%|████▌     | 9/20 [00:12<00:15,  1.4s/it]",
        " [Rank 0] (after 100 iterations) memory (MB) | allocated: 1.0 | reserved: 2.0",
        " validation loss at iteration 100 | lm loss value: 9.0E+00 | lm loss PPL: 8.1E+03 | ",
        " lm loss: 7.77",  # no bar after it: may be cut off
        "\x1b[0m",
    ],
)
def test_text_after_a_record(suffix: str) -> None:
    assert only(SPEC_LINE + suffix).fields == SPEC_FIELDS


def test_records_run_together_on_one_line() -> None:
    text = line(1, "3.0") + line(2, "2.0") + "[rank0]:" + line(3, "1.0") + SPEC_LINE
    records = list(parse_records(text))
    assert [record.iteration for record in records] == [1, 2, 3, 100]
    assert [record.fields["lm loss"] for record in records[:3]] == ["3.0", "2.0", "1.0"]
    assert all(set(record.fields) == {"lm loss", "grad norm"} for record in records[:3])
    assert records[3].time == "2024-05-01 12:00:00"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "saved checkpoint at iteration 100 to ckpt",
        "Evaluating iter 1/10",
        "number of skipped iterations: 3 |",
        "validation loss at iteration 4 | lm loss value: 1.0 |",
    ],
)
def test_other_lines_hold_no_record(text: str) -> None:
    assert list(parse_records(text)) == []


def test_progress_bars_end_lines_with_carriage_returns(tmp_path: Path) -> None:
    bar = "\rtraining:  10%|█         | 1/10 [00:01<00:09]"
    path = write(tmp_path, bar + "\r" + line(1) + bar + "\r\n" + line(2) + "\r" + bar)
    log = read_log(path)
    assert [record.iteration for record in log.records] == [1, 2]
    assert all(set(record.fields) == {"lm loss", "grad norm"} for record in log.records)


def test_gzip_files_are_known_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(gzip.compress((line(1) + "\n" + line(2) + "\n").encode()))
    assert len(read_log(path).records) == 2
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(LogError, match=r"run\.log cannot be read"):
        read_log(path)


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"\xff\xfe\x00\x80\n" + line(1).encode() + b"\xc3\n")
    assert len(read_log(path).records) == 1


@pytest.mark.parametrize("limit", [300, 333, 1000, 4096])
def test_endless_lines_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """However a physical line falls apart, each record comes once and whole."""
    monkeypatch.setattr(log_reader, "_LONGEST_LINE", limit)
    junk = "x" * 2 * limit
    text = junk + "".join(line(number, f"{number}.0") for number in range(1, 60)) + junk + line(60)
    log = read_log(write(tmp_path, text))
    assert [record.iteration for record in log.records] == list(range(1, 61))
    assert all(record.number("grad norm") == 0.5 for record in log.records)
    assert [record.number("lm loss") for record in log.records[:59]] == list(range(1, 60))
    assert log.repeated == ()


def test_a_line_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_LONGEST_LINE", 300)
    path = write(tmp_path, "".join(line(number) for number in range(1, 500)))
    with log_reader._open_text(path) as stream:
        assert max(map(len, log_reader._lines(stream))) < 600


def test_records_are_sorted_and_the_last_of_several_counts(tmp_path: Path) -> None:
    text = "\n".join([line(2, "2.0"), line(3, "3.0"), line(1), line(2, "2.5"), line(3, "3.0")])
    log = read_log(write(tmp_path, text))
    assert [(r.iteration, r.number("lm loss")) for r in log.records] == [
        (1, 1.0),
        (2, 2.5),
        (3, 3.0),
    ]
    assert log.repeated == (2,)  # iteration 3 was logged twice, but alike


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "0: ", "[default0]:"])
def test_arguments_of_the_run(tmp_path: Path, prefix: str) -> None:
    dump = [
        "------------------------ arguments ------------------------",
        "  seq_length ...................................... 4096",
        "  vocab_size ...................................... None",
        "  split ........................................... 949,50,1",
        "-------------------- end of arguments ---------------------",
        "> PyTorch version ................ 2",
        "    forward-backward ...............................: (123.45, 130.00)",
    ]
    log = read_log(write(tmp_path, "\n".join(prefix + text for text in [*dump, line(1)])))
    assert log.arguments == {"seq_length": "4096", "vocab_size": "None", "split": "949,50,1"}
    assert log.argument("seq_length") == 4096
    assert log.argument("vocab_size") is None
    assert log.argument("hidden_size") is None


def test_padded_vocabulary_is_read_from_its_own_line(tmp_path: Path) -> None:
    text = " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)\n" + line(1)
    log = read_log(write(tmp_path, text))
    assert (log.argument("vocab_size"), log.argument("padded_vocab_size")) == (50257, 50304)


def test_a_log_that_was_cut_off_keeps_what_is_whole(tmp_path: Path) -> None:
    log = read_log(write(tmp_path, SPEC_LINE[: SPEC_LINE.index("2.345678") + 4]))
    (record,) = log.records
    assert "lm loss" not in record.fields
    assert record.number("global batch size") == 256


def test_a_log_without_records_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "hello\n")
    with pytest.raises(LogError, match=r"run\.log holds no training record; looked for lines like"):
        read_log(path)
    assert only(log_reader.EXAMPLE).iteration == 1  # what the message shows is what is read


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.log", tmp_path):
        with pytest.raises(LogError, match=f"{path} cannot be read"):
            read_log(path)
