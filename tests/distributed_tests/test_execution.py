"""What the ranks really run and exchange is the plan, instruction by instruction."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections import defaultdict
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.runtime import pipeline_runtime
from megatron.core.pipeline_parallel.zerobubble.runtime.channels import Channels
from megatron.core.pipeline_parallel.zerobubble.runtime.compute import StageCompute
from megatron.core.pipeline_parallel.zerobubble.runtime.pipeline_runtime import PipelineRuntime
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import Instruction
from megatron.core.pipeline_parallel.zerobubble.scheduler.passes.communication import Message
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES, plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from tests.distributed_tests import test_runtime as toy
from tests.worker_pool import RankFailure

_OPS = {"forward": "F", "input_backward": "B", "weight_backward": "W", "full_backward": "BW"}


class _Record(NamedTuple):
    """Of one rank, in order: passes, and the messages whose ends it saw."""

    ran: list[str]
    sent: list[Message]
    posted: list[Message]
    awaited: list[Message]


def _records(plans: list[Plan]) -> list[_Record]:
    return [_record(plan) for plan in plans]


def _record(plan: Plan) -> _Record:
    """Seen from outside: the calls that compute and that communicate, of the first iteration."""
    record = _Record([], [], [], [])

    def noting_pass(name: str) -> Any:
        function = getattr(StageCompute, name)

        def wrapper(self: StageCompute, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            record.ran.append(f"{self.context.stage}{_OPS[name]}{microbatch}")
            return function(self, microbatch, *args, **kwargs)

        return mock.patch.object(StageCompute, name, wrapper)

    def noting_message(name: str, into: list[Message]) -> Any:
        function = getattr(Channels, name)

        def wrapper(self: Channels, message: Message, *args: Any) -> Any:
            into.append(message)
            return function(self, message, *args)

        return mock.patch.object(Channels, name, wrapper)

    patches = [noting_pass(name) for name in _OPS]
    for name, into in (
        ("send", record.sent),
        ("post_receive", record.posted),
        ("wait_receive", record.awaited),
    ):
        patches.append(noting_message(name, into))
    for patch in patches:
        patch.start()
    try:
        toy._run(plan)
    finally:
        for patch in patches:
            patch.stop()
    halves = [entries[: len(entries) // 2] for entries in record]  # it runs two iterations
    assert all(half * 2 == whole for half, whole in zip(halves, record, strict=True))
    return _Record(*halves)  # type: ignore[arg-type]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("p", [2, 4])
def test_what_runs_is_the_plan(pool: Any, p: int) -> None:
    """Rank by rank; and messages match one to one, each awaited by the rank that needs it."""
    plans = [plan_schedule(s, PlanRequest(num_ranks=p, num_microbatches=6)) for s in SCHEDULES]
    per_rank = pool.run(p, _records, plans)
    for index, plan in enumerate(plans):
        records = [results[index] for results in per_rank]
        for program, record in zip(plan.programs, records, strict=True):
            assert record.ran == [str(instruction) for instruction in program], plan.schedule
        sent, posted, awaited = (
            _by_channel(records, kind) for kind in ("sent", "posted", "awaited")
        )
        assert posted == sent, f"{plan.schedule}: receives in the order of the sender"
        assert {c: sorted(m) for c, m in awaited.items()} == {c: sorted(m) for c, m in sent.items()}
        assert sum(map(len, sent.values())) == _crossings(plan)


def _by_channel(records: list[_Record], kind: str) -> dict[Any, list[Any]]:
    found = defaultdict(list)
    for record in records:
        for message in getattr(record, kind):
            found[message.channel].append(message.value)
    return dict(found)


def _crossings(plan: Plan) -> int:
    """Hand-overs between stages of different ranks: an activation and a gradient each."""
    rank_of, stages = plan.placement.rank_of, range(plan.placement.num_stages)
    borders = sum(rank_of(s) != rank_of(s + 1) for s in stages[:-1])
    return 2 * borders * plan.num_microbatches


def _labels(plan: Plan) -> list[str]:
    """The labels of a profile, in order of time, from the trace that a person would open."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        toy._run(plan)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(pathlib.Path(folder, "trace.json").read_text())["traceEvents"]
    labelled = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(labelled, key=lambda event: event["ts"])]


def test_the_profiler_sees_every_instruction(pool: Any) -> None:
    """Under the text that plans and errors use, in both iterations."""
    plan = plan_schedule("zb-v", PlanRequest(num_ranks=2, num_microbatches=3))
    for program, labels in zip(plan.programs, pool.run(2, _labels, plan), strict=True):
        words = [label.split()[-1] for label in labels]
        known = set(map(str, program))
        assert [word for word in words if word in known] == [str(i) for i in program] * 2


def _ranks_with_different_plans() -> None:
    """Rank 0 turns to its second chunk after two micro-batches, rank 1 expects that after four."""
    request = PlanRequest(num_ranks=2, num_microbatches=4, group_size=2 + 2 * dist.get_rank())
    plan = plan_schedule("interleaved", request)
    with mock.patch.object(PipelineRuntime, "_agreed", lambda self, m: self._plan_for(m)):
        toy._run(plan, check_identity=True)


def test_debug_mode_names_a_message_that_is_not_the_one_due(pool: Any) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(2, _ranks_with_different_plans)
    said = str(caught.value)
    assert "rank 1 expected act(0,2) from rank 0, but message [1, 2, 0] came" in said
    assert "rank 1 at step 2: 1F0 1F1 [1F2] 1F3" in said


_ONE_STAGE, _TWO_STAGES = Placement.looped(1, 1), Placement.looped(1, 2)


@pytest.mark.parametrize(
    ("placement", "program", "left"),
    [
        (_ONE_STAGE, "0F0 0B0 0F1 0B1 0W0", r"deferred weight gradients left: \[1\]"),
        (_ONE_STAGE, "0F0 0F1 0BW0", r"micro-batches without a backward: \[1\]"),
        (_TWO_STAGES, "0F0 1F0 1BW0 0F1 1F1 1BW1 0BW0", r"made and never used: \['grad\(1,1\)'\]"),
    ],
)
def test_nothing_may_be_left_behind_an_iteration(
    placement: Placement, program: str, left: str
) -> None:
    """Also if a plan that leaves something were to come past the checks before a run."""
    plan = Plan.of("leaky", placement, 2, [[Instruction.parse(word) for word in program.split()]])
    with mock.patch.object(pipeline_runtime, "validate"), pytest.raises(AssertionError, match=left):
        toy._run(plan)
