"""Lists in OpenAI's form, page by page, of ids in a sorted set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.utils import str_if_bytes
from starlette.requests import Request

from omlx_gateway.errors import ApiError

_CHUNK = 100


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
        document: the entry of an id; None if it has expired, empty if it is not asked for.
        most: entries of a page.
        usual: entries of a page if the request does not say; else ``most``.

    Raises:
        ApiError: 400 for a wrong parameter.
    """
    limit = _limit(request, most, usual or most)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: got {order!r:.60}; give asc or desc", param="order")
    start, after = 0, request.query_params.get("after")
    if after is not None:
        rank: Any = (connection.zrevrank if order == "desc" else connection.zrank)(key, after[:80])
        # Also that of an entry that is not asked for, or is another's.
        if rank is None or document(after) == {}:
            raise ApiError(400, f"after: got {after!r:.80}, an unknown id", param="after")
        start = int(rank) + 1
    data: list[dict[str, Any]] = []
    gone: list[str] = []
    while len(data) <= limit:
        ids: Any = connection.zrange(key, start, start + _CHUNK - 1, desc=order == "desc")
        for each in map(str_if_bytes, ids):
            entry = document(each)
            if entry is None:
                gone.append(each)
            elif entry:
                data.append(entry)
        start += _CHUNK
        if len(ids) < _CHUNK:
            break
    if gone:
        connection.zrem(key, *gone)
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }


def _limit(request: Request, most: int, usual: int) -> int:
    given = request.query_params.get("limit")
    if given is None:
        return usual
    if not (given.isascii() and given.isdecimal() and len(given) < 9 and 1 <= int(given) <= most):
        raise ApiError(400, f"limit: got {given!r:.60}; give 1 to {most}", param="limit")
    return int(given)
