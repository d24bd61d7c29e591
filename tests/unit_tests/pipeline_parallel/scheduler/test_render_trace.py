"""The trace format: round trip, foreign events, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from render_plans import V_SPLIT

from megatron.core.pipeline_parallel.zerobubble.scheduler.costs import Costs
from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import (
    Instruction,
    ScheduleError,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.placement import Placement
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import EqualRanks
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import (
    TraceEvent,
    events_of,
    first_difference,
    load_trace,
    measured_costs,
    save_trace,
    trace_json,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import simulate

COSTS = Costs.uniform(V_SPLIT.placement, forward=4.0, input_grad=6.0, weight_grad=2.0, transfer=0.5)
EVENTS = events_of(simulate(V_SPLIT, COSTS))


def load(tmp_path: Path, data: Any, iteration: int | None = None) -> list[TraceEvent]:
    path = tmp_path / "trace.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return load_trace(path, iteration)


def test_an_event_is_written_as_chrome_reads_it() -> None:
    event = TraceEvent(1, Instruction.parse("2F0"), 12.5, 3.0)
    assert trace_json([event])["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rank 1"}},
        {
            "name": "2F0",
            "ph": "X",
            "pid": 1,
            "tid": 0,
            "ts": 12.5,
            "dur": 3.0,
            "args": {"stage": 2, "op": "F", "microbatch": 0, "iteration": 0},
        },
    ]


def test_a_saved_timeline_is_read_back(tmp_path: Path) -> None:
    save_trace(tmp_path / "trace.json", EVENTS)
    assert load_trace(tmp_path / "trace.json") == EVENTS
    assert first_difference(V_SPLIT, EVENTS) is None


def test_times_are_counted_from_the_first_event(tmp_path: Path) -> None:
    late = [event._replace(start_us=event.start_us + 1e6) for event in EVENTS]
    assert load(tmp_path, trace_json(late)) == EVENTS


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    foreign = [
        {"name": "all-reduce", "ph": "X", "pid": 0, "ts": 0, "dur": 1},
        {"name": "thread", "ph": "M", "args": {"name": "x"}},
        "]",
    ]
    data = trace_json(EVENTS)
    data["traceEvents"] = foreign + data["traceEvents"]
    assert load(tmp_path, data) == EVENTS
    assert load(tmp_path, data["traceEvents"]) == EVENTS  # the bare list


def test_one_iteration_is_taken_from_several(tmp_path: Path) -> None:
    second = [event._replace(iteration=7, start_us=event.start_us + 50) for event in EVENTS]
    data = trace_json(EVENTS + second)
    assert [event.iteration for event in load(tmp_path, data)] == [7] * len(EVENTS)
    assert load(tmp_path, data, 0) == EVENTS
    with pytest.raises(ScheduleError, match=r"no event is of iteration 3; it has \[0, 7\]"):
        load(tmp_path, data, 3)


def test_the_first_difference_from_the_plan_is_named() -> None:
    def swapped(event: TraceEvent) -> TraceEvent:
        names = {"1F0": "1F1", "1F1": "1F0"}
        text = str(event.instruction)
        return event._replace(instruction=Instruction.parse(names.get(text, text)))

    difference = first_difference(V_SPLIT, [swapped(event) for event in EVENTS])
    assert difference == "rank 1 step 0: the plan has 1F0, the trace 1F1"
    shorter = first_difference(V_SPLIT, EVENTS[:-1])
    assert shorter == "rank 1: the plan has 12 instructions, the trace 11"
    stranger = [*EVENTS, EVENTS[0]._replace(rank=5)]
    assert first_difference(V_SPLIT, stranger) == "the trace has rank 5, the plan ranks 0 to 1"


def test_costs_measured_on_a_simulated_run_are_those_it_was_simulated_with() -> None:
    costs = measured_costs(EVENTS, EqualRanks(held_b_to_w=0.5)).cut(V_SPLIT.placement)
    assert costs.forward == pytest.approx(COSTS.forward)
    assert costs.input_grad == pytest.approx(COSTS.input_grad)
    assert costs.weight_grad == pytest.approx(COSTS.weight_grad)
    assert costs.held_b_to_w == (0.25,) * 4
    joined = measured_costs(EVENTS).cut(Placement.plain(2))
    assert joined.forward == pytest.approx((4.0, 4.0))


def test_costs_cannot_be_taken_from_half_a_trace() -> None:
    forwards = [event for event in EVENTS if event.instruction.op.value == "F"]
    with pytest.raises(ScheduleError, match="the trace has no B of stage 0"):
        measured_costs(forwards)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "trace.json is not JSON"),
        ({}, "it has no list 'traceEvents'"),
        ({"traceEvents": []}, "no event has stage, op and microbatch"),
        ([{"args": {"stage": 0, "op": "Q", "microbatch": 0}}], "'0Q0' is not an instruction"),
        (
            [{"args": {"stage": 0, "op": "F", "microbatch": 0}, "pid": 0, "ts": "x", "dur": 1}],
            "event 0F0 has ts 'x'; it must be a number",
        ),
        (trace_json([EVENTS[0], EVENTS[0]]), "0F0 ran twice in iteration 0"),
    ],
)
def test_bad_traces_are_refused_by_name(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=r"trace\.json") as caught:
        load(tmp_path, data)
    assert words in str(caught.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read: No such file"):
        load_trace(tmp_path / "none.json")


def test_void_forwards_are_written_marked_and_passed_over(tmp_path: Path) -> None:
    """The forward that ran again counts: in the order, and in the measured time."""
    first = EVENTS[0]
    void = first._replace(duration_us=77.0, void=True)
    again = [event._replace(start_us=event.start_us + 77.0) for event in EVENTS]
    data = trace_json([void, *again])
    marked = [e for e in data["traceEvents"] if e["ph"] == "X" and "void" in e["args"]]
    assert [(e["name"], e["dur"], e["args"]["void"]) for e in marked] == [
        (str(first.instruction), 77.0, True)
    ]
    events = load(tmp_path, data)
    assert first_difference(V_SPLIT, events) is None
    assert len(events) == len(EVENTS) and not any(event.void for event in events)
    assert min(event.start_us for event in events) == 0.0
