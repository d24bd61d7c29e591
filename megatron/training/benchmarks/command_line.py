"""The benchmarks' subcommands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import SCHEDULES

COMPUTE_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v")
STEP_SCHEDULES = ("zb-h2", "zb-v")  # without a bubble, if ranks do not meet at the step

Run = Callable[[argparse.Namespace], Any]  # what a subcommand does with its flags


def add_emulated(commands: Any, run: Run) -> None:
    add = add_command(commands, "emulated", run, "passes asleep inside the real runtime", repeats=5)
    add_passes(add)
    add_schedules(add, default=list(SCHEDULES))
    add_activation(add, seq_length=256, hidden_size=256)
    add(
        "--back-to-back",
        type=int,
        default=1,
        metavar="N",
        help="measure N steps in a row, without a meeting of the ranks between them; the ideal "
        "is then the longest span in place of the makespan (default: 1, ranks meet)",
    )
    add(
        "--host-ranks",
        type=int,
        default=2,
        metavar="P",
        help="ranks of the measurement with passes of length zero; 0 leaves it out",
    )


def add_steps(commands: Any, run: Run) -> None:
    add = add_command(
        commands,
        "steps",
        run,
        "optimizer steps back to back: early with post-validation, with ranks that meet, none",
        repeats=3,
    )
    add_passes(add)
    add_schedules(add, default=list(STEP_SCHEDULES))
    add_activation(add, seq_length=256, hidden_size=256)
    add(
        "--in-a-row",
        type=int,
        default=5,
        metavar="N",
        help="iterations of a measurement, each with its step; one before them starts the clock",
    )


def add_passes(add: Callable[..., Any]) -> None:
    add("--ranks", type=int, nargs="+", default=[4, 8], metavar="P", help="pipeline ranks")
    add(
        "--microbatches-per-rank",
        type=int,
        nargs="+",
        default=[2, 3],
        metavar="K",
        help="m = K p micro-batches",
    )
    add(
        "--pass-ms",
        type=float,
        nargs="+",
        default=[20.0, 60.0],
        metavar="T",
        help="length of F on all chunks of a rank; a chunk takes its share",
    )
    add(
        "--pass-ratio",
        type=float,
        nargs=3,
        default=[1.0, 1.0, 1.0],
        metavar=("F", "B", "W"),
        help="B and W are T times their share of F's",
    )


def add_compute(commands: Any, run: Run) -> None:
    add = add_command(commands, "compute", run, "a small Llama, one thread a rank", 9)
    add("--ranks", type=int, nargs="+", default=[2], metavar="P", help="pipeline ranks")
    add(
        "--microbatches",
        type=int,
        nargs="+",
        default=[4, 8],
        metavar="M",
        help="micro-batches of a step",
    )
    add_schedules(add, default=[name for name in COMPUTE_SCHEDULES if name in SCHEDULES])
    add_activation(add, seq_length=128, hidden_size=256)
    add("--num-layers", type=int, default=8, metavar="L", help="transformer layers")
    add("--ffn-hidden-size", type=int, default=688, metavar="F", help="width of the MLP")
    add("--num-attention-heads", type=int, default=4, metavar="A", help="heads")
    add("--vocab-size", type=int, default=2048, metavar="V", help="vocabulary")


def add_split_cost(commands: Any, run: Run) -> None:
    add = add_command(commands, "split-cost", run, "what splitting a layer's backward costs", 31)
    add_activation(add, seq_length=256, hidden_size=512)
    add("--ffn-hidden-size", type=int, default=1376, metavar="F", help="width of the MLP")
    add("--num-attention-heads", type=int, default=8, metavar="A", help="heads")
    add("--tiny-seq-length", type=int, default=8, metavar="S", help="of the tiny layer")
    add("--tiny-hidden-size", type=int, default=32, metavar="H", help="of the tiny layer")


class _HelpWithDefaults(argparse.HelpFormatter):
    """Adds the default where there is one worth saying."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default in (None, False, argparse.SUPPRESS) or "default" in text:
            return text
        default = action.default
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{text} (default: {shown})"


def add_command(
    commands: Any, name: str, run: Run, summary: str, repeats: int
) -> Callable[..., Any]:
    """A subcommand with the flags that all share; returns its add_argument."""
    command = commands.add_parser(
        name,
        help=summary,
        description=summary,
        allow_abbrev=False,
        formatter_class=_HelpWithDefaults,
    )
    command.set_defaults(run=run)
    add = command.add_argument
    add("--json", metavar="FILE", help="write all figures there too")
    add("--repeats", type=int, default=repeats, metavar="N", help="measurements to take medians of")
    add("--check", action="store_true", help="exit with 1 if a target is not reached")
    add("--timeout-s", type=float, metavar="S", help="give up a case after this (default: by size)")
    add(
        "--peer",
        choices=["none", "torch"],
        default="none",
        help="measure torch.distributed.pipelining in the same run",
    )
    return add


def add_schedules(add: Callable[..., Any], default: list[str]) -> None:
    add(
        "--schedules",
        nargs="+",
        default=default,
        choices=list(SCHEDULES),
        metavar="NAME",
        help=f"of {', '.join(SCHEDULES)}",
    )


def add_activation(add: Callable[..., Any], *, seq_length: int, hidden_size: int) -> None:
    add("--seq-length", type=int, default=seq_length, metavar="S", help="of an activation")
    add("--micro-batch-size", type=int, default=1, metavar="B", help="of an activation")
    add("--hidden-size", type=int, default=hidden_size, metavar="H", help="of an activation")


def check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """No flag may be below what it counts."""
    smallest: dict[str, float] = {"ranks": 2, "host_ranks": 0, "pass_ratio": 0}
    for name, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            least = smallest.get(name, 0.001 if isinstance(number, float) else 1)
            if isinstance(number, (int, float)) and not isinstance(number, bool) and number < least:
                flag = f"--{name.replace('_', '-')}"
                parser.error(f"{flag} {number:g} is below {least:g}; give at least that")
