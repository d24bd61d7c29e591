"""Which way imports point: training -> core, never back; the scheduler needs no torch."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CORE = ROOT / "megatron" / "core"
SCHEDULER = CORE / "pipeline_parallel" / "zerobubble" / "scheduler"
ENTRY_SCRIPTS = {path.stem for path in ROOT.glob("*.py")} | {"tools", "examples", "tests"}


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of the modules (and members) that the source imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join(parents) if node.level else ""
            base = ".".join(part for part in (prefix, node.module) if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_below(folder: pathlib.Path, names: set[str]) -> list[str]:
    """'file: module' for each import, below `folder`, of one of `names` or of a part of it."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        for module in imported(path.read_text(encoding="utf-8"), package):
            if any(module == name or module.startswith(f"{name}.") for name in names):
                found.append(f"{path.relative_to(ROOT)}: {module}")
    return found


def test_core_does_not_import_training_or_entry_scripts() -> None:
    assert imports_below(CORE, {"megatron.training", *ENTRY_SCRIPTS}) == []


def test_scheduler_does_not_import_torch() -> None:
    """Planning works on a laptop without torch, and without the runtime."""
    runtime = "megatron.core.pipeline_parallel.zerobubble.runtime"
    assert imports_below(SCHEDULER, {"torch", runtime}) == []


def test_planning_works_without_torch_and_numpy() -> None:
    """The packages above the scheduler must not bring them in either."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None  # importing them raises\n"
        "from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule\n"
        "from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest\n"
        "print(plan_schedule('1f1b', PlanRequest(num_ranks=2, num_microbatches=1)).to_text())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "rank 1: 1F0 1BW0" in result.stdout


def test_the_walk_sees_something() -> None:
    assert imports_below(ROOT / "megatron" / "training", {"megatron.core"})
    assert imports_below(CORE, {"torch"})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", ["torch.nn"]),
        ("from torch import nn", ["torch.nn"]),
        ("def f():\n    import torch", ["torch"]),
        ("from ..training import x", ["megatron.training.x"]),
        ("from .. import training", ["megatron.training"]),
        ("from . import plan", ["megatron.core.plan"]),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: list[str]) -> None:
    assert list(imported(source, "megatron.core")) == expected
