"""The Lua scripts of this package, as callables of a connection.

Every script runs with ``lua/prelude.lua`` before it. Calls go by digest (EVALSHA); redis-py sends
the text again when a server does not know it, after a restart for example.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from redis import Redis
from redis.commands.core import Script
from rq.defaults import RQ_KEY_PREFIX


@cache
def source(name: str) -> str:
    """The text of ``lua/<name>.lua`` with RQ's key prefix and the prelude before it."""
    folder = resources.files(__name__)
    prelude = folder.joinpath("prelude.lua").read_text(encoding="utf-8")
    return f"local RQ = '{RQ_KEY_PREFIX}:'\n{prelude}\n" + folder.joinpath(f"{name}.lua").read_text(
        encoding="utf-8"
    )


def load(connection: Redis, name: str) -> Script:
    return connection.register_script(source(name))
