"""Which of a worker's models is loaded next.

The loaded model goes on while it has work. Another one is loaded when it has none, or when jobs
have waited for too long: ``switch_after`` seconds those of bulk, a fifth of that those of default,
a twentieth those of high.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from omlx_producer.wire import PRIORITIES, Priority

PATIENCE: dict[Priority, float] = {"high": 1 / 20, "default": 1 / 5, "bulk": 1}
"""How long jobs wait for another model's work, in parts of ``switch_after``."""

STAY = 4
"""A busy model serves for this many times the time of its load, so loads take a fifth at most."""

Place = tuple[str, Priority]
"""A queue: the alias of its model, and its level."""


class Turns:
    """Notes how long jobs have waited for models that are not loaded.

    Args:
        switch_after: seconds.
        clock: monotonic seconds.
    """

    def __init__(self, switch_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = {level: part * switch_after for level, part in PATIENCE.items()}
        self._clock = clock
        self._since: dict[Place, float] = {}
        self._stays_until = clock()

    def loaded(self, seconds: float) -> None:
        """A model is ready after a load of this many seconds. It serves for a while now."""
        self._stays_until = self._clock() + max(self._patience["high"], STAY * seconds)

    def next(
        self, waiting: Collection[Place], elsewhere: Collection[str] = (), *, busy: bool
    ) -> str | None:
        """The model to load now; None to go on with the loaded one.

        Args:
            waiting: queues of models that are not loaded in which jobs wait.
            elsewhere: models that other workers have loaded. Their jobs interrupt none, and an idle
                worker helps once they have waited as long as high ones do.
            busy: whether the loaded model has work.
        """
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in waiting}
        waits = {each: now - since for each, since in self._since.items()}
        shortest = self._patience["high"]
        if busy and now < self._stays_until:
            return None
        mine = {each: wait for each, wait in waits.items() if each[0] not in elsewhere}
        late = {each: wait / self._patience[each[1]] for each, wait in mine.items()}
        longest = max(late, key=lambda each: late[each], default=None)
        if longest and late[longest] >= 1:
            return longest[0]
        if busy:
            return None
        open_to = mine.keys() | {each for each, wait in waits.items() if wait >= shortest}
        ranked = sorted(open_to, key=lambda each: (PRIORITIES.index(each[1]), -waits[each], each))
        return ranked[0][0] if ranked else None
