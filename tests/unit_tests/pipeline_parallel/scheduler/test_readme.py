"""The README's example schedule is run as it stands; its drawings are held to simulation."""

from __future__ import annotations

import pathlib
import re

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import Schedule, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline, simulate
from megatron.core.pipeline_parallel.zerobubble.scheduler.validate import validate

README = (
    pathlib.Path(__file__).parents[4] / "megatron/core/pipeline_parallel/zerobubble/README.md"
).read_text(encoding="utf-8")


def drawn(timeline: Timeline) -> list[str]:
    """A row per rank, three columns per unit of time."""
    rows = []
    for rank, program in enumerate(timeline.plan.programs):
        row = f"rank {rank}  "
        for instruction, start, end in zip(
            program, timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            row += ".  " * (round(start) - (len(row) - 8) // 3)
            label = f"{instruction.op.value}{instruction.microbatch}"
            row += label.ljust(3 * round(end - start))
        rows.append(row.rstrip())
    return rows


def test_the_example_schedule() -> None:
    planner, line = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {"Schedule": Schedule}
    exec(planner, names)
    table = eval(f"{{{line}}}", names)
    schedule = table["gpipe"]
    for p, m in ((1, 1), (4, 2), (4, 8)):
        plan = schedule.planner(PlanRequest(num_ranks=p, num_microbatches=m))
        validate(plan)
        assert plan.placement == schedule.placement_for(p)
        timeline = simulate(plan, Costs.uniform(plan.placement))
        assert timeline.bubble("makespan") == 3 * (p - 1)
        assert timeline.peaks == (m,) * p


def test_the_drawings() -> None:
    for name, label in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1")):
        plan = plan_schedule(name, PlanRequest(num_ranks=4, num_microbatches=4))
        timeline = simulate(plan, Costs.uniform(plan.placement))
        title = f" {label}, {timeline.makespan:g} units of time"
        lines = README.splitlines()
        first = lines.index(title) + 1
        assert [line.strip() for line in lines[first : first + 4]] == drawn(timeline)
