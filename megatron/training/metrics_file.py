"""`--metrics-file`: a run's metrics as JSON lines, one object a start, training step or evaluation.

docs/metrics.md describes the records. The rank that has the loss writes; every line is flushed, so
that a killed run loses at most the line it was writing.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from megatron.training.step_report import StepReport

_OPENING = '{"type": "'  # every record begins so, an unfinished one too


class MetricsFile:
    """Appends records to a file that holds those of a run's earlier jobs.

    Opening drops the records that the run is about to repeat (those after `resumed_iteration`, the
    iteration of the checkpoint it goes on from; 0 for a new run) and writes a start record.
    Raises ValueError if the file is there and is not a metrics file.
    """

    def __init__(
        self, path: str | pathlib.Path, *, config: Mapping[str, Any], resumed_iteration: int = 0
    ) -> None:
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._drop_after(resumed_iteration)
        self._file = self._path.open("a")
        self._write({"type": "start", "iteration": resumed_iteration, "config": dict(config)})

    def step(
        self, report: StepReport, *, elapsed_s: float, tokens: int, tflops_per_gpu: float | None
    ) -> None:
        """Write a training step that took `elapsed_s` for `tokens` tokens over all ranks."""
        self._write(
            {
                "type": "step",
                "iteration": report.iteration,
                "consumed_samples": report.consumed_samples,
                "elapsed_ms": elapsed_s * 1000,
                **report.losses,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "decoupled_learning_rate": report.decoupled_learning_rate,
                "loss_scale": report.loss_scale,
                "num_zeros": report.num_zeros,
                "params_norm": report.params_norm,
                "global_batch_size": report.global_batch_size,
                "tokens_per_second": tokens / elapsed_s if elapsed_s > 0 else None,
                "tflops_per_gpu": tflops_per_gpu,
                "timings_ms": report.timings_ms,
                "skipped": report.skipped,
                "optimizer_rollbacks": report.optimizer_rollbacks,
            }
        )

    def evaluation(
        self, iteration: int, *, prefix: str, consumed_samples: int, losses: Mapping[str, float]
    ) -> None:
        """Write the mean losses of an evaluation; `prefix` is what the printed block calls it."""
        self._write(
            {
                "type": "eval",
                "iteration": iteration,
                "prefix": prefix,
                "consumed_samples": consumed_samples,
                **losses,
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(_strict(record), allow_nan=False) + "\n")
        self._file.flush()

    def _drop_after(self, iteration: int) -> None:
        """Keep what happened up to `iteration`: a start record goes if no step can follow it."""
        kept = [
            record
            for record in read_metrics(self._path)
            if record["iteration"] + (record["type"] == "start") <= iteration
        ]
        # Into another file first: a kill in the middle must not lose the history.
        rewritten = self._path.with_name(self._path.name + ".tmp")
        rewritten.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(rewritten, self._path)


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics file, first to last.

    A last line without its end was being written when the run was killed; it is left out. Any other
    line that is not a record raises a ValueError that names it.
    """
    text = pathlib.Path(path).read_text(errors="replace")
    *whole_lines, unfinished = text.split("\n")
    if unfinished[: len(_OPENING)] != _OPENING[: len(unfinished)]:
        raise _not_metrics(path, len(whole_lines) + 1, unfinished)
    return [_parse(line, path, number) for number, line in enumerate(whole_lines, start=1)]


def _parse(line: str, path: str | pathlib.Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if record["type"] in ("start", "step", "eval") and isinstance(record["iteration"], int):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise _not_metrics(path, number, line)


def _not_metrics(path: str | pathlib.Path, number: int, line: str) -> ValueError:
    return ValueError(
        f"{path} line {number} is not a metrics record ({line[:60]!r}); a metrics file holds JSON "
        "objects with a type and an iteration: move the file away, or give --metrics-file another"
    )


def _strict(value: Any) -> Any:
    """The value in strict JSON, which has no NaN and no infinity: they become the strings "nan",
    "inf" and "-inf", which Python's `float` reads. What JSON does not know becomes its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value if value is None or isinstance(value, int | str) else str(value)
