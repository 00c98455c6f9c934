"""Lists in OpenAI's form, page by page, of an index in Redis.

An index is a sorted set for all owners. Its entries have one score and are sorted by their text,
``<owner>:<time>:<id>``, so those of an owner are together, by the time at which they were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from redis import Redis
from redis.utils import str_if_bytes
from starlette.requests import Request

from omlx_gateway.access import owner_of
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.keys import FILES_KEY, HTTP_BATCHES_KEY

FILES_INDEX, BATCHES_INDEX = FILES_KEY, HTTP_BATCHES_KEY
"""That of files has entries for both outputs of a new batch."""
_CHUNK = 1000


def index_entry(owner: str | None, made_at: float, name: str) -> str:
    """The entry of an id."""
    return f"{owner or ''}:{made_at:017.6f}:{name}"


def page_of(
    connection: Redis,
    key: str,
    request: Request,
    document: Callable[[str], dict[str, Any] | None],
    *,
    most: int,
    usual: int | None = None,
) -> dict[str, Any]:
    """The page that a request asks for with ``after``, ``limit`` and ``order``.

    Args:
        key: of the index.
        document: what the list shows of an id; empty if it has gone or is not asked for.
        most: entries of a page.
        usual: entries of a page if the request does not say; else ``most``.

    Raises:
        InvalidRequest: for a wrong parameter.
    """
    limit = _limit(request, most, usual or most)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f"got {order!r:.60}", "give asc or desc")
    ids = ids_of(connection, key, owner_of(request), desc=order == "desc")
    after = request.query_params.get("after")
    # The search leaves the iterator behind the id that it finds.
    if after is not None and after not in ids:
        raise InvalidRequest("after", f"got {after!r:.80}, an unknown id")
    data = list(itertools.islice(filter(None, map(document, ids)), limit + 1))
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }


def ids_of(connection: Redis, key: str, owner: str | None, *, desc: bool = False) -> Iterator[str]:
    """The ids of an owner in an index, in the order in which they were made; None is all owners."""
    return map(_id_of, _entries(connection, key, owner, desc=desc))


def forget_gone(connection: Redis, key: str, record_key: Callable[[str], str]) -> None:
    """Take the entries out of an index whose records have expired or were deleted.

    Args:
        record_key: of an id.
    """
    entries = _entries(connection, key, None)
    while chunk := list(itertools.islice(entries, _CHUNK)):
        with connection.pipeline(transaction=False) as pipe:
            for entry in chunk:
                pipe.exists(record_key(_id_of(entry)))
            known = pipe.execute()
        if gone := [entry for entry, found in zip(chunk, known, strict=True) if not found]:
            connection.zrem(key, *gone)


def _entries(
    connection: Redis, key: str, owner: str | None, *, desc: bool = False
) -> Iterator[str]:
    # ";" comes after ":".
    low, high = ("-", "+") if owner is None else (f"[{owner}:", f"({owner};")
    while True:
        first, last = (high, low) if desc else (low, high)
        found: Any = connection.zrange(
            key, first, last, desc=desc, bylex=True, offset=0, num=_CHUNK
        )
        entries = [str_if_bytes(each) for each in found]
        yield from entries
        if len(entries) < _CHUNK:
            return
        low, high = (low, f"({entries[-1]}") if desc else (f"({entries[-1]}", high)


def _id_of(entry: str) -> str:
    return entry.rpartition(":")[2]


def _limit(request: Request, most: int, usual: int) -> int:
    given = request.query_params.get("limit")
    if given is None:
        return usual
    if not (given.isascii() and given.isdecimal() and len(given) < 9 and 1 <= int(given) <= most):
        raise InvalidRequest("limit", f"got {given!r:.60}", f"give 1 to {most}")
    return int(given)
