"""See, check, simulate and compare pipeline schedules, on a machine without a GPU.

    python tools/plan_schedule.py --schedule zb-v -p 4 -m 8
    python tools/plan_schedule.py --compare all -p 8 -m 24 --costs-us 18522,18086,9337,601
    python tools/plan_schedule.py --compare 1f1b zb-v -p 4 -m 16 --costs stages.json --memory 1,0.4
    python tools/plan_schedule.py --schedule zb-v -p 4 -m 8 --svg zb-v.svg --save zb-v.plan
    python tools/plan_schedule.py --validate zb-v.plan
    python tools/plan_schedule.py --plan zb-v.plan --html zb-v.html --against 1f1b
    python tools/plan_schedule.py --plan run.plan --measured run.json --html run.html

Figures. A plan has two costs: the makespan (from the first start to the last end over all ranks:
ranks meet at the optimizer step) and the longest span (the same for one rank, the longest of all:
they do not meet, with optimizer post-validation). Bubble rate = (cost - work) / cost, where work is
the time the busiest rank computes. Nothing is taken from formulas: all figures come from simulating
the plan. Not modelled: optimizer step, gradient reduction, data loading, launch cost.

Times. F, B and W are the times of one micro-batch through all layers of one rank for the forward,
the backward for the input and the backward for the weights; a stage of a rank with several chunks
takes its share. C is one transfer between two ranks. The default is 1,1,1,0. --costs takes unequal
stages from a JSON file:

    {"forward": [21, 18, 18, 24], "input_grad": [18, 18, 18, 23], "weight_grad": [9, 9, 9, 15],
     "transfer": 0.6, "head": {"forward": 6, "input_grad": 5, "weight_grad": 6}}

in microseconds, one entry per rank (or a multiple) in model order; "held_f_to_b", "held_b_to_w"
(memory, same lists) and "embedding" are optional. For another number of stages the model is cut
anew: each entry is spread evenly over its layers, except that the parts named in "embedding" and
"head" stay whole in the first and in the last stage.

Memory. MB and MW are what one micro-batch of one rank holds from F to B and from B to W; limits are
in the same unit. With the default 1,1 memory counts micro-batches, and 1F1B needs p.

Plans. --save writes a plan as text that --plan and --validate read here and that training runs
with --pipeline-schedule FILE. --trace and --measured use one format, described in
megatron/core/pipeline_parallel/zerobubble/scheduler/render/trace.py.

Exit status: 0; 1 if --validate finds a plan invalid; 2 for anything else that cannot be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.plan import Plan
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.compare import (
    baseline_of,
    compare,
    comparison_json,
    comparison_table,
    gain_over_baseline,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.export import as_json
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.html import to_html
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.model_costs import (
    EqualRanks,
    ModelCosts,
    load_stage_costs,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.question import Question
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.svg import to_svg
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.text import figures, text_grid
from megatron.core.pipeline_parallel.zerobubble.scheduler.render.trace import (
    TraceEvent,
    events_of,
    first_difference,
    load_trace,
    measured_costs,
    trace_json,
)
from megatron.core.pipeline_parallel.zerobubble.scheduler.simulate import Timeline

NO_TERMINAL_WIDTH = 120  # columns of the grid where the output is not a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse_options(argv)
    try:
        check_combinations(options)
        if options.compare:
            show_comparison(options)
        elif options.validate:
            return show_validity(options)
        else:
            show_plan(options)
    except ScheduleError as error:
        print(f"plan_schedule.py: {error}", file=sys.stderr)
        return 2
    return 0


# ---- what the command line says --------------------------------------------


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, without the usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"plan_schedule.py: {message}; --help explains\n")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="schedules:\n"
        + "\n".join(f"  {name:<15} {entry.summary}" for name, entry in SCHEDULES.items()),
    )
    task = parser.add_argument_group("what to do (one of these)").add_mutually_exclusive_group(
        required=True
    )
    task.add_argument("--schedule", metavar="NAME", help="plan and show this schedule")
    task.add_argument("--plan", metavar="FILE", help="show this plan")
    task.add_argument(
        "--validate", metavar="FILE", help="check this plan; exit status 1 if invalid"
    )
    task.add_argument(
        "--compare", nargs="+", metavar="NAME", help="one table of these schedules, or of `all`"
    )
    add_question(parser)
    add_outputs(parser)
    return parser.parse_args(argv)


def add_question(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes, costs, limits").add_argument
    count = whole_number
    add("-p", "--ranks", type=count, metavar="P", help="pipeline ranks")
    add("-m", "--microbatches", type=count, metavar="M", help="micro-batches per iteration")
    add("--chunks", type=count, metavar="N", help="stages per rank, for looped placements")
    add(
        "--group-size",
        type=count,
        metavar="N",
        help="micro-batches a chunk runs before the next chunk's turn, for looped placements",
    )
    costs = parser.add_argument_group("costs").add_mutually_exclusive_group()
    costs.add_argument(
        "--costs-us", type=numbers(4), metavar="F,B,W,C", help="times in microseconds, equal ranks"
    )
    costs.add_argument("--costs", metavar="FILE.json", help="times of unequal stages")
    add("--memory", type=numbers(2), metavar="MB,MW", help="memory held (default: 1,1)")
    add(
        "--memory-limit",
        type=numbers(None),
        metavar="X[,X...]",
        help="most memory a rank may hold: one number, or one per rank",
    )
    add(
        "--objective",
        choices=("span", "makespan"),
        default="span",
        help="the cost that searched schedules make small (default: span)",
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--save", metavar="FILE", help="write the plan as text")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a page with zoom, causes of gaps, and sliders")
    add("--against", metavar="NAME|FILE", help="a second schedule or plan in the page")
    add("--trace", metavar="FILE", help="write a trace for Perfetto (unit times as us)")
    add("--measured", metavar="TRACE.json", help="lay a measured trace under the plan in the page")
    add(
        "--measured-iteration",
        type=int,
        metavar="N",
        help="the iteration of the trace to take (default: the last)",
    )
    add("--width", type=whole_number, metavar="N", help="columns of the grid (default: terminal's)")
    add("--no-grid", action="store_true", help="print the figures only")


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def numbers(how_many: int | None) -> Callable[[str], tuple[float, ...]]:
    """A parser of `how_many` numbers with commas between, or of any number of them."""

    def parse(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(word) for word in text.split(","))
        except ValueError:
            values = ()
        wanted = "numbers" if how_many is None else f"{how_many} numbers"
        if not values or how_many not in (None, len(values)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted} with commas between")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise argparse.ArgumentTypeError(f"{text!r} has a number that is not 0 or more")
        return values

    return parse


def check_combinations(options: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and sizes that are missing."""
    task = next(n for n in ("schedule", "plan", "validate", "compare") if getattr(options, n))
    if task in ("schedule", "compare"):
        for flag, value in (("-p", options.ranks), ("-m", options.microbatches)):
            if value is None:
                raise ScheduleError(f"--{task} needs {flag}")
    single_plan = ("save", "svg", "html", "against", "trace", "measured")
    for name in single_plan if task in ("compare", "validate") else ():
        if getattr(options, name):
            raise ScheduleError(f"--{name} needs --schedule or --plan, not --{task}")
    for name in ("against", "measured"):
        if getattr(options, name) and not options.html:
            raise ScheduleError(f"--{name} is shown in the page that --html writes; give --html")
    if options.measured_iteration is not None and not options.measured:
        raise ScheduleError(
            "--measured-iteration is about the trace of --measured; give --measured"
        )
    for name in ("chunks", "group_size"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value and task in ("plan", "validate"):
            raise ScheduleError(
                f"{flag} {value} is for planning; a plan that is made keeps its own"
            )
        entry = SCHEDULES.get(options.schedule) if value and task == "schedule" else None
        if entry is not None and not entry.takes_chunks:
            free = ", ".join(n for n, other in SCHEDULES.items() if other.takes_chunks)
            raise ScheduleError(
                f"{flag} {value} has no effect on {options.schedule}; leave it out, or take a "
                f"schedule that has a choice ({free or 'there is none'})"
            )


# ---- the question ----------------------------------------------------------


def question_for(
    options: argparse.Namespace, plan: Plan | None = None, events: Sequence[TraceEvent] = ()
) -> Question:
    """What the flags ask, with the sizes of `plan` and by default the costs of `events`."""
    sizes = {"-p": options.ranks, "-m": options.microbatches}
    if plan is not None:
        for flag, planned in (("-p", plan.num_ranks), ("-m", plan.num_microbatches)):
            if sizes[flag] not in (None, planned):
                raise ScheduleError(f"{flag} {sizes[flag]} is given, but the plan has {planned}")
            sizes[flag] = planned
    num_ranks = sizes["-p"]
    limits = options.memory_limit
    if limits is not None and len(limits) not in (1, num_ranks):
        raise ScheduleError(
            f"--memory-limit has {len(limits)} numbers for {num_ranks} ranks; give one for all, "
            "or one per rank"
        )
    if limits is not None and len(limits) == 1:
        limits *= num_ranks
    return Question(
        num_ranks=num_ranks,
        num_microbatches=sizes["-m"],
        costs=costs_of(options, events),
        memory_limits=limits,
        objective=options.objective,
        num_chunks=options.chunks,
        group_size=options.group_size,
    )


def costs_of(options: argparse.Namespace, events: Sequence[TraceEvent]) -> ModelCosts:
    held_f_to_b, held_b_to_w = options.memory or (1.0, 1.0)
    memory = EqualRanks(held_f_to_b=held_f_to_b, held_b_to_w=held_b_to_w)
    if options.costs:
        costs = load_stage_costs(options.costs, memory)
        named = [name for name in costs.lists if name.startswith("held")]
        if named and options.memory:
            raise ScheduleError(
                f"--memory is given, and {options.costs} has {' and '.join(named)}; keep one"
            )
        return costs
    if options.costs_us:
        forward, input_grad, weight_grad, transfer = options.costs_us
        if forward == 0:
            raise ScheduleError("--costs-us has 0 for F; a forward takes time, give more than 0")
        return dataclasses.replace(
            memory,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            transfer=transfer,
        )
    return measured_costs(events, memory) if events else memory


def unit_of(options: argparse.Namespace) -> str:
    return "us" if options.costs or options.costs_us or options.measured else ""


# ---- the tasks -------------------------------------------------------------


def show_plan(options: argparse.Namespace) -> None:
    """--schedule or --plan: grid and figures, and the files that were asked for."""
    events = load_trace(options.measured, options.measured_iteration) if options.measured else []
    if options.plan:
        plan = load_plan(options.plan)
        question = question_for(options, plan, events)
        timeline = blaming(f"--plan {options.plan}", lambda: question.timeline(plan))
    else:
        question = question_for(options, None, events)
        timeline = blaming(
            f"--schedule {options.schedule}", lambda: question.answer(options.schedule)
        )
    if options.json:
        print(json.dumps(as_json(timeline)))
    else:
        if not options.no_grid:
            print(grid(timeline, options), end="\n\n")
        print(figures(timeline, unit=unit_of(options)))
        if not timeline.plan.forward_only:
            print(gain_over_baseline(baseline_of(question), timeline))
        if events:
            difference = first_difference(timeline.plan, events)
            print(f"measured      {difference or 'in the planned order on every rank'}")
    write_files(options, question, timeline, events)


def grid(timeline: Timeline, options: argparse.Namespace) -> str:
    on_terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if on_terminal else NO_TERMINAL_WIDTH
    return text_grid(
        timeline,
        width=options.width or columns,
        colour=on_terminal and "NO_COLOR" not in os.environ,
        unit=unit_of(options),
    )


def write_files(
    options: argparse.Namespace,
    question: Question,
    timeline: Timeline,
    events: Sequence[TraceEvent],
) -> None:
    """Every file that was asked for; says on stderr what was written."""
    unit = unit_of(options)

    def page() -> str:
        second = [second_timeline(options.against, question)] if options.against else []
        return to_html(
            [timeline, *second],
            unit=unit,
            memory_limits=question.memory_limits,
            measured=events or None,
        )

    contents: dict[str, Callable[[], str]] = {
        "save": timeline.plan.to_text,
        "svg": lambda: to_svg(timeline, unit=unit),
        "trace": lambda: json.dumps(trace_json(events_of(timeline))),
        "html": page,
    }
    for name, content in contents.items():
        path = getattr(options, name)
        if path:
            text = content()
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ScheduleError(
                    f"--{name} {path} cannot be written: {error.strerror}"
                ) from None
            print(f"wrote {path}", file=sys.stderr)


def second_timeline(against: str, question: Question) -> Timeline:
    """--against: a schedule under the same question, or a plan of the same sizes."""
    flag = f"--against {against}"
    if against in SCHEDULES:
        return blaming(flag, lambda: question.suited_to(against).answer(against))
    if not Path(against).is_file():
        raise ScheduleError(f"{flag} is neither a file nor a schedule ({', '.join(SCHEDULES)})")
    plan = blaming(flag, lambda: Plan.from_text(read_text(against), source=against))
    sizes = (plan.num_ranks, plan.num_microbatches)
    if sizes != (question.num_ranks, question.num_microbatches):
        raise ScheduleError(
            f"{flag} has p = {sizes[0]}, m = {sizes[1]}, but the first plan has "
            f"p = {question.num_ranks}, m = {question.num_microbatches}; compare equal sizes"
        )
    return blaming(flag, lambda: question.timeline(plan))


def show_validity(options: argparse.Namespace) -> int:
    """--validate: OK with figures, or the first bad instruction and status 1."""
    text = read_text(options.validate)
    try:
        plan = Plan.from_text(text, source=options.validate)
        timeline = question_for(options, plan).timeline(plan)
    except ScheduleError as error:
        if options.json:
            print(json.dumps({"valid": False, "error": str(error)}))
        else:
            print(f"invalid: {error}")
        return 1
    if options.json:
        print(json.dumps({"valid": True, **as_json(timeline)}))
    else:
        print(f"OK: {options.validate} is valid\n{figures(timeline, unit=unit_of(options))}")
    return 0


def show_comparison(options: argparse.Namespace) -> None:
    """--compare: the table, or a JSON object with one entry per schedule."""
    names = [name for word in options.compare for name in word.split(",") if name]
    if names == ["all"]:
        names = list(SCHEDULES)
    for name in names:
        if name not in SCHEDULES:
            raise ScheduleError(
                f"--compare {name}: no such schedule; choose from all, {', '.join(SCHEDULES)}"
            )
    comparison = compare(names, question_for(options))
    if options.json:
        print(json.dumps(comparison_json(comparison)))
    else:
        print(comparison_table(comparison, unit=unit_of(options)))


def load_plan(path: str) -> Plan:
    return blaming(f"--plan {path}", lambda: Plan.from_text(read_text(path), source=path))


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ScheduleError(f"{path} cannot be read: {reason}") from None


def blaming(flag: str, action: Callable[[], Any]) -> Any:
    """The action's result; a ScheduleError from it names the flag that caused it."""
    try:
        return action()
    except ScheduleError as error:
        raise ScheduleError(f"{flag}: {error}") from None


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly under `| head`
    sys.exit(main())
