"""The generator, the golden list, the generated reference, and every flag Megatron documents."""

import argparse
import dataclasses
import pathlib
import shlex
import subprocess
import sys
from typing import Literal, NamedTuple

import pytest

from megatron.training import cli
from megatron.training.arguments import IGNORED, REFUSED, build_parser, read_run
from megatron.training.cli import REQUIRED, ArgumentGroup, ConfigError, arg
from megatron.training.config import GROUPS

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
BASE = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 10 --lr 1e-3"
)


# The generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lamp(ArgumentGroup):
    """A lamp."""

    watts: int = arg(REQUIRED, "Power, 100 % of the time.", at_least=1, at_most=100)
    color: Literal["white", "red"] = arg("white", "Color.")
    level: Literal[0, 1] | None = arg(None, "Level.")
    shade: bool = arg(True, "Take the shade off.")
    dimmed: bool = arg(False, "Dim it.")
    hours: tuple[float, ...] = arg((), "When it burns.")
    old_name: str | None = arg(None, "Name.", flags=("--name", "--label"))

    def problems(self):
        if self.color == "red" and self.dimmed:
            yield "--color red cannot be --dimmed"


def lamp(text):
    parser = cli.CommandLine(allow_abbrev=False, exit_on_error=False)
    cli.add_group(parser, Lamp)
    namespace, leftover, messages = cli.parse_all(parser, shlex.split(text))
    assert not leftover
    return namespace, messages


def test_fields_become_flags():
    namespace, messages = lamp(
        "--watts 60 --color red --level 1 --no-shade --dimmed --hours 1 2.5 --label x"
    )
    assert messages == []
    assert vars(namespace) == {
        "watts": 60,
        "color": "red",
        "level": 1,
        "shade": False,
        "dimmed": True,
        "hours": [1.0, 2.5],
        "old_name": "x",
    }
    assert lamp("--disable-shade")[0].shade is False


def test_groups_are_frozen_and_check_themselves():
    namespace, _ = lamp("--watts 60 --hours 3")
    group = cli.from_namespace(Lamp, namespace)
    assert group == Lamp(watts=60, hours=(3.0,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.watts = 3
    with pytest.raises(TypeError, match="watts"):
        Lamp()
    with pytest.raises(ConfigError) as caught:
        Lamp(watts=0, color="red", dimmed=True)
    assert caught.value.messages == (
        "--watts 0 is too small; give at least 1",
        "--color red cannot be --dimmed",
    )
    with pytest.raises(ConfigError, match="--watts 101 is too large; give at most 100"):
        Lamp(watts=101)


def test_every_unreadable_value_is_reported():
    namespace, messages = lamp("--watts many --color blue --hours 1 nan --level 2 --name --dimmed")
    assert sorted(messages) == [
        "--color: 'blue' is not one of white, red",
        "--hours: 'nan' is not a finite number",
        "--level: '2' is not one of 0, 1",
        "--name: expected one argument",
        "--watts: 'many' is not a whole number",
    ]
    assert (namespace.watts, namespace.color, namespace.dimmed) == (None, "white", True)


def test_message_uses_the_spelling_given():
    _, messages = lamp("--label --dimmed")
    assert messages == ["--label: expected one argument"]


@pytest.mark.parametrize("type_", [dict, list[int], int | str, "bool"])
def test_no_flag_from_a_type_without_a_text_form(type_):
    with pytest.raises(TypeError, match="volume: no flag can be made"):
        cli.converter(bool if type_ == "bool" else type_, "volume")


def test_help_shows_defaults_and_percent_signs(capsys):
    parser = cli.CommandLine()
    cli.add_group(parser, Lamp)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "100 % of the time. (required)" in text
    assert "{white,red} Color. (default: white)" in text


# The whole command line


def test_names_are_unique():
    names = [field.name for cls in GROUPS.values() for field in cli.flag_fields(cls)]
    names += [row.dest for row in (*IGNORED, *REFUSED) if row.kind != "yes"]
    assert len(names) == len(set(names))


def test_every_attribute_of_a_group_is_a_flag():
    for cls in GROUPS.values():
        assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in cli.flag_fields(cls)]
        annotated = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}
        assert annotated == {f.name for f in dataclasses.fields(cls)}


