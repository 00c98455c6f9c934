"""Tasks side by side, and those that take too long."""

from __future__ import annotations

from threading import Event

import pytest

from omlx_worker.engine.ragged.timed_threads import TimedThreads


def test_late_tasks_are_left_behind_and_their_threads_are_replaced() -> None:
    threads, release = TimedThreads(1), Event()
    done: list[str] = []

    def hang() -> None:
        release.wait()

    late = threads.run([hang, lambda: done.append("a"), hang, lambda: done.append("b")])

    assert late == [True, False, True, False]
    assert done == ["a", "b"]
    release.set()
    assert threads.run([lambda: done.append("c")] * 3) == [False] * 3
    assert done == ["a", "b", "c", "c", "c"]


def test_what_a_task_raises_reaches_the_caller() -> None:
    with pytest.raises(IndexError):
        TimedThreads(2).run([lambda: None, lambda: [][0]])
