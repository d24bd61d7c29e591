"""tools/benchmark_pipeline.py from end to end, too small to say anything about speed."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
from typing import Any

import pytest

from tools import benchmark_pipeline


def _run(tmp_path: pathlib.Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert benchmark_pipeline.main([*arguments, "--peer", "torch", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_emulated(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--ranks 2 --microbatches-per-rank 2 --pass-ms 1 --hidden-size 8 --repeats 2"
    schedules = "--schedules 1f1b zb-h1 zb-interleaved"
    figures = _run(tmp_path, "emulated", *sizes.split(), *schedules.split())
    rows = {(row["schedule"], row["runtime"]): row for row in figures["results"]}
    assert set(rows) == {
        ("1f1b", "ours"),
        ("1f1b", "torch"),
        ("zb-h1", "ours"),
        ("zb-interleaved", "ours"),
        ("zb-interleaved", "torch"),
    }
    for row in rows.values():
        assert len(row["repeats_ms"]) == 2
        assert row["ideal_ms"] >= 4 * 3  # m (T_F + T_B + T_W)
        # Passes are slept in full, so no step can be shorter than the simulator says.
        assert min(row["repeats_ms"]) >= row["ideal_ms"]
        assert row["over_ideal"] == pytest.approx(row["step_ms"] / row["ideal_ms"])
    assert {row["schedule"] for row in figures["host"]} == {"1f1b", "zb-h1", "zb-interleaved"}
    assert all(row["wall_us"] > 0 and row["cpu_us"] > 0 for row in figures["host"])
    assert "zb-interleaved" in capsys.readouterr().out


def test_steps(tmp_path: pathlib.Path) -> None:
    sizes = "--ranks 2 --microbatches-per-rank 2 --pass-ms 1 --hidden-size 8 --repeats 2"
    figures = _run(tmp_path, "steps", *sizes.split(), "--schedules", "zb-v", "--in-a-row", "2")
    rows = {(row["runtime"], row["step"]): row for row in figures["results"]}
    kinds = [("ours", "early"), ("ours", "meeting"), ("ours", "none"), ("torch", "none")]
    assert list(rows) == kinds
    for row in rows.values():
        assert len(row["repeats_ms"]) == 2
        assert row["span_ms"] >= 4 * 3  # m (T_F + T_B + T_W)
        # Between two ends of the last rank it has slept through all its passes.
        assert min(row["repeats_ms"]) >= 4 * 3
    # Two to warm up, then twice one that starts the clock and two that count.
    counts = {kind: (row["steps"], row["early_steps"]) for kind, row in rows.items()}
    assert [counts[kind] for kind in kinds] == [(8, 8), (8, 0), (None, None), (None, None)]
    assert rows["ours", "early"]["rollbacks"] == 0
    # Passes this short have no target for the period.
    assert [verdict["claim"] for verdict in figures["verdicts"]] == [
        "steps not taken early",
        "steps rolled back",
    ]
    assert all(verdict["reached"] for verdict in figures["verdicts"])


def test_compute_trains_the_same_model_on_both_runtimes(tmp_path: pathlib.Path) -> None:
    sizes = "--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --vocab-size 64 --seq-length 8"
    cases = "--microbatches 4 --repeats 1 --schedules zb-h1 zb-interleaved"
    figures = _run(tmp_path, "compute", *sizes.split(), *cases.split())
    rows = {(row["schedule"], row["runtime"]): row for row in figures["results"]}
    assert set(rows) == {
        ("1f1b", "ours"),
        ("1f1b", "torch"),
        ("zb-h1", "ours"),
        ("zb-interleaved", "ours"),
        ("zb-interleaved", "torch"),
    }
    assert len({row["loss"] for row in rows.values() if row["runtime"] == "ours"}) == 1
    (same,) = [v for v in figures["verdicts"] if "difference of losses" in v["claim"]]
    assert same["reached"]
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(1e3 * 4 * 8 / row["step_ms"])
        assert (row["predicted_ms"] is None) == (row["runtime"] == "torch")


def test_split_cost(tmp_path: pathlib.Path) -> None:
    sizes = "--hidden-size 32 --ffn-hidden-size 48 --seq-length 8 --repeats 1"
    figures = _run(tmp_path, "split-cost", *sizes.split())
    found = [(row["case"], row["runtime"]) for row in figures["results"]]
    cases = ["compute", "tiny", "recompute"]
    assert found == [(case, runtime) for case in cases for runtime in ("ours", "torch")]
    assert len(figures["verdicts"]) == 3


def test_a_case_that_takes_too_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(multiprocessing.active_children())
    sizes = "--ranks 2 --microbatches-per-rank 1 --pass-ms 60000 --schedules 1f1b --timeout-s 1"
    assert benchmark_pipeline.main(["emulated", *sizes.split()]) == 2
    assert "Timed out waiting 1000ms" in capsys.readouterr().err
    assert set(multiprocessing.active_children()) <= before  # the sleeping rank has been ended
