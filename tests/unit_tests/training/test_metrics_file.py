"""The metrics file: records, resuming, refusals, and the example in its documentation."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.training.metrics_file import MetricsFile, read_metrics
from megatron.training.step_report import StepReport

DOC = Path(__file__).parents[3] / "docs" / "metrics.md"


def write_steps(metrics: MetricsFile, first: int, last: int, loss: float = 2.0) -> None:
    for iteration in range(first, last + 1):
        report = StepReport(
            iteration=iteration,
            consumed_samples=8 * iteration,
            losses={"lm loss": loss},
            learning_rate=1e-3,
            global_batch_size=8,
            grad_norm=0.5,
            timings_ms={"compute": 30.0},
        )
        metrics.step(report, elapsed_s=0.25, tokens=1000, tflops_per_gpu=1.5)


def shape(records: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["type"], record["iteration"]) for record in records]


def test_records_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    metrics = MetricsFile(path, config={"lr": 0.1, "where": tmp_path, "sizes": (1, 2)})
    write_steps(metrics, 1, 1)
    metrics.evaluation(1, prefix="iteration 1", consumed_samples=8, losses={"lm loss": 2.5})
    start, step, evaluation = [json.loads(line) for line in path.read_text().splitlines()]
    assert start == {
        "type": "start",
        "iteration": 0,
        "config": {"lr": 0.1, "where": str(tmp_path), "sizes": [1, 2]},
    }
    assert step == {
        "type": "step",
        "iteration": 1,
        "consumed_samples": 8,
        "elapsed_ms": 250.0,
        "lm loss": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "decoupled_learning_rate": None,
        "loss_scale": 1.0,
        "num_zeros": None,
        "params_norm": None,
        "global_batch_size": 8,
        "tokens_per_second": 4000.0,
        "tflops_per_gpu": 1.5,
        "timings_ms": {"compute": 30.0},
        "skipped": False,
        "optimizer_rollbacks": None,
    }
    assert evaluation == {
        "type": "eval",
        "iteration": 1,
        "prefix": "iteration 1",
        "consumed_samples": 8,
        "lm loss": 2.5,
    }


def test_every_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m", config={})
    for count in range(1, 4):
        write_steps(metrics, count, count)
        assert len((tmp_path / "m").read_text().splitlines()) == 1 + count  # not closed


def test_resuming_replaces_what_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsFile(path, config={"job": 1})
    write_steps(metrics, 1, 7, loss=2.0)
    metrics.evaluation(4, prefix="iteration 4", consumed_samples=32, losses={"lm loss": 3.0})
    metrics.evaluation(6, prefix="iteration 6", consumed_samples=48, losses={"lm loss": 3.0})
    metrics.close()

    metrics = MetricsFile(path, config={"job": 2}, resumed_iteration=4)
    write_steps(metrics, 5, 8, loss=1.0)
    metrics.close()
    records = read_metrics(path)
    steps = [record for record in records if record["type"] == "step"]
    assert [record["iteration"] for record in steps] == list(range(1, 9))
    assert [record["lm loss"] for record in steps] == [2.0] * 4 + [1.0] * 4
    assert ("eval", 4) in shape(records) and ("eval", 6) not in shape(records)
    assert [r["config"]["job"] for r in records if r["type"] == "start"] == [1, 2]


def test_starts_whose_steps_are_all_repeated_go(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsFile(path, config={})
    write_steps(metrics, 1, 4)
    MetricsFile(path, config={}, resumed_iteration=4).close()  # failed before its first step
    MetricsFile(path, config={}, resumed_iteration=4).close()
    assert shape(read_metrics(path))[-2:] == [("step", 4), ("start", 4)]
    MetricsFile(path, config={}).close()  # from the beginning
    assert shape(read_metrics(path)) == [("start", 0)]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    metrics = MetricsFile(path, config={})
    write_steps(metrics, 1, 2)
    metrics.close()
    text = path.read_text()
    for length in range(len(text) - 40, len(text)):
        path.write_text(text[:length])
        assert shape(read_metrics(path)) == [("start", 0), ("step", 1)]
    metrics = MetricsFile(path, config={}, resumed_iteration=1)
    write_steps(metrics, 2, 2)
    assert shape(read_metrics(path)) == [("start", 0), ("step", 1), ("start", 1), ("step", 2)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a diary\n", 1),
        ('{"type": "start", "iteration": 0, "config": {}}\nnot json\n', 2),
        ('{"type": "start", "iteration": 0, "config": {}}\n[1]\n', 2),
        ('{"type": "other", "iteration": 1}\n', 1),
        ('{"type": "step"}\n', 1),
        ("one line without an end", 1),
        ("\x00\x01", 1),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "precious"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"precious line {line} is not a metrics record"):
        MetricsFile(path, config={})
    assert path.read_text() == text


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(ValueError, match="weights line 1 is not a metrics record"):
        MetricsFile(tmp_path / "weights", config={})


def test_numbers_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    metrics = MetricsFile(tmp_path / "m", config=vars(Namespace(limit=math.inf)))
    report = StepReport(
        iteration=1,
        consumed_samples=8,
        losses={"lm loss": math.nan},
        learning_rate=None,
        global_batch_size=8,
        grad_norm=-math.inf,
        skipped=True,
    )
    metrics.step(report, elapsed_s=0.0, tokens=1000, tflops_per_gpu=math.nan)
    lines = (tmp_path / "m").read_text().splitlines()
    start, step = [json.loads(line, parse_constant=no_constants) for line in lines]
    assert start["config"]["limit"] == "inf"
    assert math.isnan(float(step["lm loss"])) and float(step["grad_norm"]) == -math.inf
    assert step["tokens_per_second"] is None and step["skipped"] is True


def test_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    exec(snippet, {})
    assert capsys.readouterr().out.strip() == "[(1, 10.37)]"


def test_documented_records_are_the_written_ones(tmp_path: Path) -> None:
    (sample,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    documented = [json.loads(line) for line in sample.splitlines()]
    metrics = MetricsFile(tmp_path / "m", config={})
    write_steps(metrics, 1, 1)
    metrics.evaluation(1, prefix="x", consumed_samples=8, losses={"lm loss": 2.5})
    assert [list(r) for r in read_metrics(tmp_path / "m")] == [list(r) for r in documented]
    table = [line.split("|") for line in DOC.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in table for name in re.findall(r"`([^`]+)`", row[2])}
    assert named | {"type"} == {key for record in documented for key in record}
