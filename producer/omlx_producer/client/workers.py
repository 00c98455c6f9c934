"""The figures of running workers. Each writes its own every few seconds."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from redis.utils import str_if_bytes

log = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A worker that has written nothing for this long counts as gone."""

GONE_SECONDS = 60.0
"""A worker that is gone is shown for this long after its lease."""

KEPT_SECONDS = 86_400

RATES_SECONDS = 300
"""How long what a worker has written of its tokens a second is kept."""


class WorkerFigures(BaseModel):
    """A worker at one moment. Rates are those of the last few seconds.

    Attributes:
        at: seconds since 1970, on the server's clock.
        state: ``idle``, ``busy``, ``draining``, ``suspended``, ``resting`` or ``on battery``.
        jobs: jobs held.
        rows: rows in the batch.
        waiting: rows outside the batch, paused rows included.
        depth: the most drafts per row and step now.
        reason: why this depth.
        acceptance: the accepted share of recent drafts; None without drafts.
        cached: the share of the latest prompt tokens that were not read, because a prefix was kept;
            None before the first prompt, and from older workers.
        pauses: rows paused for more urgent ones, since the start.
        cache_bytes: the most that the caches of the held rows may take.
        memory_limit: bytes for weights and caches.
        lease_seconds: how long its jobs stay its own while it is silent.
        host: the machine's name; empty from older workers.
        conditions: what slows the machine now, such as ``heavy heat``.
        rests_until: when the hours of a worker that rests begin, in seconds since 1970.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    at: float
    state: str
    uptime: float
    jobs: int
    rows: int
    max_rows: int
    waiting: int
    mode: str
    depth: int
    reason: str
    acceptance: float | None
    cached: float | None = None
    tokens_per_second: float
    prompt_tokens_per_second: float
    tokens: int
    pauses: int
    cache_bytes: int
    weight_bytes: int
    memory_limit: int
    lease_seconds: float = 30.0
    host: str = ""
    conditions: list[str] = []
    rests_until: float | None = None


def workers_key(model: str) -> str:
    """The hash of a model alias's workers: figures by worker name."""
    return f"omlx:workers:{model}"


def rates_key(model: str) -> str:
    """The stream of what a model's workers have written of their tokens a second."""
    return f"omlx:rates:{model}"


def server_time(connection: redis.Redis) -> float:
    """Seconds since 1970, on the server's clock."""
    seconds, micros = connection.time()
    return float(seconds) + float(micros) / 1e6


def write_figures(connection: redis.Redis, model: str, figures: WorkerFigures) -> None:
    """Write the figures of a worker."""
    key, rates = workers_key(model), rates_key(model)
    rate = {"worker": figures.name, "rate": f"{figures.tokens_per_second:.1f}"}
    oldest = int(1000 * (figures.at - RATES_SECONDS))
    with connection.pipeline() as pipeline:
        pipeline.hset(key, figures.name, figures.model_dump_json())
        pipeline.expire(key, KEPT_SECONDS)
        pipeline.xadd(rates, rate, minid=oldest, approximate=False)  # type: ignore[arg-type]
        pipeline.expire(rates, RATES_SECONDS)
        pipeline.execute()


def forget_gone(connection: redis.Redis, model: str) -> None:
    """Delete the figures of workers that are long gone."""
    key, now = workers_key(model), server_time(connection)
    entries = _parse(connection.hgetall(key))
    if old := [name for name, found in entries.items() if _is_old(found, now)]:
        connection.hdel(key, *old)


def read_workers(connection: redis.Redis, model: str) -> list[WorkerFigures]:
    """The living workers of a model alias, sorted by name."""
    entries = connection.hgetall(workers_key(model))
    return living(entries, server_time(connection) if entries else 0.0)


def read_rates(connection: redis.Redis, model: str) -> list[tuple[float, float]]:
    """Tokens a second of all workers of a model in the last `RATES_SECONDS`.

    Returns:
        Seconds since 1970, on the server's clock, and the rate then, for each figures of a worker.
    """
    latest = dict[bytes, tuple[float, float]]()
    found = []
    entries: Any = connection.xrange(rates_key(model))
    for entry, fields in entries:
        at = int(str_if_bytes(entry).partition("-")[0]) / 1000
        latest[fields[b"worker"]] = at, float(fields[b"rate"])
        rate = sum(rate for seen, rate in latest.values() if at - seen <= SILENT_SECONDS)
        found.append((at, rate))
    return found


def living(entries: dict[Any, Any], now: float) -> list[WorkerFigures]:
    """The living workers of the hash `workers_key`, sorted by name.

    Args:
        now: seconds since 1970, on the server's clock.
    """
    found = sorted(_parse(entries).items())
    return [figures for _, figures in found if not _is_silent(figures, now)]


def gone(entries: dict[Any, Any], now: float) -> list[WorkerFigures]:
    """The workers of the hash that have fallen silent lately, with their last figures.

    They were killed, or cannot reach Redis. Their jobs go on elsewhere once their leases expire.
    """
    found = sorted(_parse(entries).items())
    return [
        figures for _, figures in found if _is_silent(figures, now) and not _is_old(figures, now)
    ]


def _parse(entries: dict[Any, Any]) -> dict[str, WorkerFigures]:
    found = {}
    for name, document in entries.items():
        try:
            found[str_if_bytes(name)] = WorkerFigures.model_validate_json(document)
        except ValidationError:
            _warn(str_if_bytes(name))
    return found


@cache
def _warn(name: str) -> None:
    log.warning("ignoring the figures of worker %r, which another version wrote", name)


def _is_old(figures: WorkerFigures, now: float) -> bool:
    return now - figures.at > max(SILENT_SECONDS, figures.lease_seconds) + GONE_SECONDS


def _is_silent(figures: WorkerFigures, now: float) -> bool:
    return now - figures.at > SILENT_SECONDS
