"""Several models on one worker: a process serves one of them, then gives way to that of another.

This process has no model. It is the worker that RQ and users see. It decides whose turn it is,
starts a process for that model, a `GenerationWorker`, and tells it to end when another is due.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from random import random
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from omlx_producer.outage import Outage
from omlx_producer.program import JOB_ENDED_BADLY, UNREACHABLE
from omlx_worker.control.rq_record import RecordedWorker
from omlx_worker.control.served import ServedModel
from omlx_worker.control.status import Turn
from omlx_worker.control.whose_turn import WhoseTurn
from omlx_worker.control.worker import LOOK_SECONDS, POLL_SECONDS, Describe, RedisGone
from omlx_worker.messages import Ring
from omlx_worker.model_process import ModelProcess
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.worker")

# What rows have to end at a switch. Then they go back to their queue.
DRAIN_SECONDS = 1.0
# A process that is told to end at once and does not, is killed.
CLOSE_SECONDS = 60.0
END_SECONDS = 0.05
STOPPED_AT_ONCE = 128


Start = Callable[[WorkerSettings, Turn], ModelProcess]


@dataclass
class _Loaded:
    """The model that has its turn.

    Attributes:
        since: monotonic seconds, of the process or, once it serves, of its service.
        serves: whether it is loaded.
        told: when the process was told to end, the first and the second time.
    """

    model: ServedModel
    process: ModelProcess
    since: float = field(default_factory=time.monotonic)
    serves: bool = False
    told: list[float] = field(default_factory=list)


class ModelsInTurn(RecordedWorker):
    """Runs on the main thread.

    Args:
        models: their settings. What is not a model's own is the first one's.
        start: starts the process of a model.

    Attributes:
        unreachable: whether Redis was away when it ended.
    """

    def __init__(
        self,
        models: Sequence[WorkerSettings],
        start: Start,
        *,
        connection: Redis,
        describe: Describe,
    ) -> None:
        self._settings = models[0]
        super().__init__(
            [queue for model in models for queue in model.queues],
            connection=connection,
            name=self._settings.name,
            models=[model.alias for model in models],
        )
        self._models = {
            each.alias: ServedModel(each, connection, self.name, self._moment) for each in models
        }
        self._start_process = start
        self._describe = describe
        self._whose_turn = WhoseTurn(
            connection, self.name, self._models, self._settings.switch_after
        )
        self._outage = Outage(log=log)
        self._over = self.unreachable = False
        self._loaded: _Loaded | None = None
        # The model to load once the loaded one has given way, and when that one was told.
        self._target: ServedModel | None = None
        self._left_at: float | None = None
        # Whether a message has come since the last look at the queues, and when the next is due.
        self._rung, self._look_at = True, 0.0
        self._code = 0

    # The loop

    def work(self, burst: bool = False, **_: Any) -> bool:  # type: ignore[override]
        """Serve until told to stop or, in a burst, until the queues are empty.

        Raises:
            RedisGone: if Redis is away for longer than ``redis_grace`` seconds.
            RedisError: if an error of Redis does not pass.
        """
        if self._settings.page:
            log.info("the page is at %s", self._settings.page)
        for model in self._models.values():
            model.learn(self._describe)
        with self._signals.caught():
            try:
                while self._turn(burst):
                    self._listen(POLL_SECONDS if self._target is None else END_SECONDS)
            finally:
                self._shut_down()
        return True

    def _turn(self, burst: bool) -> bool:
        """Do what is due; returns whether to go on."""
        if self._signals.at_once:
            return False
        if (away := self._outage.seconds) > self._settings.redis_grace:
            raise RedisGone(away)
        if self._loaded is not None:
            self._attend_process(self._loaded, burst)
        if self._over or (self._signals.asked and self._loaded is None):
            return False
        try:
            self._attend(burst)
        except RedisError as error:
            pause = self._outage.failed(error)
            for model in self._models.values():
                model.upkeep.postpone()
            self._listen(pause)
        else:
            self._outage.answered()
        return not self._over

    def _listen(self, timeout: float) -> None:
        """Wait for a message: each says to look at the queues."""
        with suppress(Empty):
            self._mailbox.get(timeout=timeout)
            self._rung = True

    def _attend(self, burst: bool) -> None:
        """The part of a turn that needs Redis."""
        if self._outage.seconds:
            self.connection.ping()
        self.appear()
        if self._loaded is None:
            # A process that was killed has left its state.
            self.show(self._models[self._settings.alias].leases, False)
        elif not self._loaded.serves and self._loaded.model.is_ready():
            self._whose_turn.loaded(time.monotonic() - self._loaded.since)
            self._loaded.serves, self._loaded.since = True, time.monotonic()
        beats = self.beat()
        for model in self._models.values():
            has_process = self._loaded is not None and self._loaded.model is model
            if not has_process:
                model.upkeep.attend()
                model.board.show()
            if beats and not (self._loaded and has_process and self._loaded.serves):
                model.board.announce()
        if not self._signals.asked:
            self._choose(burst)

    # Whose turn it is

    def _choose(self, burst: bool) -> None:
        """See whether another model is due, or start the process of the one that is."""
        loaded, now = self._loaded, time.monotonic()
        if loaded is None and self._target is not None:
            self._start(self._target, burst)
        elif self._target is None and (loaded is None or loaded.serves):
            # The process writes what it does.
            busy = loaded is not None and self.connection.hget(self.key, "state") == b"busy"
            if now < self._look_at and (busy or not self._rung):
                return
            self._rung, self._look_at = False, now + LOOK_SECONDS * (0.5 + random() / 2)
            self._target = self._whose_turn.next(loaded.model if loaded else None, busy=busy)
            if loaded is None and self._target is None:
                able = [model for model in self._models.values() if not model.rests]
                if burst:
                    self._over = True
                    self._code = 0 if len(able) == len(self._models) else JOB_ENDED_BADLY
                elif able:
                    self._target = able[0]
            elif loaded is not None and self._target is not None:
                log.info("%s gives way to %s", loaded.model.alias, self._target.alias)
                self._left_at = now
            if self._target is not None:
                self._mailbox.put(Ring())

    def _start(self, model: ServedModel, burst: bool) -> None:
        turn, left_at = model.turn, self._left_at
        self._target = self._left_at = None
        if left_at is not None:
            update = {"switches": turn.switches + 1, "left_at": left_at}
            turn = turn.model_copy(update=update)
        settings = model.settings.model_copy(update={"name": self.name, "burst": burst})
        self._loaded = _Loaded(model, self._start_process(settings, turn))
        for each in self._models.values():
            each.board.hurry()

    # The process

    def _attend_process(self, loaded: _Loaded, burst: bool) -> None:
        """See whether the process has ended, and tell it to if it is to."""
        if (code := loaded.process.poll()) is not None:
            self._note_end(loaded, code, burst)
        elif self._signals.asked:
            self._tell_to_end(loaded, 1)
        elif self._target is not None:
            drained = bool(loaded.told) and time.monotonic() - loaded.told[0] > DRAIN_SECONDS
            self._tell_to_end(loaded, 2 if drained else 1)

    def _tell_to_end(self, loaded: _Loaded, times: int) -> None:
        """Have it drain or, the second time, end at once. Kill it if that takes too long."""
        while len(loaded.told) < times:
            loaded.told.append(time.monotonic())
            loaded.process.terminate()
        if len(loaded.told) > 1 and time.monotonic() - loaded.told[1] > CLOSE_SECONDS:
            loaded.process.kill()

    def _note_end(self, loaded: _Loaded, code: int, burst: bool) -> None:
        self._loaded, self._shown, self._rung = None, None, True
        loaded.model.board.hurry()
        if loaded.told or (code == 0 and burst):
            return
        if code in (0, UNREACHABLE) or code > STOPPED_AT_ONCE:
            # Somebody has told it to end, or Redis is away for too long.
            self._over, self._code = True, code
            log.error("%s: %s", loaded.model.alias, loaded.process.sentence)
            return
        self._left_at = None
        loaded.model.failed(loaded.process.sentence)

    def _moment(self) -> dict[str, Any]:
        """What the figures of all models but the loaded one say of this worker."""
        loaded = self._loaded
        return {
            **({"state": "draining"} if self._signals.asked else {}),
            "turned_to": loaded.model.alias if loaded else "",
            "uptime": time.monotonic() - loaded.since if loaded else 0.0,
        }

    @property
    def metrics_url(self) -> str:
        """See `ModelProcess`; that of the loaded model."""
        return self._loaded.process.metrics_url if self._loaded else ""

    # The end

    def _drains(self) -> bool:
        return self._loaded is not None and self._loaded.serves

    @property
    def exit_code(self) -> int:
        """After `work`: 128 + signal after a stop at once, else that of a process that has ended
        for all models, else 0."""
        return self._signals.exit_code or self._code

    def _shut_down(self) -> None:
        """End the process, and tell everybody that nothing is served here any more."""
        while (loaded := self._loaded) is not None:
            self._tell_to_end(loaded, 2)
            if loaded.process.poll() is None:
                time.sleep(END_SECONDS)
            else:
                self._loaded = None
        try:
            self.disappear()
            for model in self._models.values():
                model.upkeep.leave()
                model.board.sign_off()
        except RedisError as error:
            log.warning("Redis does not answer (%s); nobody is told of the end", error)
            self.unreachable = True
