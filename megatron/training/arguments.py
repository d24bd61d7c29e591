"""The command line: argv -> checked `RunConfig`, and the flat namespace for Megatron scripts.

    run, namespace = parse_run(sys.argv[1:], world_size=8)

Every problem is reported, all at once, before any process group exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron.training.cli import (
    REQUIRED,
    ArgumentGroup,
    CommandLine,
    ConfigError,
    add_group,
    flag_fields,
    flags_of,
    from_namespace,
    parse_all,
    shown,
)
from megatron.training.config import GROUPS, RunConfig, flat_namespace
from megatron.training.config.compatibility import (
    IGNORED,
    REFUSED,
    REMOVED,
    RENAMED,
    add_other_flags,
)
from megatron.training.config.from_checkpoint import take_checkpoint_args
from megatron.training.config.not_yet import NOT_YET
from megatron.training.config.notices import notices_of
from megatron.training.rules import broken_rules

__all__ = [
    "IGNORED",
    "NOT_YET",
    "REFUSED",
    "REMOVED",
    "RENAMED",
    "build_parser",
    "parse_args",
    "parse_run",
    "read_run",
    "validate_args",
]

ExtraArgs = Callable[[argparse.ArgumentParser], Any]
ReadCheckpointArgs = Callable[[argparse.Namespace], Mapping[str, Any]]


def parse_run(
    argv: Sequence[str] | None = None, *, world_size: int, rank: int = 0, **options: Any
) -> tuple[RunConfig, argparse.Namespace]:
    """`read_run` for a program (None: `sys.argv[1:]`): a command line with problems ends every
    rank with status 2, after rank 0 has named them all."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        return read_run(argv, world_size=world_size, rank=rank, **options)
    except ConfigError as error:
        if rank == 0:
            count = len(error.messages)
            heading = "1 problem" if count == 1 else f"{count} problems"
            lines = "\n".join(f"  {message}" for message in error.messages)
            print(f"{heading} in the command line:\n{lines}", file=sys.stderr)
        sys.exit(2)


def read_run(
    argv: Sequence[str],
    *,
    world_size: int,
    rank: int = 0,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    read_checkpoint_args: ReadCheckpointArgs | None = None,
) -> tuple[RunConfig, argparse.Namespace]:
    """Read and check a command line.

    `extra_args_provider` adds a program's own flags, whose values appear on the namespace.
    `args_defaults` are values for what the user leaves unset. `read_checkpoint_args` returns the
    arguments stored in the checkpoint that the namespace names, for `--use-checkpoint-args`.
    Raises ConfigError with one message per problem.
    """
    parser = build_parser(extra_args_provider)
    argv, notices, problems = rename(argv)
    namespace, leftover, unreadable = parse_all(parser, argv)
    problems += unreadable
    if not ignore_unknown_args:
        problems += unknown(leftover, known_flags(parser))
    explicit = stated(parser, argv)
    notices += apply_defaults(namespace, explicit, args_defaults or {})
    if namespace.use_checkpoint_args and read_checkpoint_args is None:
        problems.append("--use-checkpoint-args: this program reads none; give the model flags")
    elif namespace.use_checkpoint_args and read_checkpoint_args is not None:
        notices += take_checkpoint_args(namespace, explicit, read_checkpoint_args(namespace))
    problems += missing(namespace, unreadable)

    run, invalid = build_run(namespace, world_size=world_size, rank=rank, explicit=explicit)
    problems += invalid
    problems += broken_rules(run, already_broken=bool(problems))
    if problems:
        raise ConfigError(problems)
    run = dataclasses.replace(run, notices=(*notices, *notices_of(run)))
    flat = flat_namespace(run)
    extra = {k: v for k, v in vars(namespace).items() if k not in vars(flat)}
    return run, argparse.Namespace(**vars(flat), **extra)


