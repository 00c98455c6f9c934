"""The server's time, as scripts have it in tests with the fixture ``server_time``."""

from __future__ import annotations

from redis import Redis

from omlx_producer.lua import source

_AHEAD = "tests:ahead"
_TIME = "redis.call('TIME')"
_MOVED = f"""(function()
  local time = {_TIME}
  return {{time[1] + (redis.call('GET', '{_AHEAD}') or 0), time[2]}}
end)()"""


def moved_source(name: str) -> str:
    """A script that goes by the moved time."""
    text = source(name)
    assert text.count(_TIME) == 1, "all scripts read the time in one place"
    return text.replace(_TIME, _MOVED)


def forward(connection: Redis, seconds: int) -> None:
    """Move the time forward, or back. Leases of `tests.helpers.leases` last 30 seconds."""
    connection.incrby(_AHEAD, seconds)
