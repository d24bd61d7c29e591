"""The signal handler in one process; over ranks it is tested in tests/distributed_tests."""

from __future__ import annotations

import os
import signal

from megatron.training.signals import DistributedSignalHandler


def test_a_signal_sets_the_flag_and_the_former_handler_comes_back() -> None:
    calls = []
    original = signal.signal(signal.SIGTERM, lambda *_: calls.append("former"))
    try:
        with DistributedSignalHandler() as handler:
            assert not handler.signals_received()
            os.kill(os.getpid(), signal.SIGTERM)
            assert handler.signals_received()
            assert handler.signals_received()  # asking does not clear it
            assert not calls
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == ["former"]
        with handler:  # entered again, it starts afresh
            assert not handler.signals_received()
    finally:
        signal.signal(signal.SIGTERM, original)


def test_another_signal_can_be_chosen() -> None:
    original = signal.getsignal(signal.SIGUSR1)
    with DistributedSignalHandler(signal.SIGUSR1) as handler:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handler.signals_received()
    assert signal.getsignal(signal.SIGUSR1) is original
