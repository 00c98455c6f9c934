"""The figures of running workers. Each writes its own every few seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from redis.utils import str_if_bytes

from omlx_producer.connection import server_time
from omlx_producer.terminal import counted, in_units, local_time, percent
from omlx_producer.wire.keys import WIRE_VERSION, rates_key, workers_key

log = logging.getLogger(__name__)

SILENT_SECONDS = 15.0
"""A worker that has written nothing for this long counts as gone."""

STEP_SECONDS = 10.0
"""Within a step shorter than this the rates from before it are shown. A longer one lowers them."""

GONE_SECONDS = 60.0
"""A worker that is gone is shown for this long after its lease."""

KEPT_SECONDS = 86_400

RATES_SECONDS = 300
"""How long what a worker has written of its tokens a second is kept."""

NOT_LOADED, LOADING = "not loaded", "loading"
"""The states of a worker under a model that it serves and has not loaded."""

_HELD_UP = {
    "paused": "paused (rq resume)",
    "draining": "draining",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """How a worker tells Prometheus one of its figures.

    Attributes:
        name: of the metric, after ``omlx_``.
        counts: whether it is a counter, else a gauge.
        kind: the label of this name, where several figures are one metric.
    """

    name: str
    text: str
    counts: bool = False
    kind: str = ""


def _count(name: str, text: str) -> Exported:
    return Exported(name, text, counts=True)


_MEMORY = "Weights, and the most that the caches of the held rows may take."


class WorkerFigures(BaseModel):
    """A worker at one moment. Rates are those of the last few seconds.

    Counts are those since its start, and 0 from older workers that do not write them.

    Attributes:
        at: seconds since 1970, on the server's clock.
        state: ``idle``, ``busy``, ``draining`` or ``paused``;
            ``loading`` or ``not loaded`` of a model that is not loaded.
        progress: what a worker that loads the model does now, such as ``warming up 3 of 57``.
        uptime: seconds since the model was loaded, or the one in ``turned_to``.
        turned_to: the model that a worker of several has loaded in place of this one.
        fault: why a worker of several cannot serve the model; empty if it can.
        retry_in: seconds until it tries again.
        waiting: rows outside the batch, paused rows included.
        reason: why this depth.
        acceptance: the accepted share of recent drafts; None without drafts.
        cached: the share of the latest prompt tokens that were not read, because a prefix was kept;
            None before the first prompt, and from older workers.
        lease_seconds: how long its jobs stay its own while it is silent.
        host: the machine's name; empty from older workers.
        machine_memory: its bytes; 0 from older workers.
        fingerprint: of the model, see `ModelInfo`; empty from older workers.
        wire_version: the latest version of requests that it knows.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    at: float = 0.0
    state: str = ""
    progress: str = ""
    uptime: float
    jobs: Annotated[int, Exported("jobs_held", "Jobs under a lease.")]
    rows: Annotated[int, Exported("num_requests_running", "Rows in the batch.")]
    max_rows: int
    waiting: Annotated[int, Exported("num_requests_waiting", "Rows outside the batch.")]
    mode: str
    depth: Annotated[int, Exported("draft_depth", "Drafts a row and step, at most, now.")]
    reason: str
    acceptance: float | None = None
    cached: float | None = None
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    tokens: Annotated[int, _count("generation_tokens", "Generated tokens.")]
    prompt_tokens: Annotated[int, _count("prompt_tokens", "Prompt tokens read.")] = 0
    cached_tokens: Annotated[int, _count("prefix_cache_hits", "Prompt tokens not read.")] = 0
    all_prompt_tokens: Annotated[
        int, _count("prefix_cache_queries", "Prompt tokens, read or not.")
    ] = 0
    drafted: int = 0
    accepted: int = 0
    steps: Annotated[int, _count("steps", "Decode steps.")] = 0
    decode_rows: Annotated[int, _count("decode_rows", "Rows summed over the steps.")] = 0
    prompt_windows: Annotated[int, _count("prompt_windows", "Windows of prompts read.")] = 0
    traces: Annotated[int, _count("traces", "Shapes of steps first met by rows.")] = 0
    contests: Annotated[int, _count("contests", "Comparisons of kernels while rows waited.")] = 0
    miscounted_pages: Annotated[
        int, Exported("miscounted_pages", "Pages of caches with a wrong count; 0 unless at fault.")
    ] = 0
    pictures: Annotated[int, _count("pictures", "Pictures looked at.")] = 0
    picture_seconds: Annotated[float, _count("picture_seconds", "What looking took.")] = 0.0
    pauses: Annotated[int, _count("num_preemptions", "Rows paused for others.")]
    switches: Annotated[int, _count("model_switches", "Loads in place of another model.")] = 0
    switch_seconds: Annotated[float, _count("model_switch_seconds", "What they took.")] = 0.0
    cache_bytes: Annotated[int, Exported("memory_bytes", _MEMORY, kind="caches")]
    weight_bytes: Annotated[int, Exported("memory_bytes", _MEMORY, kind="weights")]
    memory_limit: Annotated[int, Exported("memory_limit_bytes", "For weights and caches.")]
    lease_seconds: float = 30.0
    host: str = ""
    machine_memory: int = 0
    fingerprint: str = ""
    turned_to: str = ""
    wire_version: int = 1
    fault: str = ""
    retry_in: float = 0.0

    def is_same_step(self, before: WorkerFigures) -> bool:
        """Whether the step that ran at earlier figures may still run."""
        ended = (self.tokens, self.prompt_tokens) != (before.tokens, before.prompt_tokens)
        return self.jobs > 0 and not ended and self.uptime - before.uptime < STEP_SECONDS

    def since(self, before: WorkerFigures) -> WorkerFigures:
        """These figures with the rates and shares since earlier ones.

        Within one step they keep the earlier ones.
        """
        if self.is_same_step(before):
            names = ("tokens_per_second", "prompt_tokens_per_second", "acceptance", "cached")
            return self.model_copy(update={name: getattr(before, name) for name in names})
        seconds = self.uptime - before.uptime
        read = self.prompt_tokens - before.prompt_tokens
        prompts = self.all_prompt_tokens - before.all_prompt_tokens
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        tokens = self.tokens - before.tokens
        rates = {
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "prompt_tokens_per_second": read / seconds if seconds else 0.0,
            "acceptance": accepted / drafted if drafted else None,
            "cached": 1 - read / prompts if prompts else before.cached,
        }
        return self.model_copy(update=rates)

    def exported(self) -> dict[Exported, float]:
        """The figures for Prometheus."""
        return {
            each: getattr(self, name)
            for name, field in type(self).model_fields.items()
            for each in field.metadata
            if isinstance(each, Exported)
        }

    @property
    def is_loading(self) -> bool:
        """Whether it loads the model, and takes no job until then."""
        return self.state == LOADING

    @property
    def takes_jobs(self) -> bool:
        """Whether it takes jobs of the model, or will as soon as it has loaded it."""
        return self.is_loading or self.state in ("idle", "busy")

    @property
    def held_up(self) -> str:
        """Why it takes no jobs, with the command or option behind it; empty if it takes some."""
        if self.fault:
            return f"unable to serve it until {local_time(self.at + self.retry_in)}: {self.fault}"
        if self.turned_to:
            since = local_time(self.at - self.uptime)
            return f"serving {self.turned_to} since {since} (--switch-after)"
        if self.is_loading:
            return "loading it" + f" ({self.progress})" * bool(self.progress)
        return _HELD_UP.get(self.state, "")

    @property
    def turn(self) -> str:
        """Since when the model is loaded, and what switching to it has cost; empty without any."""
        if not self.switches or self.turned_to:
            return ""
        since = local_time(self.at - self.uptime)
        loads = counted(self.switches, "load")
        return f"loaded since {since}; {loads} in place of others took {self.switch_seconds:.1f} s"

    @property
    def cells(self) -> dict[str, str]:
        """What a table says of it beside its name, by column."""
        if self.state in (NOT_LOADED, LOADING):
            names = ("rows", "wait", "depth", "accept", "cached", "tok/s", "memory")
            return {"state": self.state, **dict.fromkeys(names, "-")}
        used, limit = in_units(self.weight_bytes + self.cache_bytes), in_units(self.memory_limit)
        return {
            "state": self.state,
            "rows": f"{self.rows}/{self.max_rows}",
            "wait": str(self.waiting),
            "depth": f"{self.depth} ({self.mode})",
            "accept": percent(self.acceptance),
            "cached": percent(self.cached),
            "tok/s": f"{self.tokens_per_second:.0f}",
            "memory": f"{used.removesuffix(limit[-4:])}/{limit}".replace("iB", ""),
        }

    def silent(self, now: float) -> float:
        """The seconds since it has written its figures, or until then if the clock went back."""
        return abs(now - self.at)

    def lives(self, now: float) -> bool:
        """Whether it has written its figures lately."""
        return self.silent(now) <= SILENT_SECONDS

    def is_forgotten(self, now: float) -> bool:
        """Whether it has been gone for too long to be shown."""
        return self.silent(now) > max(SILENT_SECONDS, self.lease_seconds) + GONE_SECONDS


