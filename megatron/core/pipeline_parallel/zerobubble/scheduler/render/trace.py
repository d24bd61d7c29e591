"""The trace format: what ran when, for Perfetto, chrome://tracing and the HTML page.

A file is one JSON object; `traceEvents` holds one complete event per instruction:

    {"name": "2F0", "ph": "X", "pid": 1, "tid": 0, "ts": 12.5, "dur": 3.0,
     "args": {"stage": 2, "op": "F", "microbatch": 0, "iteration": 12}}

`name` is the instruction's text, `pid` the pipeline rank, `tid` 0, `ts` and `dur` are in
microseconds from any common origin. `iteration` tells iterations in one file apart and may be left
out. Planned timelines (iteration 0) and measured runs use the same format. Other events
(communication, optimizer, profilers) may be in the same file: those without `stage`, `op` and
`microbatch` in `args` are passed over by `load_trace`. So are those with `"void": true` in `args`:
forwards on the weights of a wrong optimizer step (post-validation), which ran again.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..instruction import Instruction, Op, ScheduleError
from ..plan import Plan
from ..simulate import Timeline
from .model_costs import EqualRanks, StageCosts


class TraceEvent(NamedTuple):
    """One instruction as it ran, or as it is planned to run."""

    rank: int
    instruction: Instruction
    start_us: float
    duration_us: float
    iteration: int = 0
    void: bool = False  # on weights of a wrong optimizer step; run again since


def events_of(timeline: Timeline) -> list[TraceEvent]:
    """The events of a timeline whose costs are in microseconds, rank by rank."""
    return [
        TraceEvent(rank, instruction, start, end - start)
        for rank, program in enumerate(timeline.plan.programs)
        for instruction, start, end in zip(
            program, timeline.starts[rank], timeline.ends[rank], strict=True
        )
    ]


def trace_json(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """The file's content: one named process per rank, then the events."""
    events = list(events)
    named = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    return {"displayTimeUnit": "ms", "traceEvents": named + [_as_event(e) for e in events]}


def save_trace(path: str | pathlib.Path, events: Iterable[TraceEvent]) -> None:
    pathlib.Path(path).write_text(json.dumps(trace_json(events)))


def load_trace(path: str | pathlib.Path, iteration: int | None = None) -> list[TraceEvent]:
    """One iteration of a trace file, by rank and start, its first event starting at 0.

    `iteration` None takes the last one in the file. Also takes a bare list of events, which
    Chrome's format allows. Raises ScheduleError, naming the file and the event, for what cannot
    be read.
    """
    try:
        events = _parse(json.loads(pathlib.Path(path).read_text()))
        if iteration is None:
            iteration = max(event.iteration for event in events)
        chosen = [event for event in events if event.iteration == iteration]
        if not chosen:
            held = sorted({event.iteration for event in events})
            raise ScheduleError(f"no event is of iteration {iteration}; it has {held}")
        _refuse_repeats(chosen)
    except OSError as error:
        raise ScheduleError(f"trace {path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScheduleError(f"trace {path} is not JSON: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"trace {path}: {error}") from None
    origin = min(event.start_us for event in chosen)
    shifted = [event._replace(start_us=event.start_us - origin) for event in chosen]
    return sorted(shifted, key=lambda event: (event.rank, event.start_us))


def _parse(data: Any) -> list[TraceEvent]:
    raw = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(raw, list):
        raise ScheduleError("it has no list 'traceEvents'")
    events = [_from_event(event) for event in raw if _counts(event)]
    if not events:
        raise ScheduleError("no event has stage, op and microbatch in its args")
    return events


def first_difference(plan: Plan, events: Sequence[TraceEvent]) -> str | None:
    """How the order that ran differs from the plan, or None: proof that the plan was run.

    `events` are as `load_trace` gives them. AR and PV are left out: they take no time.
    """
    for rank, program in enumerate(plan.programs):
        planned = [instruction for instruction in program if not instruction.op.is_mark]
        ran = [e.instruction for e in events if e.rank == rank and not e.instruction.op.is_mark]
        for step, (wanted, found) in enumerate(zip(planned, ran, strict=False)):
            if wanted != found:
                return f"rank {rank} step {step}: the plan has {wanted}, the trace {found}"
        if len(planned) != len(ran):
            return f"rank {rank}: the plan has {len(planned)} instructions, the trace {len(ran)}"
    strangers = {event.rank for event in events} - set(range(plan.num_ranks))
    if strangers:
        return f"the trace has rank {min(strangers)}, the plan ranks 0 to {plan.num_ranks - 1}"
    return None


def measured_costs(events: Sequence[TraceEvent], per_rank: EqualRanks | None = None) -> StageCosts:
    """The median time of each operation of each stage, in microseconds; transfers take none.

    Half of a fused BW counts as B and half as W, for a trace does not tell its parts. Memory is
    that of `per_rank`. Raises ScheduleError if some operation of a stage was not measured.
    """
    times: dict[tuple[Op, int], list[float]] = {}
    for event in events:
        op, stage, _ = event.instruction
        parts = [(Op.B, 0.5), (Op.W, 0.5)] if op is Op.BW else [(op, 1.0)]
        for part, share in parts:
            times.setdefault((part, stage), []).append(share * event.duration_us)
    stages = range(1 + max(event.instruction.stage for event in events))
    for stage, op in itertools.product(stages, (Op.F, Op.B, Op.W)):
        if (op, stage) not in times:
            raise ScheduleError(
                f"the trace has no {op.value} of stage {stage}, so no plan can be timed by it; "
                "give costs"
            )
    names = {Op.F: "forward", Op.B: "input_grad", Op.W: "weight_grad"}
    return StageCosts(
        lists={
            name: tuple(statistics.median(times[op, stage]) for stage in stages)
            for op, name in names.items()
        },
        per_rank=per_rank or EqualRanks(),
    )


def _as_event(event: TraceEvent) -> dict[str, Any]:
    op, stage, microbatch = event.instruction
    void = {"void": True} if event.void else {}
    return {
        "name": str(event.instruction),
        "ph": "X",
        "pid": event.rank,
        "tid": 0,
        "ts": event.start_us,
        "dur": event.duration_us,
        "args": {
            "stage": stage,
            "op": op.value,
            "microbatch": microbatch,
            "iteration": event.iteration,
            **void,
        },
    }


def _counts(event: Any) -> bool:
    """Whether it is an instruction, and one whose result was used."""
    args = event.get("args") if isinstance(event, dict) else None
    if not isinstance(args, dict):
        return False
    return {"stage", "op", "microbatch"} <= set(args) and args.get("void") is not True


def _from_event(event: dict[str, Any]) -> TraceEvent:
    args = event["args"]
    instruction = Instruction.parse(f"{args['stage']}{args['op']}{args['microbatch']}")
    numbers: dict[str, Any] = {key: event.get(key) for key in ("pid", "ts", "dur")}
    numbers["iteration"] = args.get("iteration", 0)
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScheduleError(f"event {instruction} has {key} {value!r}; it must be a number")
    return TraceEvent(
        int(numbers["pid"]),
        instruction,
        float(numbers["ts"]),
        float(numbers["dur"]),
        int(numbers["iteration"]),
    )


def _refuse_repeats(events: Iterable[TraceEvent]) -> None:
    seen = set()
    for event in events:
        if event.instruction in seen:
            raise ScheduleError(
                f"{event.instruction} ran twice in iteration {event.iteration}; "
                "number the iterations in args"
            )
        seen.add(event.instruction)
