"""A real process that is told to stop saves and ends with status 0."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.training_runs import LLAMA

_ROOT = pathlib.Path(__file__).parents[2]


def wait_for_text(file: pathlib.Path, text: str, process: subprocess.Popen[bytes]) -> None:
    """Until the process has written `text`. Fails if it ends without."""
    while text not in file.read_text():
        assert process.poll() is None, file.read_text()
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_sigterm_saves_and_exits_with_status_0(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "output"
    arguments = f"{LLAMA} --global-batch-size 4 --train-iters 1000 --log-interval 1 --eval-iters 0"
    arguments += f" --exit-signal-handler --save {tmp_path / 'saved'} --save-interval 1000"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *arguments.split()],
            cwd=_ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            wait_for_text(output, "iteration        3/    1000 |", process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, output.read_text()
        finally:
            process.kill()
    text = output.read_text()
    assert "[exiting program after receiving SIGTERM.] datetime: " in text
    last = re.findall(r"iteration +(\d+)/", text)[-1]
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == last, "the step during which the signal came is the last"
    assert (tmp_path / "saved" / f"iter_{int(last):07d}" / ".metadata").is_file()
