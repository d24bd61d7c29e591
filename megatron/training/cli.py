"""Dataclass <-> argparse: the fields of a config group become flags, parsed values become a group.

    @dataclass(frozen=True, kw_only=True)
    class BatteryArguments(ArgumentGroup):
        \"\"\"Batteries.\"\"\"

        volts: float = arg(1.5, "Voltage of one cell.", at_least=0)
        rechargeable: bool = arg(False, "Cells can be charged again.")

gives `--volts X` and `--rechargeable`. A field whose default is True gives `--no-NAME`, and
`--disable-NAME` as another spelling.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

REQUIRED = dataclasses.MISSING  # the default of a field that the user must give


class ConfigError(ValueError):
    """What a user asked for cannot be done; one message for each reason."""

    def __init__(self, messages: Sequence[str], group: ArgumentGroup | None = None) -> None:
        super().__init__("\n".join(messages))
        self.messages = tuple(messages)
        self.group = group  # the group at fault, so that further checks can look at it


def arg(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    nargs: str | int | None = None,
    metavar: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A config field that is also a flag.

    `flags` overrides the spelling, `parse` the text-to-value function; `at_least` and `at_most`
    are checked when the group is made.
    """
    metadata = {
        "help": help,
        "flags": flags,
        "parse": parse,
        "nargs": nargs,
        "metavar": metavar,
        "at_least": at_least,
        "at_most": at_most,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentGroup:
    """Base of the config groups. A group checks its own fields; `rules.py` checks the rest."""

    def problems(self) -> Iterator[str]:
        """One message for each thing wrong with this group alone."""
        return iter(())

    def __post_init__(self) -> None:
        messages = [*out_of_range(self), *self.problems()]
        if messages:
            raise ConfigError(messages, self)


def flag_fields(cls: type[ArgumentGroup]) -> list[dataclasses.Field]:
    """The fields that are flags, in the order in which they are declared."""
    return [field for field in dataclasses.fields(cls) if field.init and field.metadata]


def flags_of(field: dataclasses.Field) -> tuple[str, ...]:
    """All spellings of a field's flag, the usual one first."""
    if field.metadata["flags"]:
        return field.metadata["flags"]
    name = field.name.replace("_", "-")
    return (f"--no-{name}", f"--disable-{name}") if field.default is True else (f"--{name}",)


def out_of_range(group: ArgumentGroup) -> Iterator[str]:
    """Messages for numbers below `at_least` or above `at_most`."""
    for field in flag_fields(type(group)):
        value, flag = getattr(group, field.name), flags_of(field)[0]
        low, high = field.metadata["at_least"], field.metadata["at_most"]
        for number in value if isinstance(value, tuple) else (value,):
            if number is None:
                continue
            if low is not None and number < low:
                yield f"{flag} {number} is too small; give at least {low}"
            if high is not None and number > high:
                yield f"{flag} {number} is too large; give at most {high}"


def add_group(parser: argparse.ArgumentParser, cls: type[ArgumentGroup]) -> None:
    """One argparse group per config class, one flag per field."""
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).strip().splitlines()[0])
    hints = typing.get_type_hints(cls)
    for field in flag_fields(cls):
        options = parsing_of(field, hints[field.name])
        text = field.metadata["help"]
        if field.default is REQUIRED:
            text += " (required)"
        elif options.get("action") is None and field.default is not None:
            text += f" (default: {shown(field.default)})"
        group.add_argument(
            *flags_of(field),
            dest=field.name,
            default=None if field.default is REQUIRED else field.default,
            help=text.replace("%", "%%"),
            **options,
        )


def parsing_of(field: dataclasses.Field, type_: Any) -> dict[str, Any]:
    """The argparse options that a field's type and metadata ask for."""
    meta = field.metadata
    if typing.get_origin(type_) in (types.UnionType, typing.Union):  # "int | None" parses as int
        (type_,) = [t for t in typing.get_args(type_) if t is not types.NoneType]
    if type_ is bool:
        return {"action": "store_false" if field.default else "store_true"}
    options: dict[str, Any] = {"metavar": meta["metavar"]}
    if typing.get_origin(type_) is tuple:
        type_ = typing.get_args(type_)[0]
        options["nargs"] = meta["nargs"] or "+"
    if typing.get_origin(type_) is Literal:
        options["metavar"] = (
            meta["metavar"] or "{" + ",".join(map(str, typing.get_args(type_))) + "}"
        )
    options["type"] = meta["parse"] or converter(type_, field.name)
    return options


def converter(type_: Any, name: str = "") -> Callable[[str], Any]:
    """The text-to-value function of a type. `bool` has none: `bool("False")` is true."""
    if typing.get_origin(type_) is Literal:
        return one_of(typing.get_args(type_))
    simple: dict[Any, Callable[[str], Any]] = {int: whole_number, float: number, str: str}
    if type_ in simple:
        return simple[type_]
    raise TypeError(f"{name}: no flag can be made from {type_}; give the field a parse= function")


def whole_number(text: str) -> int:
    """An int, or an error that argparse shows."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A finite float, or an error that argparse shows."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def one_of(choices: Sequence[Any]) -> Callable[[str], Any]:
    """A function that accepts only the text of one of `choices`."""
    by_text = {str(choice): choice for choice in choices}

    def choose(text: str) -> Any:
        if text not in by_text:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(by_text)}")
        return by_text[text]

    return choose


def from_namespace(cls: type[ArgumentGroup], namespace: argparse.Namespace) -> Any:
    """The group with the parsed values; lists become tuples. Raises ConfigError if invalid."""
    values = {field.name: getattr(namespace, field.name) for field in flag_fields(cls)}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def shown(value: Any) -> str:
    """A value as a user would write it after its flag."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value)) or "none"
    return "none" if value is None else str(value)


class CommandLine(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError([message])


def parse_all(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse, going on after a value that cannot be read.

    Returns the values, the tokens that no flag took, and one message per unreadable value (its
    flag keeps the default). `parser` must be built with `exit_on_error=False`.
    """
    argv, messages = list(argv), list[str]()
    while True:
        try:
            namespace, leftover = parser.parse_known_args(argv)
            return namespace, leftover, messages
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            written = [t.partition("=")[0] for t in argv if t.partition("=")[0] in names]
            messages.append(f"{written[0] if written else names[0]}: {error.message}")
            if not written:
                raise ConfigError(messages) from None
            argv = without_flags(argv, names)


def without_flags(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command line without these flags and the values that follow them."""
    kept, dropping = [], False
    for token in argv:
        if token.startswith("--"):
            dropping = token.partition("=")[0] in names
        if not dropping:
            kept.append(token)
    return kept
