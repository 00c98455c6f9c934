"""The Lua scripts of this package, as callables of a connection; each runs after the prelude."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError, RedisError
from rq.defaults import RQ_KEY_PREFIX

from omlx_producer.outage import LongCall
from omlx_producer.wire.end import ENDED
from omlx_producer.wire.keys import CONSTANTS, KEYS


@cache
def source(name: str) -> str:
    """The text of ``lua/<name>.lua`` with the names of keys and the prelude before it."""
    folder = resources.files(__name__)
    prelude, script = (
        folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)
    )
    text = f"{prelude}\n{script}"
    return f"local RQ = '{RQ_KEY_PREFIX}:'\n{_names_in(text)}\n{text}"


def _names_in(text: str) -> str:
    """Constants, and the keys that a script names: functions of what they belong to, or texts."""
    lines = [f"local {name} = {value!r}" for name, value in CONSTANTS.items()]
    lines.append(f"local ENDED = {{{', '.join(f'{status} = true' for status in ENDED)}}}")
    for name, key in KEYS.items():
        if not re.search(rf"\b{name}\b", text):
            continue
        form = re.sub("<([a-z]+)>", r"' .. \1 .. '", f"'{key.form}'").removesuffix(" .. ''")
        places = re.findall("<([a-z]+)>", key.form)
        function = f"local function {name}({', '.join(places)}) return {form} end"
        lines.append(function if places else f"local {name} = {form}")
    return "\n".join(lines)


def load(connection: Redis, name: str) -> Script:
    return Script(connection, source(name))


class Script:
    """A script on a connection.

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
            return self._answer(call)
        except RedisError as error:
            size = sum(len(part) for part in call if isinstance(part, str | bytes))
            refused = LongCall.of(error, size)
            if refused:
                # The server closes the connection a moment after it has answered.
                self._connection.connection_pool.disconnect(inuse_connections=False)
            raise refused or error from None

    def _answer(self, call: Sequence[Any]) -> Any:
        try:
            return self._connection.evalsha(self._digest, *call)
        except NoScriptError:
            return self._connection.eval(self._text, *call)
