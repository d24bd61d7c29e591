"""`--pipeline-schedule FILE`: a user's plan trains like any other, or is refused at once."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core.pipeline_parallel.zerobubble.scheduler.registry import plan_schedule
from megatron.core.pipeline_parallel.zerobubble.scheduler.request import PlanRequest
from megatron.training.initialize import initialize_megatron
from tests.distributed_tests.test_equality import assert_same
from tests.training_runs import GPT, train_cases

_MODEL = f"{GPT} --global-batch-size 6"  # 3 micro-batches
_P2 = "--pipeline-model-parallel-size 2"

# Written by hand: B and W apart and together, W's late, a reduction stated. Stages 0 and 3 are on
# rank 1, so that is where the data and the loss are.
_TURNED = """\
# pipeline plan
schedule: my own
microbatches: 3
placement: 1.0 0.0 0.1 1.1
rank 0: 1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2W0 2W1 2BW2 2AR2 1W0 1W1 1BW2
rank 1: 0F0 0F1 3F0 0F2 3F1 3B0 3F2 3W0 3BW1 3B2 0B0 0B1 3W2 0B2 0W0 0W1 0W2
"""
_PLAIN = """\
# pipeline plan
schedule: plain
microbatches: 3
placement: 0.0 1.0
rank 0: 0F0 0F1 0F2 0B0 0W0 0BW1 0BW2
rank 1: 1F0 1BW0 1F1 1B1 1W1 1F2 1BW2
"""


@pytest.mark.timeout(60)
def test_plans_from_files_train_like_one_process(pool: Any, tmp_path: pathlib.Path) -> None:
    saved = plan_schedule("zb-v", PlanRequest(num_ranks=2, num_microbatches=3)).to_text()
    commands = []
    for index, text in enumerate((_PLAIN, _TURNED, saved)):
        (tmp_path / f"{index}.plan").write_text(text)
        commands.append(f"{_MODEL} {_P2} --pipeline-schedule {tmp_path}/{index}.plan")
    (single,) = pool.run(1, train_cases, [_MODEL])[0]
    per_rank = pool.run(2, train_cases, commands)
    for index, command in enumerate(commands):
        assert_same([rank[index] for rank in per_rank], single, command)
    losses = [[rank[1].losses for rank in per_rank], [rank[2].losses for rank in per_rank]]
    assert losses == [[[], single.losses], [single.losses, []]], "the loss is where stage 3 is"


# What is replaced in the plain plan -> what the refusal says.
_REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "a W is removed": ({" 1W1": ""}, "rank 1 step 5: 1BW2 comes in a program that never runs 1W1"),
    "a forward is removed": ({" 0F2": ""}, "rank 0 never runs 0F2"),
    "a backward precedes its forward": (
        {"0F0 0F1 0F2 0B0": "0B0 0F0 0F1 0F2"},
        "later on the same rank",
    ),
    "ranks wait for each other": (
        {"0F0 0F1 0F2 0B0": "0F0 0F1 0B0 0F2", "1BW0 1F1 1B1 1W1 1F2": "1F1 1F2 1BW0 1B1 1W1"},
        "no rank can proceed",
    ),
    "a reduction before the last W": ({"0BW2": "0AR2 0BW2"}, "before its last weight gradient"),
    "weight gradients out of order": ({"0BW1 0BW2": "0B1 0BW2 0W1"}, "micro-batch order"),
}


def _refusal(text: str, tmp_path: pathlib.Path, capsys: Any, flags: str = _P2) -> str:
    """What rank 0 says; every rank must end with status 2 before it has tried to meet another."""
    path = tmp_path / "user.plan"
    path.write_text(text)
    argv = shlex.split(f"{_MODEL} {flags} --pipeline-schedule {path}")
    said = []
    for rank in ("0", "1"):
        with (
            mock.patch.dict("os.environ", RANK=rank, WORLD_SIZE="2"),
            mock.patch.object(dist, "init_process_group") as meeting,
            pytest.raises(SystemExit) as caught,
        ):
            initialize_megatron(argv=argv)
        assert caught.value.code == 2
        meeting.assert_not_called()
        said.append(capsys.readouterr().err)
    assert said[1] == "", "one rank speaks"
    assert f"--pipeline-schedule {path}" in said[0]
    return said[0]


@pytest.mark.parametrize("case", _REFUSED)
def test_a_plan_that_cannot_run_is_refused_on_every_rank(
    case: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _PLAIN
    changes, reason = _REFUSED[case]
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert reason in _refusal(text, tmp_path, capsys)


def test_a_plan_for_another_number_of_ranks_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _refusal(_PLAIN, tmp_path, capsys, "--pipeline-model-parallel-size 1")
    assert "a plan for 2 pipeline ranks, but --pipeline-model-parallel-size is 1" in said


def test_a_plan_for_another_number_of_micro_batches_is_refused(
    pool: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "user.plan"
    path.write_text(_PLAIN)
    case = f"{_MODEL} --global-batch-size 8 {_P2} --pipeline-schedule {path}"
    for said in pool.run(2, train_cases, [case], must_succeed=False):
        assert f"{path} is a plan for 3 micro-batches, but an iteration has 4" in said
