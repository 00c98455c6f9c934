"""What running workers say of themselves: written by each every few seconds, read by anybody."""

from __future__ import annotations

import logging
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from redis.utils import str_if_bytes

log = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A worker that has said nothing for so long is not there any more."""

KEPT_SECONDS = 86_400


class WorkerFigures(BaseModel):
    """One worker at one moment; rates are over the last few seconds.

    Attributes:
        at: seconds since 1970, on the server's clock.
        state: ``idle``, ``busy``, ``draining`` or ``suspended``.
        jobs: that it holds.
        rows: in its batch.
        waiting: rows without a place in the batch, paused ones included.
        depth: drafts a row and step, at most, in use now.
        reason: why that deep.
        acceptance: share of drafts accepted lately; None where none were judged.
        mode_changes: how often drafting began or ended while rows were being decoded.
        pauses: rows that made place for more urgent ones, since the start.
        cache_bytes: what the caches of its rows may come to.
        memory_limit: bytes for weights and caches.
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
    tokens_per_second: float
    prompt_tokens_per_second: float
    tokens: int
    mode_changes: int
    pauses: int
    cache_bytes: int
    weight_bytes: int
    memory_limit: int


def workers_key(model: str) -> str:
    """The hash that holds the figures of a model alias's workers, by name."""
    return f"omlx:workers:{model}"


def server_time(connection: redis.Redis) -> float:
    seconds, micros = connection.time()
    return float(seconds) + float(micros) / 1e6


def write_figures(connection: redis.Redis, model: str, figures: WorkerFigures) -> None:
    """Tell everybody; forgets those who were killed before they could sign off."""
    key = workers_key(model)
    with connection.pipeline() as pipeline:
        pipeline.hset(key, figures.name, figures.model_dump_json())
        pipeline.expire(key, KEPT_SECONDS)
        pipeline.hgetall(key)
        entries = pipeline.execute()[-1]
    silent = [name for name, found in _parse(entries).items() if _is_silent(found, figures.at)]
    if silent:
        connection.hdel(key, *silent)


def read_workers(connection: redis.Redis, model: str) -> list[WorkerFigures]:
    """The workers of a model alias that are alive, by name."""
    found = _parse(connection.hgetall(workers_key(model)))
    now = server_time(connection) if found else 0.0
    return [figures for _, figures in sorted(found.items()) if not _is_silent(figures, now)]


def _parse(entries: dict[Any, Any]) -> dict[str, WorkerFigures]:
    found = {}
    for name, document in entries.items():
        try:
            found[str_if_bytes(name)] = WorkerFigures.model_validate_json(document)
        except ValidationError:
            log.debug("the figures of worker %r are of another version; ignored", name)
    return found


def _is_silent(figures: WorkerFigures, now: float) -> bool:
    return now - figures.at > SILENT_SECONDS