def write_figures(connection: redis.Redis, model: str, figures: WorkerFigures) -> None:
    """Write the figures of this worker."""
    figures = figures.model_copy(update={"wire_version": WIRE_VERSION})
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
    workers = parse_workers(connection.hgetall(key))
    if old := [worker.name for worker in workers if worker.is_forgotten(now)]:
        connection.hdel(key, *old)


def read_workers(connection: redis.Redis, model: str) -> list[WorkerFigures]:
    """The living workers of a model alias, sorted by name."""
    if not (entries := connection.hgetall(workers_key(model))):
        return []
    now = server_time(connection)
    return [each for each in parse_workers(entries) if each.lives(now)]


def parse_workers(entries: dict[Any, Any]) -> list[WorkerFigures]:
    """The workers in the hash `workers_key`, sorted by name, living or not."""
    found = {}
    for name, document in entries.items():
        try:
            found[str_if_bytes(name)] = WorkerFigures.model_validate_json(document)
        except ValidationError:
            _warn(str_if_bytes(name))
    return [found[name] for name in sorted(found)]


@cache
def _warn(name: str) -> None:
    log.warning("ignoring the figures of worker %r, which another version wrote", name)


def read_rates(connection: redis.Redis, model: str) -> list[tuple[float, float]]:
    """Tokens a second of all workers of a model in the last `RATES_SECONDS`.

    Returns:
        Seconds since 1970, on the server's clock, and the rate then, for each write of a worker.
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
