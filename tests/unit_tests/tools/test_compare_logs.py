"""tools/compare_logs.py: what it says about pairs of logs, and its exit status."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.training.log_comparison import make_run
from megatron.training.log_reader import read_log
from megatron.training.log_warnings import COMMON_VOCAB_SIZES, run_warnings, stuck_loss

TOOL = Path(__file__).parents[3] / "tools" / "compare_logs.py"

# The report that started the project: Llama-2 13B on 4 pipeline ranks, 1F1B (A) and a V schedule
# of an existing fork (B): iteration time in ms, loss, gradient norm.
REPORT_RATES = ("4.687E-08", "9.375E-08", "1.406E-07", "1.875E-07")
REPORT_A = (
    (23376.6, "1.123916E+01", 121.332),
    (15149.3, "1.138808E+01", 15.865),
    (15153.5, "1.138511E+01", 15.744),
    (15154.5, "1.131369E+01", 62.191),
)
REPORT_B = (
    (23561.4, "1.037349E+01", 2.278),
    (15432.7, "1.037349E+01", 0.453),
    (16140.2, "1.037348E+01", 0.442),
    (16202.1, "1.037344E+01", 1.198),
)


def old_record(
    iteration: int,
    time_ms: float = 100.0,
    loss: str = "2.000000E+00",
    grad_norm: float = 1.0,
    *,
    rate: str = "1.000E-04",
    batch: int = 64,
    skipped: int = 0,
    nans: int = 0,
) -> str:
    """A training line of late 2023: no time stamp."""
    return (
        f" iteration {iteration:8d}/{500000:8d} | consumed samples: {iteration * batch:12d} | "
        f"elapsed time per iteration (ms): {time_ms:.1f} | learning rate: {rate} | "
        f"global batch size: {batch:5d} | lm loss: {loss} | loss scale: 1.0 | "
        f"grad norm: {grad_norm:.3f} | number of skipped iterations: {skipped:3d} | "
        f"number of nan iterations: {nans:3d} |"
    )


def report_log(values: tuple[tuple[float, str, float], ...]) -> str:
    """The four records of the report, run together on one physical line."""
    return "".join(
        old_record(iteration, *value, rate=rate)
        for iteration, (value, rate) in enumerate(zip(values, REPORT_RATES, strict=True), start=1)
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_log(name: str, *records: str) -> str:
        path = tmp_path / name
        path.write_text("\n".join(records) + "\n")
        return str(path)

    return write_log


@pytest.fixture
def report(write: Callable[..., str]) -> tuple[str, str]:
    return write("A.log", report_log(REPORT_A)), write("B.log", report_log(REPORT_B))


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the tool in this process: exit status, standard output, standard error."""
    main = runpy.run_path(str(TOOL))["main"]

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as stop:  # argparse
            status = stop.code
        return (status, *capsys.readouterr())

    return run


Tool = Callable[..., tuple[int, str, str]]


def rows(output: str) -> dict[str, list[str]]:
    """The first table of the report: name -> cells."""
    table = output.split("\n\n")[1].splitlines()[1:]
    return {cells[0]: cells[1:] for cells in map(str.split, table)}


def test_the_report_that_started_the_project(tool: Tool, report: tuple[str, str]) -> None:
    status, output, _ = tool(*report)
    assert status == 0
    verdict, losses = output.splitlines()[:2]
    assert verdict == (
        "B is 1.065 x slower than A (16140.2 ms against 15153.5 ms, median of iterations 2-4)"
    )
    assert losses == (
        "B and A have different losses, first at iteration 1 (1.037349E+01 against 1.123916E+01); "
        "the largest difference is 1.01459, at iteration 2"
    )
    (warning,) = [text for text in output.splitlines() if text.startswith("WARNING")]
    assert "the loss of B stands still at 10.3735 = ln(32000) over all 4 records" in warning
    assert "1 of 4 (A), 1 of 4 (B); the rule is a tenth of the records, at least 1" in output
    assert rows(output)["A"] == [
        "4",
        "1-4",
        "15153.5",
        "1.000",
        "4.223",
        "-",
        "1.131369E+01",
        "62.191",
    ]
    assert rows(output)["B"] == [
        "4",
        "1-4",
        "16140.2",
        "0.939",
        "3.965",
        "-",
        "1.037344E+01",
        "1.198",
    ]


