"""The first stop signal asks, the second insists."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from omlx_producer.signals import StopSignals


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    signals = StopSignals()
    with signals.caught():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked
        assert not signals.at_once
        assert signals.exit_code == 0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signals.exit_code == 128 + signal.SIGTERM


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals().caught():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_catches_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def catch() -> None:
        with StopSignals().caught():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    assert seen == [before]
