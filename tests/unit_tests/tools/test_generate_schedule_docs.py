"""docs/schedules.md and its pictures: present, fresh, small, and true."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question

TOOLS = Path(__file__).parents[3] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


docs = load("generate_schedule_docs")


@pytest.fixture(scope="module")
def contents() -> dict[Path, str]:
    return docs.all_contents()


def test_nothing_is_stale(contents: dict[Path, str]) -> None:
    stale = docs.stale_files(contents)
    assert stale == [], "run `python tools/generate_schedule_docs.py`"


def test_a_stale_file_is_found(contents: dict[Path, str]) -> None:
    changed = {**contents, docs.DOCUMENT: contents[docs.DOCUMENT] + "x"}
    assert docs.stale_files(changed) == [docs.DOCUMENT]
    missing = {path: text for path, text in contents.items() if path.stem != "1f1b"}
    assert docs.stale_files(missing) == [docs.PICTURES / "1f1b.svg"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_its_lines_and_a_picture(contents: dict[Path, str], name: str) -> None:
    lines = docs.texts()[name]
    assert list(lines) == ["For", "Bubble", "Memory", "Messages", "Not when"]
    section = contents[docs.DOCUMENT].split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert all(line in section for line in lines.values())
    pictures = re.findall(r"!\[[^\]]*\]\((pictures/[^)]+)\)", section)
    assert pictures
    for picture in pictures:
        assert Path("docs") / picture in contents


def test_pictures_are_small(contents: dict[Path, str]) -> None:
    for path, text in contents.items():
        assert len(text.encode()) < 100_000, path


def test_the_stated_commands_make_the_pictures(
    contents: dict[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load("plan_schedule")
    for name in SCHEDULES:
        for picture in docs.pictures_of(name):
            words = picture.command.split()[2:]
            assert words[-1] == str(picture.path)
            words[-1] = str(tmp_path / "picture.svg")
            assert tool.main(words) == 0
            assert Path(words[-1]).read_text(encoding="utf-8") == contents[picture.path]


# What the lines say for p = 4, m = 16 and equal times of 1, in bubble of the makespan, bubble of
# the longest span, and peak memory. None: the line gives no exact figure. The lines of v-half and
# v-min say "about", so theirs is the most that their peak may be.
P, M = 4, 16
CLAIMS: dict[str, tuple[float | None, float | None, float | None]] = {
    "1f1b": (3 * (P - 1), 3 * (P - 1), P),
    "interleaved": (3 * (P - 1) / 2, 3 * (P - 1) / 2, (2 * P + P - 1) / 2),
    "zb-h1": (P - 1, P - 1, P),
    "zb-h2": (P - 1, 0, 2 * P - 1),
    "zb-v": ((P - 1) / 2, 0, P),
    "v-half": (None, None, P / 2 + 1),
    "v-min": (None, None, (P + 4) // 3),
    "zb-interleaved": ((P - 1) / 2, (P - 1) / 2, P),
    "dualpipe-v": ((P - 1) / 2, (P - 1) / 2, P + 0.5),
}


@pytest.mark.parametrize("name", [name for name in CLAIMS if name in SCHEDULES])
def test_the_figures_in_the_lines_are_true(name: str) -> None:
    timeline = Question(num_ranks=P, num_microbatches=M).answer(name)
    makespan, span, peak = CLAIMS[name]
    if makespan is not None:
        assert timeline.bubble("makespan") == pytest.approx(makespan)
    if span is not None:
        assert timeline.bubble("span") == pytest.approx(span, abs=1e-9)
    if peak is not None and name in ("v-half", "v-min"):
        assert max(timeline.peaks) <= peak + 1e-9
    elif peak is not None:
        assert max(timeline.peaks) == pytest.approx(peak)


MESSAGES: dict[str, Callable[[int], int]] = {
    "plain": lambda chunks: 2 * M * (P - 1),
    "looped": lambda chunks: 2 * M * (chunks * P - 1),
    "v": lambda chunks: 4 * M * (P - 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_messages_in_the_lines_are_true(name: str) -> None:
    timeline = Question(num_ranks=P, num_microbatches=M).answer(name)
    placement = SCHEDULES[name].placement
    expected = MESSAGES[placement](timeline.plan.placement.max_chunks)
    assert sum(timeline.messages_sent) == expected
