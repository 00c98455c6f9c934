"""Threads that run short tasks side by side. A task that takes too long is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

TICK_SECONDS = 0.01
LATE_TICKS = 25
"""A task is late after so many ticks. A process that was paused has lost one tick, not many."""


class _Task:
    """A callable on its way through a thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.ticks = 0
        self.begun = self.late = False
        self.error: Exception | None = None


class TimedThreads:
    """A fixed number of threads, for the callers of one thread.

    Args:
        count: tasks that run at the same time.
    """

    def __init__(self, count: int) -> None:
        self._waiting: SimpleQueue[_Task] = SimpleQueue()
        self._ended: SimpleQueue[_Task] = SimpleQueue()
        for _ in range(count):
            self._begin()

    def run(self, calls: Sequence[Callable[[], None]]) -> list[bool]:
        """Run tasks and wait until all have ended or are late.

        A late task goes on in its thread, and another thread takes that one's place.

        Returns:
            For each task whether it is late.

        Raises:
            Exception: what a task raised.
        """
        tasks = [_Task(call) for call in calls]
        for task in tasks:
            self._waiting.put(task)
        left, ticked_at = set(tasks), time.monotonic()
        while left:
            with suppress(Empty):
                # Tasks that were late in earlier calls end here, too.
                left.discard(self._ended.get(timeout=TICK_SECONDS))
            if time.monotonic() - ticked_at < TICK_SECONDS:
                continue
            ticked_at = time.monotonic()
            for task in list(left):
                task.ticks += task.begun
                if task.ticks >= LATE_TICKS:
                    task.late = True
                    left.remove(task)
                    self._begin()
        for task in tasks:
            if task.error and not task.late:
                raise task.error
        return [task.late for task in tasks]

    def _begin(self) -> None:
        Thread(target=self._work, name="omlx-masks", daemon=True).start()

    def _work(self) -> None:
        task = None
        while task is None or not task.late:
            task = self._waiting.get()
            task.begun = True
            try:
                task.run()
            except Exception as error:  # noqa: BLE001 (raised by `run`)
                task.error = error
            self._ended.put(task)
