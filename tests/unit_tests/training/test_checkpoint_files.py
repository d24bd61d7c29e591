"""Checkpoint directories: complete under their name, or absent, whatever happened in between."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import torch

from megatron.training import checkpoint_files
from megatron.training.checkpoint_files import CheckpointError, CheckpointFolder, read_common

_TRACKER = "latest_checkpointed_iteration.txt"


def _save(folder: CheckpointFolder, iteration: int, number: int | None = None) -> None:
    """What a save does, with a small file in the place of tensors."""
    path = folder.prepare(iteration)
    (path / "data").write_text(str(iteration if number is None else number))
    folder.complete(iteration, {"number": iteration if number is None else number})


def _loaded(folder: CheckpointFolder) -> int:
    """The number in the newest checkpoint, which must be of one piece."""
    newest = folder.newest()
    assert newest is not None
    path = folder.existing_path(newest)
    number = read_common(path)["number"]
    assert (path / "data").read_text() == str(number)
    return number


def test_names_on_disk_are_megatrons(tmp_path: pathlib.Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    _save(folder, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0001000", _TRACKER]
    assert (tmp_path / _TRACKER).read_text() == "1000"
    metadata = json.loads((tmp_path / "iter_0001000" / "metadata.json").read_text())
    assert metadata["sharded_backend"] == "torch_dist"
    assert metadata["sharded_backend_version"] == 1
    assert folder.path_of("release") == tmp_path / "release"
    (tmp_path / _TRACKER).write_text(" release\n")
    assert folder.newest() == "release"


class _Killed(BaseException):
    pass


def _with_a_kill_before_call(number: int, patch: pytest.MonkeyPatch) -> list[str]:
    """From the `number`-th change of the disk on nothing happens any more; returns a log."""
    calls: list[str] = []

    def dying(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(calls) == number:
                raise _Killed
            calls.append(name)
            return original(*args, **kwargs)

        return wrapper

    for owner, name in (
        (pathlib.Path, "rename"),
        (pathlib.Path, "mkdir"),
        (pathlib.Path, "write_text"),
        (checkpoint_files.os, "replace"),
        (checkpoint_files.shutil, "rmtree"),
        (torch, "save"),
    ):
        patch.setattr(owner, name, dying(name, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("again", [True, False])
def test_a_kill_between_any_two_steps_leaves_one_whole_checkpoint(
    tmp_path: pathlib.Path, again: bool
) -> None:
    """`again`: the same iteration is saved anew, over the one that is the newest."""
    killed = 0
    for number in range(100):
        folder = CheckpointFolder(tmp_path / f"{number}")
        _save(folder, 5, 1)
        with pytest.MonkeyPatch.context() as patch:
            calls = _with_a_kill_before_call(number, patch)
            try:
                _save(folder, 5 if again else 6, 2)
                ended = True
            except _Killed:
                ended = False
        assert _loaded(folder) in ((2,) if ended else (1, 2)), calls
        _save(folder, 7)
        assert _loaded(folder) == 7
        hidden = [path.name for path in folder.root.glob(".*")]
        assert hidden == [], "the next save clears away what was left"
        assert folder.existing_path(5).is_dir(), "the older checkpoint keeps its name"
        if ended:
            break
        killed += 1
    assert killed >= 5, "there were that many moments"


def test_a_directory_without_checkpoint_or_with_a_foreign_tracker_is_named(
    tmp_path: pathlib.Path,
) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"no checkpoint {tmp_path}/iter_0000003")):
        folder.existing_path(3)
    (tmp_path / _TRACKER).write_text("3e2\n")
    message = f"{tmp_path}/{_TRACKER} holds '3e2'; it should hold an iteration or the word release"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        folder.newest()


def test_common_state_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no common\.pt; it is not a torch_dist checkpoint"
    ):
        read_common(tmp_path)
    (tmp_path / "common.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/common.pt cannot be read: ")):
        read_common(tmp_path)


class _Foreign:
    """Something whose unpickling would run code."""


def test_common_state_does_not_run_code(tmp_path: pathlib.Path) -> None:
    torch.save({"args": _Foreign()}, tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_common(tmp_path)


def test_only_multiples_of_the_interval_and_the_newest_are_kept(tmp_path: pathlib.Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for iteration in (0, 2, 4, 5, 8, 10):
        _save(folder, iteration)
    (tmp_path / "iter_notes").mkdir()
    folder.drop_unretained(8, 4)
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000000", "iter_0000004", "iter_0000008", "iter_0000010", "iter_notes"]


def test_is_at_knows_one_directory_by_several_names(tmp_path: pathlib.Path) -> None:
    folder = CheckpointFolder(tmp_path / "a")
    assert folder.is_at(f"{tmp_path}/b/../a/") and not folder.is_at(str(tmp_path))
    assert not folder.is_at(None)