def test_the_report_as_json(tool: Tool, report: tuple[str, str]) -> None:
    status, output, _ = tool(*report, "--json", "--seq-length", "4096", "--names", "1f1b", "V")
    assert status == 0
    data = json.loads(output)
    assert [run["name"] for run in data["runs"]] == ["1f1b", "V"]
    assert data["runs"][0]["median_ms"] == 15153.5
    assert data["runs"][0]["tokens_per_s"] == pytest.approx(64 * 4096 / 15.1535)
    assert data["runs"][1]["final_loss"] == 10.37344
    (pair,) = data["comparisons"]
    assert pair["speed_up"] == pytest.approx(15153.5 / 16140.2)
    assert pair["loss"]["equal"] is False
    assert pair["loss"]["first_difference"] == 1
    assert pair["loss"]["largest"] == pytest.approx(11.38808 - 10.37349)
    assert (pair["loss"]["largest_at"], pair["grad_norm"]["largest_at"]) == (2, 1)
    assert "V is 1.065 x slower than 1f1b" in data["verdict"][0]
    assert "ln(32000)" in data["warnings"][0]


def test_equal_logs(tool: Tool, write: Callable[..., str]) -> None:
    records = [old_record(i, 100.0 + i, f"{3 - 0.1 * i:.6E}") for i in range(1, 9)]
    status, output, _ = tool(
        write("a.log", *records), write("b.log", *records), "--require-equal-loss"
    )
    assert status == 0
    first, second = output.splitlines()[:2]
    assert first == "b is as fast as a (105.0 ms against 105.0 ms, median of iterations 2-8)"
    assert second == "b and a have equal losses, as printed, at all 8 common iterations"
    assert "WARNING" not in output


def test_a_faster_run_and_more_than_two_logs(tool: Tool, write: Callable[..., str]) -> None:
    logs = [
        write(f"{name}.log", *(old_record(i, time) for i in range(1, 5)))
        for name, time in (("base", 100.0), ("fast", 80.0), ("slow", 125.0))
    ]
    _, output, _ = tool(*logs)
    assert "fast is 1.250 x faster than base (80.0 ms against 100.0 ms" in output
    assert "slow is 1.250 x slower than base (125.0 ms against 100.0 ms" in output
    assert [cells[3] for cells in rows(output).values()] == ["1.000", "1.250", "0.800"]


def test_one_log_is_summed_up(tool: Tool, report: tuple[str, str]) -> None:
    status, output, _ = tool(report[1])
    assert status == 0
    assert output.startswith("B takes 16140.2 ms an iteration (median of iterations 2-4)\n")
    assert "ln(32000)" in output


@pytest.mark.parametrize("value", ["2.000001E+00", "nan", "inf"])
def test_required_equality_fails_on_any_difference(
    tool: Tool, write: Callable[..., str], value: str
) -> None:
    records = [old_record(i) for i in range(1, 6)]
    other = [*records[:3], old_record(4, loss=value), records[4]]
    logs = write("a.log", *records), write("b.log", *other)
    status, output, error = tool(*logs, "--require-equal-loss")
    assert status == 1
    assert "the losses differ" in error
    assert f"first at iteration 4 ({value} against 2.000000E+00)" in output
    assert tool(*logs)[0] == 0


def test_a_loss_that_one_log_lacks_is_a_difference(tool: Tool, write: Callable[..., str]) -> None:
    """Megatron leaves a NaN loss out of its line, so a missing loss must not pass as equal."""
    records = [old_record(i) for i in range(1, 6)]
    lacking = old_record(3, nans=1).replace(" lm loss: 2.000000E+00 |", "")
    logs = write("a.log", *records), write("b.log", *records[:2], lacking, *records[3:])
    status, output, _ = tool(*logs, "--require-equal-loss")
    assert status == 1
    assert "first at iteration 3 (none against 2.000000E+00)" in output
    assert "1 iteration was counted as nan by b" in output


def test_logs_without_common_iterations_are_not_equal(
    tool: Tool, write: Callable[..., str]
) -> None:
    logs = write("a.log", old_record(1), old_record(2)), write("b.log", old_record(5))
    status, output, _ = tool(*logs, "--require-equal-loss")
    assert status == 1
    assert "The losses of b and a have no iteration in common" in output


def test_nan_equals_nan_but_is_warned_about(tool: Tool, write: Callable[..., str]) -> None:
    records = [old_record(1), old_record(2, loss="nan"), old_record(3, loss="nan")]
    logs = write("a.log", *records), write("b.log", *records)
    status, output, _ = tool(*logs, "--require-equal-loss")
    assert status == 0
    assert "the loss of b is nan at iteration 2, and not finite in 2 of 3 records" in output
    assert json.loads(tool(*logs, "--json")[1])["runs"][0]["final_loss"] == "nan"