def parse_args(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Megatron's entry: the flat namespace of a checked command line.

    World size and rank come from torchrun's environment.
    """
    _, namespace = parse_run(
        argv,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        rank=int(os.environ.get("RANK", "0")),
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        ignore_unknown_args=ignore_unknown_args,
    )
    return namespace


def validate_args(
    args: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """For scripts that call it after `parse_args`, which has done the checks already.

    Raises ValueError for defaults, which come too late here.
    """
    if defaults:
        raise ValueError("give args_defaults to parse_args; validate_args comes too late for them")
    return args


def build_parser(extra_args_provider: ExtraArgs | None = None) -> CommandLine:
    """The argparse parser with every flag of every group and table."""
    parser = CommandLine(
        description="Megatron-LM Arguments",
        usage="%(prog)s --FLAG VALUE ...",
        allow_abbrev=False,
        exit_on_error=False,
    )
    for cls in GROUPS.values():
        add_group(parser, cls)
    add_other_flags(parser)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser


def rename(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The command line in new spellings, a notice per old one, and a problem per double one."""
    written = {token.partition("=")[0] for token in argv}
    renamed, notices, problems = [], [], []
    for token in argv:
        flag, equals, value = token.partition("=")
        new = RENAMED.get(flag)
        if new is not None:
            notices.append(f"{flag} is the older spelling of {new}")
            if new in written:
                problems.append(f"{flag} and {new} are the same flag; give one")
        renamed.append(token if new is None else new + equals + value)
    return renamed, notices, problems


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every spelling the parser accepts."""
    return list(parser._option_string_actions)


def stated(parser: argparse.ArgumentParser, argv: Sequence[str]) -> frozenset[str]:
    """Names of the values that the command line states, whether or not they are the default."""
    actions = parser._option_string_actions
    tokens = (token.partition("=")[0] for token in argv)
    return frozenset(actions[token].dest for token in tokens if token in actions)


def unknown(leftover: Sequence[str], flags: Collection[str]) -> list[str]:
    """Problems with tokens that no flag took."""
    problems, after_flag = [], False
    for token in leftover:
        flag = token.partition("=")[0]
        if flag in REMOVED:
            problems.append(f"{flag} is no longer a flag; use {REMOVED[flag]}")
        elif flag.startswith("--"):
            close = difflib.get_close_matches(flag, flags, n=3, cutoff=0.75)
            hint = f"did you mean {' or '.join(close)}?" if close else "see --help for all flags"
            problems.append(f"{flag} is not a known flag; {hint}")
        elif not after_flag:
            problems.append(f"{token!r} belongs to no flag; put it after its flag or remove it")
        after_flag = after_flag or flag.startswith("--")
    return problems


def apply_defaults(
    namespace: argparse.Namespace, explicit: Collection[str], defaults: Mapping[str, Any]
) -> list[str]:
    """Use the program's defaults where the user stated nothing; a notice where he did."""
    notices = []
    for name, default in defaults.items():
        value = getattr(namespace, name, None)
        if name not in explicit:
            setattr(namespace, name, default)
        elif value != default:
            notices.append(f"{name} is {shown(value)}, not the program's default {shown(default)}")
    return notices


def missing(namespace: argparse.Namespace, unreadable: Sequence[str]) -> list[str]:
    """Problems with required flags that are not given; an unreadable one was."""
    reported = {message.partition(":")[0] for message in unreadable}
    flags = [
        flags_of(field)[0]
        for cls in GROUPS.values()
        for field in flag_fields(cls)
        if field.default is REQUIRED and getattr(namespace, field.name) is None
    ]
    return [f"{flag} is required; add it" for flag in flags if flag not in reported]


def build_run(
    namespace: argparse.Namespace, *, world_size: int, rank: int, explicit: frozenset[str]
) -> tuple[RunConfig, list[str]]:
    """The groups filled in, and the problems that single groups have."""
    groups: dict[str, ArgumentGroup] = {}
    problems: list[str] = []
    for name, cls in GROUPS.items():
        try:
            groups[name] = from_namespace(cls, namespace)
        except ConfigError as error:
            assert error.group is not None, "a group names itself in its error"
            groups[name] = error.group
            problems += error.messages
    unused = {row.dest: getattr(namespace, row.dest) for row in (*IGNORED, *REFUSED)}
    run = RunConfig(
        **groups,  # type: ignore[arg-type]
        world_size=world_size,
        rank=rank,
        unused=unused,
        explicit=explicit,
    )
    return run, problems
