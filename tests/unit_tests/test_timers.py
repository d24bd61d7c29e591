"""Timers of one process: levels, accumulation, report layouts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megatron.core.timers import Timer, Timers


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingDevice:
    """Stands in for a Device: notes at which time it was waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits: list[float] = []

    def synchronize(self) -> None:
        self.waits.append(self.clock.now)
        self.clock.now += 0.25  # the queue takes a while to drain


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(timers: Timers, clock: Clock, name: str, seconds: float, level: int | None = None) -> None:
    timers(name, log_level=level).start()
    clock.now += seconds
    timers(name).stop()


def test_a_timer_adds_up_its_runs_and_reset_leaves_active_time(clock: Clock) -> None:
    timer = Timer("t", clock=clock)
    for seconds in (1.0, 2.5):
        timer.start()
        clock.now += seconds
        timer.stop()
        clock.now += 100  # not running
    assert timer.elapsed(reset=False) == 3.5
    assert timer.elapsed() == 3.5
    assert timer.elapsed() == 0.0
    assert timer.active_time() == 3.5


def test_reading_a_running_timer_counts_up_to_now_and_goes_on(clock: Clock) -> None:
    timer = Timer("t", clock=clock)
    timer.start()
    clock.now += 2
    assert timer.elapsed() == 2
    clock.now += 3
    timer.stop()
    assert timer.elapsed() == 3
    assert timer.active_time() == 5


def test_starting_or_stopping_twice_is_refused(clock: Clock) -> None:
    timer = Timer("forward", clock=clock)
    with pytest.raises(RuntimeError, match="'forward' is stopped, but it does not run"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="'forward' is started, but it runs already"):
        timer.start()


def test_the_device_is_waited_for_before_the_clock_is_read(clock: Clock) -> None:
    device: Any = CountingDevice(clock)
    timer = Timer("t", device=device, clock=clock)
    timer.start()
    clock.now += 1.0
    timer.stop()
    assert device.waits == [0.0, 1.25]
    assert timer.elapsed() == 1.25  # the work, and the wait for what it queued


def test_minmax_layout_is_megatrons(clock: Clock) -> None:
    timers = Timers(0, "minmax", clock=clock)
    run(timers, clock, "forward-backward", 0.12345, level=0)
    assert timers.report(["forward-backward"]) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (123.45, 123.45)"
    )


def test_max_and_all_layouts(clock: Clock) -> None:
    timers = Timers(2, "max", clock=clock)
    run(timers, clock, "optimizer", 0.002)
    label = "    " + "optimizer ".ljust(48, ".") + ": "
    assert timers.report() == f"max time across ranks (ms):\n{label}2.00"

    timers = Timers(2, "all", clock=clock)
    run(timers, clock, "optimizer", 0.002)
    assert timers.report() == "times across ranks (ms):\n  optimizer:\n     rank  0: 2.00"


def test_report_averages_resets_and_keeps_the_order_asked_for(clock: Clock) -> None:
    timers = Timers(2, "max", clock=clock)
    for _ in range(4):
        run(timers, clock, "first", 0.010)
        run(timers, clock, "second", 0.020)
    timers("idle")
    text = timers.report(["second", "idle", "first", "unknown"], normalizer=4, reset=False)
    assert text is not None
    names = [line.split()[0] for line in text.splitlines()[1:]]
    values = [line.split(": ")[1] for line in text.splitlines()[1:]]
    assert names == ["second", "first"]  # a timer that never ran is left out
    assert values == ["20.00", "10.00"]
    assert timers.report(["first"], normalizer=4) is not None
    assert timers.report(["first"]) is None  # reset by the report before
    assert timers.report([]) is None


def test_log_goes_through_the_logger(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers(0, "minmax", clock=clock)
    run(timers, clock, "evaluate", 1.0, level=0)
    with caplog.at_level(logging.INFO, "megatron.core.timers"):
        timers.log(["evaluate"], rank=1)  # there is only rank 0
        assert not caplog.messages
        run(timers, clock, "evaluate", 1.0)
        timers.log(["evaluate"])
    assert len(caplog.messages) == 1 and "(1000.00, 1000.00)" in caplog.messages[0]


def test_timers_above_the_level_do_nothing(clock: Clock) -> None:
    timers = Timers(1, "minmax", clock=clock)
    run(timers, clock, "forward-compute", 1.0, level=2)
    run(timers, clock, "without-level", 1.0)  # as Megatron-LM: the highest level
    assert timers.report() is None
    with pytest.raises(ValueError, match="--timing-log-level"):
        timers("forward-compute").elapsed()
    with pytest.raises(ValueError, match="--timing-log-level"):
        timers("forward-compute").active_time()


def test_a_timer_has_one_level() -> None:
    timers = Timers(2, "minmax")
    timers("optimizer", log_level=1)
    assert timers("optimizer") is timers("optimizer", log_level=1)
    with pytest.raises(ValueError, match="'optimizer' has level 1, but is asked for with 2"):
        timers("optimizer", log_level=2)
    with pytest.raises(ValueError, match="asks for level 3"):
        timers("x", log_level=3)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="--timing-log-level 3"):
        Timers(3, "max")
    with pytest.raises(ValueError, match=r"--timing-log-option median .* max, minmax, all"):
        Timers(0, "median")


def test_write_gives_seconds_under_megatrons_names(clock: Clock) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int, /) -> None:
            self.scalars.append((name, value, step))

    timers = Timers(1, "minmax", clock=clock)
    writer = Recorder()
    run(timers, clock, "optimizer", 3.0, level=1)
    timers.write(["optimizer"], writer, 20, normalizer=10, reset=False)
    timers.write(["optimizer"], None, 20)  # a rank without a writer takes part, and resets
    timers.write(["optimizer"], writer, 30)
    assert writer.scalars == [("optimizer-time", 0.3, 20)]