def test_warm_up_is_a_tenth_between_one_and_ten(write: Callable[..., str]) -> None:
    for count, skipped in ((1, 0), (2, 1), (19, 1), (20, 2), (99, 9), (400, 10)):
        log = read_log(write("a.log", *(old_record(i) for i in range(1, count + 1))))
        assert make_run(log, "a").num_skipped == skipped


def test_skip_sets_the_warm_up(tool: Tool, report: tuple[str, str]) -> None:
    _, output, _ = tool(*report, "--skip", "2")
    assert "(16171.2 ms against 15154.0 ms, median of iterations 3-4)" in output
    assert "2 of 4 (A), 2 of 4 (B); set by --skip" in output
    status, _, error = tool(*report, "--skip", "4")
    assert status == 2
    assert "--skip 4 leaves none of the 4 records of" in error and "use 0 to 3" in error


def test_sequence_length_from_the_log(tool: Tool, write: Callable[..., str]) -> None:
    dump = "  seq_length ...................................... 1000"
    path = write("a.log", dump, *(old_record(i, 500.0) for i in range(1, 4)))
    assert rows(tool(path)[1])["a"][5] == "128000.0"
    assert rows(tool(path, "--seq-length", "10")[1])["a"][5] == "1280.0"


def test_warnings_about_one_run(tool: Tool, write: Callable[..., str]) -> None:
    records = [old_record(i, 100.0 + 5 * i, f"{4 - 0.1 * i:.6E}") for i in range(1, 21)]
    records[6] = old_record(7, loss="inf", skipped=2, nans=1)
    path = write("a.log", *records, old_record(20, loss="1.0E+00"))
    output = tool(path)[1]
    assert "the loss of a is inf at iteration 7, and not finite in 1 of 20 records" in output
    assert "2 iterations were skipped by a (its gradients overflowed), first in" in output
    assert "1 iteration was counted as nan by a" in output
    assert "the iterations of a grow longer: median " in output
    assert "a logs iteration 20 again with other values" in output


def test_warnings_about_a_pair(tool: Tool, write: Callable[..., str]) -> None:
    base = write("a.log", *(old_record(i, batch=64) for i in range(1, 11)))
    other = write("b.log", *(old_record(i, batch=32, rate="2.0E-04") for i in range(2, 9, 2)))
    output = tool(base, other)[1]
    assert (
        "a has 10 records of 1-10, b has 4 records of 2-8; losses are compared at the 4" in output
    )
    assert "the logs differ in --log-interval: a 1, b 2; a record" in output
    assert "a and b differ in global batch size, first at iteration 2 (64 against 32)" in output
    assert "a and b differ in learning rate, first at iteration 2 (1.000E-04 against" in output
    assert "median of iterations 4-8, against 100.0 ms, median of iterations 2-10" in output


def test_iterations_that_lack_in_the_middle(tool: Tool, write: Callable[..., str]) -> None:
    base = write("a.log", *(old_record(i) for i in range(1, 11)))
    other = write("b.log", *(old_record(i) for i in range(1, 11) if i != 5))
    output = tool(base, other)[1]
    assert "a has 10 records of 1-10, b has 9 records of 1-10; losses are compared at" in output


def test_a_changing_batch_has_no_rate(tool: Tool, write: Callable[..., str]) -> None:
    path = write("a.log", *(old_record(i, batch=16 * i) for i in range(1, 5)))
    output = tool(path)[1]
    assert rows(output)["a"][4] == "-"
    assert "the global batch size of a changes from 32 to 64 in iterations 2-4" in output


def stuck_at(
    write: Callable[..., str], losses: list[float], *extra: str, vocab: int | None = None
) -> Any:
    records = [old_record(i, loss=f"{loss:.6E}") for i, loss in enumerate(losses, start=1)]
    return stuck_loss(make_run(read_log(write("a.log", *extra, *records)), "a"), vocab)


@pytest.mark.parametrize("vocab", COMMON_VOCAB_SIZES)
def test_a_loss_at_the_logarithm_of_a_common_vocabulary(
    write: Callable[..., str], vocab: int
) -> None:
    found = stuck_at(write, [math.log(vocab)] * 4)
    assert (found.vocab_size, found.source) == (vocab, "a common vocabulary size")


