"""Consumers that are there throughout: each reads one job's tokens, whatever befalls the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from omlx_producer import TokensLost, TokenStream, UnknownJob
from omlx_producer.wire import JobEvent, TokensEvent
from tests.system.chaos.workload import Accepted

PAUSE = 0.05


class Consumer(threading.Thread):
    """Reads one job from its first token to its end.

    Args:
        leaves_after: events after which it leaves, to come back with its cursor; None never.
        forgives: whether the server may have lost what it has acknowledged: the whole job may then
            be missing until it is submitted again.

    Attributes:
        events: what it has had.
    """

    def __init__(
        self, url: str, job: Accepted, leaves_after: int | None, forgives: Callable[[], bool]
    ) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.events: list[JobEvent] = []
        self._url = url
        self._leaves_after = leaves_after
        self._forgives = forgives
        self._problem = ""
        self._dismissed = threading.Event()
        self._gave_up = False

    def run(self) -> None:
        try:
            while not self._dismissed.is_set() and not self.is_over:
                self._read()
        except Exception as error:  # noqa: BLE001 (told by `problems`)
            self._problem = f"{type(error).__name__}: {error}"

    def dismiss(self) -> None:
        """Do not come back once the connection breaks."""
        self._dismissed.set()

    @property
    def is_over(self) -> bool:
        ended = bool(self.events) and not isinstance(self.events[-1], TokensEvent)
        return ended or self._gave_up

    @property
    def _cursor(self) -> int:
        return self.events[-1].n if self.events else 0

    def _read(self) -> None:
        try:
            with TokenStream(self._url, self.job.id, self._cursor) as stream:
                for number, event in enumerate(stream, 1):
                    self.events.append(event)
                    if number == self._leaves_after or self._dismissed.is_set():
                        return
        except UnknownJob:
            if not self._forgives():
                raise
            time.sleep(PAUSE)
        except TokensLost:
            # A worker that gives such a job back writes tokens, which the next one does not.
            if self.job.streams or not self._forgives():
                raise
            self._gave_up = True
        except RedisError:
            # A server that has never answered a stream is not waited for.
            time.sleep(PAUSE)

    def problems(self) -> list[str]:
        """What is wrong with what it has had, when it is over."""
        found = [self._problem] if self._problem else []
        if not self.is_over:
            found.append(f"has not come to its end, only to token {self._cursor}")
        texts, at, tokens = [""] * len(self.job.texts), 0, 0
        for event in self.events:
            if not isinstance(event, TokensEvent):
                continue
            # After a loss another worker may cut the same tokens and text into other events, and an
            # event without tokens counts as one.
            if event.since != at and not self._forgives():
                found.append(f"has had {event.since + 1} to {event.n} after {at}")
            at = event.n
            for delta in event.choices:
                texts[delta.index] += delta.text
                tokens += len(delta.tokens)
        whole = self.job.streams or any(texts)
        if self.events and (end := self.events[-1]).type == "done" and whole:
            if texts != self.job.texts:
                found.append(f"has had {texts}, not {self.job.texts}")
            if tokens != end.usage.completion_tokens:
                found.append(f"has had {tokens} tokens of {end.usage.completion_tokens}")
        elif any(not w.startswith(t) for t, w in zip(texts, self.job.texts, strict=True)):
            found.append(f"has had {texts}, which do not begin {self.job.texts}")
        return [f"the consumer of job {self.job.id}: {problem}" for problem in found]