def test_every_flag_has_a_help_sentence():
    for cls in GROUPS.values():
        for field in cli.flag_fields(cls):
            text = field.metadata["help"]
            assert len(text) > 10 and text[0].isalnum() and text.endswith("."), field.name


def test_golden_list_of_flags():
    """After a deliberate change: python tools/generate_cli_docs.py --list > (the golden file)."""
    done = subprocess.run(
        [sys.executable, "tools/generate_cli_docs.py", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (GOLDEN / "cli_flags.txt").read_text()


def test_reference_is_not_stale(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/generate_cli_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_parsing_does_not_import_torch():
    code = (
        "import sys\n"
        "from megatron.training.arguments import build_parser\n"
        "build_parser()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Flags of Megatron and of the zero-bubble fork


class SpecFlag(NamedTuple):
    flag: str
    kind: str
    default: str
    priority: str
    name: str


SPEC = [
    SpecFlag(*line.split())
    for line in (GOLDEN / "spec_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
# The one default that differs: chosen from the device.
OTHER_DEFAULTS = {"--distributed-backend": None}
# Values the flag accepts, where a plain "word" or 7 is not one.
SAMPLES = {
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--transformer-impl": "local",
    "--attention-backend": "flash",
    "--optimizer": "sgd",
    "--lr-decay-style": "WSD",
    "--lr-wsd-decay-style": "cosine",
    "--weight-decay-incr-style": "linear",
    "--distributed-backend": "gloo",
    "--recompute-granularity": "full",
    "--recompute-method": "block",
    "--dataloader-type": "cyclic",
    "--tiktoken-pattern": "v2",
    "--ckpt-format": "torch_dist",
    "--timing-log-option": "all",
    "--timing-log-level": "2",
    "--empty-unused-memory-level": "1",
    "--zero-bubble-v-schedule-mem-setup": "min",
    "--zero-bubble-max-pending-backward": "12",
}
BASE_KINDS = {"int": int, "float": float, "str": str, "bool": lambda t: t == "true", "str/int": int}


def read_default(row: SpecFlag):
    """The default of the documentation as a Python value."""
    if row.flag in OTHER_DEFAULTS:
        return OTHER_DEFAULTS[row.flag]
    if row.kind in ("flag", "flag-off"):
        return row.default == "on"
    if row.default in ("-", "[]"):
        return None if row.default == "-" else []
    value = BASE_KINDS[row.kind.split("[")[0]](row.default)
    return [value] if row.flag == "--cp-comm-type" else value


def sample(row: SpecFlag):
    """Tokens after the flag and the value they stand for."""
    if row.kind in ("flag", "flag-off"):
        return [], row.kind == "flag"
    base, _, many = row.kind.partition("[")
    text = SAMPLES.get(row.flag, {"str": "word", "bool": "true"}.get(base, "7"))
    tokens = [text] * (3 if many == "3]" else 2 if many else 1)
    values = [BASE_KINDS[base](token) for token in tokens]
    return tokens, values if many else values[0]


def test_the_list_of_documented_flags_is_whole():
    by_priority = {p: sum(row.priority == p for row in SPEC) for p in "ABC"}
    assert by_priority == {"A": 158, "B": 96, "C": 92}
    assert len({row.flag for row in SPEC}) == len(SPEC)


@pytest.fixture(scope="module")
def parser():
    return build_parser()


@pytest.mark.parametrize("row", SPEC, ids=lambda row: row.flag)
def test_documented_flag(row, parser):
    assert getattr(parser.parse_args([]), row.name) == (
        () if row.flag == "--profile-ranks" else read_default(row)
    )
    tokens, value = sample(row)
    parsed = getattr(parser.parse_args([row.flag, *tokens]), row.name)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "row", [r for r in SPEC if r.kind.startswith(("int", "float"))], ids=lambda row: row.flag
)
def test_documented_number_must_be_a_number(row, parser):
    with pytest.raises(argparse.ArgumentError, match=r"'seven' is not (a|one of)"):
        parser.parse_args([row.flag, "seven", "seven", "seven"][: 4 if "3" in row.kind else 2])


def test_namespace_has_every_documented_name():
    _, namespace = read_run(BASE, world_size=1)
    assert {row.name for row in SPEC} <= set(vars(namespace))


def test_stating_a_default_is_never_refused():
    """A script that spells out Megatron's defaults runs."""
    argv = list(BASE)
    for row in SPEC:
        if row.kind.startswith("flag") or row.default in ("-", "[]"):
            continue
        argv += [row.flag, row.default]
    argv.remove("--distributed-backend")
    argv.remove("nccl")
    run, _ = read_run(argv, world_size=1)
    assert run.training.seed == 1234


# What a flag needs beside it to make sense.
COMPANIONS = {
    "--num-layers-per-virtual-pipeline-stage": "--pipeline-model-parallel-size 2",
    "--num-virtual-stages-per-pipeline-rank": "--pipeline-model-parallel-size 2",
    "--no-position-embedding": "--position-embedding-type rope",
    "--overlap-param-gather": "--overlap-grad-reduce --use-distributed-optimizer",
    "--max-position-embeddings": "--seq-length 7",
    "--seq-length": "--max-position-embeddings 7",
    "--hidden-size": "--kv-channels 16",
    "--num-attention-heads": "--kv-channels 16",
    "--decoder-first-pipeline-num-layers": "--num-layers 7",
    "--decoder-last-pipeline-num-layers": "--num-layers 7",
    "--min-lr": "--lr 8",
    "--recompute-method": "--recompute-granularity full --recompute-num-layers 1",
    "--recompute-granularity": "--recompute-method block --recompute-num-layers 1",
    "--save": "--save-interval 7",
    "--use-checkpoint-args": "--load here",
    "--log-progress": "--save here --save-interval 7",
    "--wandb-project": "--wandb-exp-name here",
    "--lr-decay-style": "--lr-wsd-decay-iters 2",
    "--zero-bubble-pipeline-timers-end-iter": "--zero-bubble-pipeline-timers-start-iter 1",
}
PROPER = {  # values in range for the flags whose sample of 7 is not
    "--rotary-percent": "0.5",
    "--lr-warmup-fraction": "0.5",
    "--attention-dropout": "0.5",
    "--hidden-dropout": "0.5",
    "--adam-beta1": "0.5",
    "--adam-beta2": "0.5",
    "--num-layers-per-virtual-pipeline-stage": "2",
    "--num-virtual-stages-per-pipeline-rank": "2",
}
NOT_IN_THIS_VERSION = {
    "--tensor-model-parallel-size": "7",
    "--context-parallel-size": "2",
    "--expert-model-parallel-size": "7",
}
LENGTHS = {"--train-samples", "--lr-decay-samples", "--lr-warmup-samples"}


@pytest.mark.parametrize(
    "row",
    [r for r in SPEC if r.priority == "A" and r.flag not in NOT_IN_THIS_VERSION],
    ids=lambda row: row.flag,
)
def test_must_have_flag_is_accepted(row):
    tokens = [PROPER[row.flag]] if row.flag in PROPER else sample(row)[0]
    base = list(BASE)
    world_size = 7 if row.flag == "--pipeline-model-parallel-size" else 1
    if world_size == 7:
        base += ["--num-layers", "7"]
    if row.flag in LENGTHS:
        at = base.index("--train-iters")
        base[at : at + 2] = ["--train-samples", "70"]
    companions = COMPANIONS.get(row.flag, "").split()
    if "--pipeline-model-parallel-size" in companions:
        world_size = 2
    run, _ = read_run(
        [*base, *companions, row.flag, *tokens],
        world_size=world_size,
        read_checkpoint_args=lambda namespace: {},
    )
    assert row.name in run.explicit


@pytest.mark.parametrize("flag", NOT_IN_THIS_VERSION)
def test_flag_of_a_later_version_is_refused_by_name(flag):
    value = NOT_IN_THIS_VERSION[flag]
    argv = [*BASE, "--pipeline-model-parallel-size", "2", flag, *([value] if value else [])]
    with pytest.raises(ConfigError) as caught:
        read_run(argv, world_size=28)
    assert any(m.startswith(flag) and "in this version" in m for m in caught.value.messages)
