"""Named points in a worker's life at which it dies, stops, or loses its connection.

They are wrapped around the worker from outside, in its process; the worker knows nothing of them.
A point named ``...-sent`` lies between the sending of a call and the reading of its answer: the
server may have carried it out or not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError

from omlx_worker.control.in_turn import ModelsInTurn
from omlx_worker.queue.lease import GRACE_SECONDS, LeaseTable
from omlx_worker.queue.upkeep import Upkeep

KILL, STOP, CUT = "kill", "stop", "cut"
POINTS = (
    "claim-sent",
    "after-claim",
    "prefill",
    "append-sent",
    "between-appends",
    "before-commit",
    "commit-sent",
    "after-commit",
    "sweep-sent",
    "after-sweep",
    "give-back-sent",
    "renew-sent",
)
SWITCHING = ("starts", "started", "gives-way", "ended")
"""Those of a worker of several models: it starts the process of one, tells it to end, and knows
that it has ended."""
CUTTABLE = tuple(point for point in POINTS if point.endswith("-sent"))

_orders: dict[tuple[str, int], str] = {}
_passed: Counter[str] = Counter()
_lock = threading.Lock()
_here = threading.local()


def arm(at: Sequence[tuple[str, int, str]]) -> None:
    """Wrap this process's worker; call it once.

    Args:
        at: (point, n, action): what happens when the point is reached for the n-th time.
    """
    _orders.update({(point, count): action for point, count, action in at})
    if not _orders:
        return
    _wrap_answers()
    _wrap_calls()


def watched(engine: Any) -> Any:
    """An engine whose reading of prompts is a point."""
    read = engine.read

    def reached(*args: Any) -> Any:
        reach("prefill")
        return read(*args)

    engine.read = reached
    return engine


def reach(point: str, connection: Any = None) -> None:
    with _lock:
        _passed[point] += 1
        action = _orders.get((point, _passed[point]))
    if action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == STOP:
        # To this thread, which else may go on until another has taken the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == CUT:
        connection.disconnect()
        raise ConnectionError("the connection was cut")


@contextmanager
def _waiting_at(point: str) -> Iterator[None]:
    outer = getattr(_here, "point", None)
    _here.point = point
    try:
        yield
    finally:
        _here.point = outer


def _wrap_answers() -> None:
    read = AbstractConnection.read_response

    @wraps(read)
    def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        point = getattr(_here, "point", None)
        if point is not None:
            _here.point = None
            reach(point, self)
        return read(self, *args, **kwargs)

    AbstractConnection.read_response = read_response  # type: ignore[method-assign]


def _wrap_calls() -> None:
    claim, append, commit = LeaseTable.claim, LeaseTable.append, LeaseTable.commit
    start, tell, note_end = (
        ModelsInTurn._start,
        ModelsInTurn._tell_to_end,
        ModelsInTurn._note_end,
    )
    sweep, give_back, renew = Upkeep.sweep, LeaseTable.give_back, LeaseTable.renew

    def claims(self: LeaseTable, *args: Any, **kwargs: Any) -> Any:
        waiting = any(self.connection.llen(f"rq:queue:{queue}") for queue in self.queues)
        if not waiting:
            return claim(self, *args, **kwargs)
        with _waiting_at("claim-sent"):
            claimed = claim(self, *args, **kwargs)
        if claimed:
            reach("after-claim")
        return claimed

    def appends(self: LeaseTable, events: Any) -> Any:
        if not any(event for _, event in events):
            return append(self, events)
        with _waiting_at("append-sent"):
            refused = append(self, events)
        reach("between-appends")
        return refused

    def commits(self: LeaseTable, endings: Any) -> Any:
        reach("before-commit")
        with _waiting_at("commit-sent"):
            verdicts = commit(self, endings)
        reach("after-commit")
        return verdicts

    def starts(self: ModelsInTurn, *args: Any) -> None:
        reach("starts")
        start(self, *args)
        reach("started")

    def tells(self: ModelsInTurn, loaded: Any, times: int) -> None:
        told = len(loaded.told)
        tell(self, loaded, times)
        if len(loaded.told) > told:
            reach("gives-way")

    def notes_end(self: ModelsInTurn, *args: Any) -> None:
        note_end(self, *args)
        reach("ended")

    ModelsInTurn._start, ModelsInTurn._tell_to_end = starts, tells  # type: ignore[method-assign]
    ModelsInTurn._note_end = notes_end  # type: ignore[method-assign]

    def sweeps(self: Upkeep) -> Iterator[list[str]]:
        if not _expired(self._leases):
            yield from sweep(self)
            return
        with _waiting_at("sweep-sent"):
            returned = list(sweep(self))
        if any(returned):
            reach("after-sweep")
        yield from returned

    def gives_back(self: LeaseTable, jobs: Any) -> Any:
        with _waiting_at("give-back-sent"):
            return give_back(self, jobs)

    def renews(self: LeaseTable, jobs: Any = None) -> Any:
        with _waiting_at("renew-sent"):
            return renew(self, jobs)

    LeaseTable.claim, LeaseTable.append, LeaseTable.commit = claims, appends, commits  # type: ignore[method-assign, assignment]
    Upkeep.sweep, LeaseTable.give_back, LeaseTable.renew = sweeps, gives_back, renews  # type: ignore[method-assign, assignment]


def _expired(leases: LeaseTable) -> bool:
    seconds, micros = leases.connection.time()  # type: ignore[misc]
    now = seconds + micros / 1e6
    return any(
        leases.connection.zcount(f"rq:wip:{queue}", "-inf", now + GRACE_SECONDS)
        for queue in leases.queues
    )
