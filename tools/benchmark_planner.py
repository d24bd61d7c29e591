"""Hold our planners against the schedules of others, against published figures and against time.

    python tools/benchmark_planner.py --peer peer_schedules.csv
    python tools/benchmark_planner.py --peer tests/golden/peer_rows.csv --only zb,zbv --jobs 2
    python tools/benchmark_planner.py --paper --only zb-v
    python tools/benchmark_planner.py --speed --only v-half

Needs no torch, no GPU and no processes but its own. Several of the three may be asked for at once.

--peer FILE.csv. Each row is one schedule that another scheduler planned: p, m, times, its longest
span and its peak memory (columns and units: megatron/training/benchmarks/planner_peer.py, which
also says which of our schedules is held against which of the peer's). We plan the same problem
with no more memory than the peer used; ours must not be longer by more than 1e-6 of it. By default
each rank may hold as much as the peer's fullest rank; --peer-ranks FILE.csv gives the peaks of
every rank and limits each of ours to that of the peer's. --rows and --max-size take a part.

--paper. The bubble rates of tables 5 and 8 and figures 7 and 9 of arXiv:2401.10241, on the profiles
of that paper, and a few that slow searches found; ours must not be above the printed digits
(megatron/training/benchmarks/planner_paper.py holds the figures and their sources).

--speed. Planning with the default budget, validation and the communication pass together, for
every schedule at (p, m) = (8, 64), (32, 256) and (64, 512): at most 0.5, 5 and 30 s on one core.
Use --jobs 1 and a machine that does nothing else.

Every plan printed has passed `validate` with its memory limits. Columns: limit and peak are memory
of the fullest rank; cost is the longest span; excess is ours over theirs; bubble is
(cost - work) / cost; gap is our cost over the lower bound of search/bounds.py, so 0 is the best
possible (and a large gap may be the bound's fault); s is the time of planning.

Exit status: 0; 1 if a row is worse than the figure it is held against or a time is not reached;
2 if something cannot be done.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron.core.pipeline_parallel.zerobubble.scheduler.instruction import ScheduleError
from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES
from megatron.training.benchmarks import planner_report as report
from megatron.training.benchmarks.planner_cases import FAILURES, Answer, Case, answer
from megatron.training.benchmarks.planner_paper import paper_cases
from megatron.training.benchmarks.planner_peer import PEER_SCHEDULES, load_peer_cases
from megatron.training.benchmarks.planner_speed import SpeedRow, measure_speed, speed_cases

Question = TypeVar("Question")
Found = TypeVar("Found")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    options = parse_options(argv)
    try:
        if options.json:
            open(options.json, "a").close()  # rather fail now than after the measurements
        figures, good = run(options)
    except (OSError, ScheduleError) as error:
        print(f"benchmark_planner.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1


def run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """What was found, for machines, and whether all of it is as good as it must be."""
    figures: dict[str, Any] = {}
    good = True
    if options.peer:
        cases = load_peer_cases(options.peer, options.peer_ranks)
        answers = show_answers(f"against {options.peer}", cases, options)
        figures["peer"] = [report.answer_json(a) for a in answers]
        good &= not any(a.verdict in FAILURES for a in answers)
    if options.paper:
        answers = show_answers("against published figures", paper_cases(), options)
        figures["paper"] = [report.answer_json(a) for a in answers]
        good &= not any(a.verdict in FAILURES for a in answers)
    if options.speed:
        rows = show_speed(options)
        figures["speed"] = [report.speed_json(row) for row in rows]
        good &= all(row.reached for row in rows)
    return figures, good


# ---- what the command line says --------------------------------------------


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, without the usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"benchmark_planner.py: {message}; --help explains\n")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=f"our schedules: {', '.join(SCHEDULES)}\nthe peer's: {', '.join(PEER_SCHEDULES)}",
    )
    add = parser.add_argument
    add("--peer", metavar="FILE.csv", help="a table of another scheduler's schedules")
    add("--peer-ranks", metavar="FILE.csv", help="its peaks per rank, as limits per rank")
    add("--paper", action="store_true", help="tables and figures of arXiv:2401.10241")
    add("--speed", action="store_true", help="time of planning, validation, communication pass")
    add(
        "--only",
        type=names,
        metavar="NAME[,NAME]",
        help="only these schedules, by our names or by the peer's",
    )
    add(
        "--rows",
        type=row_range,
        default=slice(None),
        metavar="FIRST:STOP[:STEP]",
        help="of what is left of a table, only rows FIRST (from 0) to STOP - 1, every STEP-th",
    )
    add(
        "--max-size",
        type=count,
        metavar="N",
        help="only plans of at most N instructions",
    )
    add("--jobs", type=count, default=1, metavar="N", help="processes (default: 1)")
    add("--json", metavar="FILE", help="write all figures there too")
    add("--quiet", action="store_true", help="print only rows that fall short, and the summary")
    options = parser.parse_args(argv)
    if not (options.peer or options.paper or options.speed):
        parser.error("nothing to do: give --peer FILE.csv, --paper or --speed")
    if options.peer_ranks and not options.peer:
        parser.error("--peer-ranks is given without the table it belongs to; add --peer FILE.csv")
    return options


def names(text: str) -> list[str]:
    known = [*SCHEDULES, *(name for name in PEER_SCHEDULES if name not in SCHEDULES)]
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a schedule; choose from {', '.join(known)}"
            )
    return text.split(",")


def row_range(text: str) -> slice:
    try:
        first, stop, *step = (int(part) if part else None for part in text.split(":"))
        if len(step) > 1 or step == [0]:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of rows; write it as FIRST:STOP or FIRST:STOP:STEP"
        ) from None
    return slice(first, stop, *step)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def chosen(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    """The part of the cases that --only, --max-size and --rows leave."""
    most = options.max_size or float("inf")
    left = [
        case
        for case in cases
        if (not options.only or {case.name, case.schedule} & set(options.only))
        and case.num_instructions <= most
    ]
    return left[options.rows]


# ---- running and showing ---------------------------------------------------


def show_answers(title: str, cases: Sequence[Case], options: argparse.Namespace) -> list[Answer]:
    questions = chosen(cases, options)
    if not questions:
        raise ScheduleError(
            f"{title}: no row is left of {len(cases)}; give a larger part with --only, --max-size "
            "and --rows"
        )
    print(f"\n{title}: {len(questions)} of {len(cases)} rows\n\n{report.ROW_HEADS}", flush=True)
    answers = []
    for found in in_turn(answer, questions, options.jobs):
        answers.append(found)
        if not options.quiet or found.verdict in FAILURES:
            print(report.row_line(found), flush=True)
    print(f"\n{report.summary(answers)}")
    return answers


def show_speed(options: argparse.Namespace) -> list[SpeedRow]:
    questions = [case for case in speed_cases() if not options.only or case[0] in options.only]
    if not questions:
        raise ScheduleError("--only names none of our schedules, and --speed times no others")
    print("\nplanning, validation and communication pass, default limits and budget\n", flush=True)
    rows = []
    for row in in_turn(measured, questions, options.jobs):
        rows.append(row)
        print(report.speed_line(row), flush=True)
    print(f"\n{sum(row.reached for row in rows)} of {len(rows)} times reached")
    return rows


def measured(case: tuple[str, int, int]) -> SpeedRow:
    return measure_speed(*case)


def in_turn(
    work: Callable[[Question], Found], questions: Sequence[Question], jobs: int
) -> Iterator[Found]:
    """Each question's answer, in their order, with the progress shown on stderr."""
    if jobs == 1 or len(questions) < 2:
        yield from with_progress(map(work, questions), len(questions))
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(questions))) as pool:
        yield from with_progress(pool.imap(work, questions), len(questions))


def with_progress(found: Iterator[Found], total: int) -> Iterator[Found]:
    """A line on stderr that is written anew for each answer, where stderr is a terminal."""
    on_terminal = sys.stderr.isatty() and not sys.stdout.isatty()
    for number, one in enumerate(found, start=1):
        if on_terminal:
            end = "\n" if number == total else ""
            print(f"\r{number} of {total}", end=end, file=sys.stderr, flush=True)
        yield one


if __name__ == "__main__":
    sys.exit(main())
