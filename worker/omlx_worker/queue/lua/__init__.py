"""The Lua scripts of this package, as callables of a connection.

Every script is the body of a function that runs after ``lua/prelude.lua``. What it returns is its
reply; None if it has met a key of another type itself and not in a part of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError, RedisError
from rq.defaults import RQ_KEY_PREFIX

from omlx_producer.outage import LongCall

log = logging.getLogger("omlx_worker.queue.lua")


@cache
def source(name: str) -> str:
    """The text of ``lua/<name>.lua`` with RQ's key prefix and the prelude before it."""
    folder = resources.files(__name__)
    prelude, script = (
        folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)
    )
    return (
        f"local RQ = '{RQ_KEY_PREFIX}:'\n{prelude}\nlocal function run()\n{script}\nend\n"
        "return {attempt(run) or false, problems}"
    )


def load(connection: Redis, name: str) -> Script:
    return Script(connection, source(name))


class Script:
    """A script on a connection. A call returns its reply and logs each key of another type once.

    Calls go by digest. To a server that does not know it the text goes with the call, unlike in
    redis-py's `Script`: a server may forget a script that was just loaded.
    """

    def __init__(self, connection: Redis, text: str) -> None:
        self._connection = connection
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str] = (), args: Iterable[Any] = ()) -> Any:
        call = (len(keys), *keys, *args)
        try:
            reply, problems = self._answer(call)
        except RedisError as error:
            size = sum(len(part) for part in call if isinstance(part, str | bytes))
            raise LongCall.of(error, size) or error from None
        for problem in problems:
            report(problem.decode(errors="backslashreplace"))
        return reply

    def _answer(self, call: Sequence[Any]) -> Any:
        try:
            return self._connection.evalsha(self._digest, *call)
        except NoScriptError:
            return self._connection.eval(self._text, *call)


@lru_cache(maxsize=1024)
def report(problem: str) -> None:
    """Log a key of another type, once."""
    log.error(problem)
