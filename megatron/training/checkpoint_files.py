"""Where checkpoints lie on disk, and how one becomes the newest: whole, or not at all.

<save>/latest_checkpointed_iteration.txt     written last
<save>/iter_0001000/                         complete, moved here under its name when written
<save>/.iter_0001000.writing/                left by a run that was killed while it saved
<save>/.iter_0001000.replaced/               an older checkpoint of that name, while replaced
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_METADATA = "metadata.json"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit the run; the message says why."""


class CheckpointFolder:
    """The checkpoints of one `--save` or `--load` directory."""

    def __init__(self, root: str | pathlib.Path) -> None:
        self.root = pathlib.Path(root)

    def is_at(self, root: str | None) -> bool:
        """Whether `root`, if there is one, is this directory."""
        return root is not None and pathlib.Path(root).resolve() == self.root.resolve()

    def path_of(self, iteration: int | str) -> pathlib.Path:
        """The directory of an iteration, or of `release`."""
        name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
        return self.root / name

    def writing_path(self, iteration: int) -> pathlib.Path:
        """Where an iteration's checkpoint is written until it is complete."""
        return self.root / f".iter_{iteration:07d}.writing"

    def newest(self) -> int | str | None:
        """What the tracker names: an iteration, `release`, or None without a tracker."""
        tracker = self.root / TRACKER
        if not tracker.is_file():
            return None
        text = tracker.read_text().strip()
        if text == "release":
            return text
        if not text.isdigit():
            raise CheckpointError(
                f"{tracker} holds {text[:40]!r}; it should hold an iteration or the word release"
            )
        return int(text)

    def existing_path(self, iteration: int | str) -> pathlib.Path:
        """The directory to read. Raises CheckpointError if it is not there or not complete."""
        path = self.path_of(iteration)
        replaced = self.root / f".{path.name}.replaced"
        if not path.is_dir() and replaced.is_dir():
            return replaced  # the run was killed between two renames
        if not path.is_dir():
            raise CheckpointError(
                f"there is no checkpoint {path}; see {self.root} for what there is"
            )
        return path

    def prepare(self, iteration: int) -> pathlib.Path:
        """An empty directory to write into. What killed runs left behind is cleared away."""
        for left in self.root.glob(".iter_*.writing"):
            shutil.rmtree(left)
        for replaced in self.root.glob(".iter_*.replaced"):
            path = self.root / replaced.name.removeprefix(".").removesuffix(".replaced")
            if path.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(path)
        path = self.writing_path(iteration)
        path.mkdir(parents=True)
        return path

    def complete(self, iteration: int, common: dict[str, Any]) -> None:
        """Give a written checkpoint its name and make it the newest, in this order."""
        written, path = self.writing_path(iteration), self.path_of(iteration)
        torch.save(common, written / _COMMON)
        (written / _METADATA).write_text(json.dumps(_BACKENDS))
        replaced = self.root / f".{path.name}.replaced"
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        written.rename(path)
        temporary = self.root / f".{TRACKER}"
        temporary.write_text(str(iteration))
        os.replace(temporary, self.root / TRACKER)
        shutil.rmtree(replaced, ignore_errors=True)

    def drop_unretained(self, newest: int, retain_interval: int) -> None:
        """Delete checkpoints older than `newest` that are not multiples of the interval."""
        for path in self.root.glob("iter_*"):
            number = path.name.removeprefix("iter_")
            if number.isdigit() and int(number) < newest and int(number) % retain_interval:
                shutil.rmtree(path, ignore_errors=True)


def read_common(path: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint says besides tensors: arguments, position, schedule, loss scale."""
    file = path / _COMMON
    try:
        return torch.load(file, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no {_COMMON}; it is not a torch_dist checkpoint of this project"
        ) from None
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