def test_the_runs_own_vocabulary_comes_first(write: Callable[..., str]) -> None:
    losses = [math.log(32017)] * 3  # nearer to 32000 than to any other common size
    line = " > padded vocab (size: 32001) with 16 dummy tokens (new size: 32017)"
    assert stuck_at(write, losses).vocab_size == 32000
    assert stuck_at(write, losses, line).vocab_size == 32017
    assert stuck_at(write, losses, line, vocab=32010).source == "given by --vocab-size"
    unusual = [math.log(777)] * 3
    assert stuck_at(write, unusual) is None
    assert stuck_at(write, unusual, vocab=777).vocab_size == 777


@pytest.mark.parametrize(
    "losses",
    [
        [10.3735, 10.3735],  # too few to say that it stands still
        [10.40, 10.3735, 10.35],  # moves
        [10.3860, 10.3860, 10.3860],  # a healthy untrained model is a little above ln(V)
        [11.24, 11.39, 11.39, 11.31],
        [0.0, 0.0, 0.0],
    ],
)
def test_a_healthy_loss_is_not_called_stuck(write: Callable[..., str], losses: list[float]) -> None:
    assert stuck_at(write, losses) is None


def test_a_healthy_run_has_no_warnings(write: Callable[..., str]) -> None:
    records = [old_record(i, 100.0 + i % 3, f"{10.4 - 0.05 * i:.6E}") for i in range(1, 41)]
    assert run_warnings(make_run(read_log(write("a.log", *records)), "a")) == []


def test_a_log_without_times(tool: Tool, write: Callable[..., str]) -> None:
    records = [f" iteration {i}/ 9 | lm loss: 2.0 |" for i in (1, 2, 3)]
    logs = write("a.log", *records), write("b.log", *(old_record(i) for i in (1, 2, 3)))
    status, output, _ = tool(*logs, "--require-equal-loss")
    assert status == 0
    assert output.startswith("The speed of b and a cannot be compared: a logs no `elapsed time")
    assert rows(output)["a"][2:6] == ["-", "1.000", "-", "-"]


def test_names(tool: Tool, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.log.gz").write_text(old_record(1))
    logs = [str(tmp_path / folder / "run.log.gz") for folder in ("one", "two")]
    assert list(rows(tool(*logs)[1])) == logs  # the file names alone would not tell them apart
    assert list(rows(tool(logs[0])[1])) == ["run"]
    status, _, error = tool(*logs, "--names", "only-one")
    assert (status, "--names has 1 names for 2 logs; give one for each" in error) == (2, True)


def test_unreadable_logs_exit_with_2(tool: Tool, write: Callable[..., str]) -> None:
    good = write("a.log", old_record(1))
    status, output, error = tool(good, write("b.log", "nothing here"))
    assert (status, output) == (2, "")
    assert "b.log holds no training record; looked for lines like ` iteration" in error
    status, _, error = tool(good, good + ".missing")
    assert status == 2 and "a.log.missing cannot be read" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.log", "--seq-length", "0"], "--seq-length 0 is below 1"),
        (["a.log", "--require-equal-loss"], "--require-equal-loss needs at least two logs"),
        ([], "the following arguments are required: LOG"),
    ],
)
def test_bad_command_lines_exit_with_2(tool: Tool, arguments: list[str], message: str) -> None:
    status, _, error = tool(*arguments)
    assert status == 2 and message in error


def test_plot_draws_both_panels(tool: Tool, report: tuple[str, str], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    target = tmp_path / "runs.png"
    assert tool(*report, "--plot", str(target))[0] == 0
    pixels = image.imread(target)[:, :, :3]
    blue, orange = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)
    half = pixels.shape[1] // 2
    for panel in (pixels[:, :half], pixels[:, half:]):
        for colour in (blue, orange):
            distance = abs(panel * 255 - colour).sum(axis=2)
            assert (distance < 6).sum() > 100  # both lines are there


def test_plot_failures_are_explained(
    tool: Tool, report: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    status, _, error = tool(*report, "--plot", str(tmp_path / "missing" / "runs.png"))
    assert status == 2 and "cannot be written" in error
    status, _, error = tool(*report, "--plot", str(tmp_path / "runs.nothing"))
    assert status == 2 and "cannot be written" in error
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, error = tool(*report, "--plot", str(tmp_path / "runs.png"))
    assert status == 2 and "needs the package matplotlib" in error


def test_runs_as_a_script(report: tuple[str, str]) -> None:
    command = [sys.executable, str(TOOL), *report, "--require-equal-loss"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("B is 1.065 x slower than A")
