"""What Redis knows of models, their queues and workers, for the command line, the gateway's page,
Prometheus, and whoever waits for a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, computed_field
from redis.utils import str_if_bytes
from rq import Queue
from rq.registry import StartedJobRegistry
from rq.utils import str_to_date

from omlx_producer.bulk.batch import Batch
from omlx_producer.client.models import parse_models
from omlx_producer.client.workers import WorkerFigures, parse_workers
from omlx_producer.lua import load
from omlx_producer.terminal import counted, duration, in_units, without_counts
from omlx_producer.wire import PRIORITIES, ModelInfo, Priority, queue_name, read_queue_name
from omlx_producer.wire.keys import MODELS_KEY, PAUSED_KEY, open_key, workers_key

# More would hold up other clients of Redis.
_LISTS_AT_ONCE = 100


class QueueFigures(BaseModel):
    """What waits for a worker in one queue.

    Attributes:
        jobs: those of RQ's queue.
        batch_rows: rows of open batches that are no jobs yet.
        oldest_seconds: the largest age of the first job of the queue and the first row of each
            batch; None if none waits.
        wire_version: the latest version of requests among those.
    """

    model_config = ConfigDict(frozen=True)

    jobs: int = 0
    batch_rows: int = 0
    oldest_seconds: float | None = None
    wire_version: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def waiting(self) -> int:
        return self.jobs + self.batch_rows


class ModelFigures(BaseModel):
    """A model with its queues and workers at one moment.

    Attributes:
        at: seconds since 1970, on the server's clock.
        info: None if no worker has announced it.
        paused: whether its workers are told to take no jobs.
        workers: those that live.
        gone: those that have fallen silent lately, with their last figures: they were killed, or
            cannot reach Redis.
        crowded: machines of its workers whose workers may take more memory than there is.
    """

    model_config = ConfigDict(frozen=True)

    alias: str
    at: float
    info: ModelInfo | None = None
    queues: dict[Priority, QueueFigures]
    paused: bool = False
    workers: list[WorkerFigures] = []
    gone: list[WorkerFigures] = []
    crowded: list[str] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def oldest_seconds(self) -> float | None:
        """See `QueueFigures`; that of all queues."""
        ages = (queue.oldest_seconds for queue in self.queues.values())
        return max((age for age in ages if age is not None), default=None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def held_up(self) -> str:
        """Why no worker takes what waits, and what to do; empty if one does."""
        if not self.workers:
            return f"no worker serves {self.alias}"
        if self.paused:
            return self._pause
        # Workers that do the same, each so far, are one reason.
        reasons = {without_counts(each.held_up): each.held_up for each in self.workers}
        told = ", ".join(sorted(reasons.values()))
        return f"the workers of {self.alias} are {told}" if all(reasons) else ""

    def too_new(self, what: str, version: int) -> str:
        """That none of the workers knows a version of requests, and what to do; empty if one does.

        Args:
            what: needs that version.
        """
        if not self.workers or version <= max(worker.wire_version for worker in self.workers):
            return ""
        fields = f"no worker of {self.alias} knows all fields of its requests"
        return f"{what} waits for a newer worker: {fields}; upgrade one"

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the options of its workers."""
        prints = sorted({worker.fingerprint for worker in self.workers} - {""})
        if len(prints) < 2:
            return self.crowded
        told = f"the workers of {self.alias} serve different models ({', '.join(prints)}), so a "
        return [f"{told}job may get either; give them different --model-alias", *self.crowded]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def notes(self) -> list[str]:
        """The warnings, what holds up the model or a worker, workers that miscount pages, and what
        becomes of the jobs of silent workers."""
        notes = self.warnings + ([] if self.workers else [self.held_up + self._removal])
        notes += [self._pause] if self.paused else []
        for worker in self.workers:
            if worker.held_up and not self.paused:
                notes.append(f"{worker.name}: {worker.held_up}")
            if pages := worker.miscounted_pages:
                told = f"{counted(pages, 'page')} of its caches {'is' if pages == 1 else 'are'}"
                notes.append(f"{worker.name}: {told} miscounted; restart it")
        for priority, queue in self.queues.items():
            notes.append(self.too_new(queue_name(self.alias, priority), queue.wire_version))
        notes = list(filter(None, notes))
        return notes + [self._farewell(worker) for worker in self.gone]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def depths(self) -> list[str]:
        """Why busy workers draft as deep as they do, and since when those of several models have
        loaded this one."""
        drafts = [w for w in self.workers if w.rows and w.mode == "auto" and w.reason]
        told = [f"{worker.name}: {worker.turn}" for worker in self.workers if worker.turn]
        return told + [f"{worker.name} drafts: {worker.reason}" for worker in drafts]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def table(self) -> list[dict[str, str]]:
        """The living workers by column, for people."""
        rows = [{f"workers of {self.alias}": each.name, **each.cells} for each in self.workers]
        if not any(worker.cached for worker in self.workers):
            for row in rows:
                del row["cached"]
        return rows

    @property
    def _removal(self) -> str:
        """How to remove what waits for a name that no worker has announced."""
        if self.info is not None:
            return ""
        queues = [queue_name(self.alias, each) for each, queue in self.queues.items() if queue.jobs]
        ways = [f"rq empty --url URL {' '.join(queues)}"] if queues else []
        if any(queue.batch_rows for queue in self.queues.values()):
            ways.append("omlx-submit cancel BATCH, see omlx-submit batches")
        return f"; if its name is wrong, remove what waits: {', and '.join(ways)}" if ways else ""

    @property
    def _pause(self) -> str:
        return f"{self.alias} is paused; omlx-submit resume {self.alias} lets it go on"

    def _farewell(self, worker: WorkerFigures) -> str:
        silent = worker.silent(self.at)
        told = f"{worker.name} has been silent for {duration(silent)}"
        if not worker.jobs:
            return told
        told += f"; its {counted(worker.jobs, 'job')} {'goes' if worker.jobs == 1 else 'go'} on "
        if not self.workers:
            return f"{told}once another worker serves {self.alias}"
        # Other workers look for expired leases four times per lease.
        seconds = max(0.0, 1.25 * worker.lease_seconds - silent)
        return f"{told}elsewhere" + (f" in {seconds:.0f} s" if seconds else "")


def read_figures(connection: redis.Redis, alias: str | None = None) -> list[ModelFigures]:
    """The models that are announced or paused, that have a worker, or for which something waits.

    Args:
        alias: only this one, whatever is known of it.
    """
    with connection.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(MODELS_KEY)
        pipe.smembers(PAUSED_KEY)
        pipe.smembers(Queue.redis_queues_keys)
        (seconds, micros), entries, paused, keys = pipe.execute()
        now = float(seconds) + float(micros) / 1e6
        models, aliases = parse_models(entries), set(map(str_if_bytes, paused))
        others = sorted((models_of(keys) | aliases) - models.keys())
        names = [*models, *others] if alias is None else [alias]
        for name in names:
            pipe.hgetall(workers_key(name))
        found = [parse_workers(written) for written in pipe.execute()]
    queues = _read_queues(connection, names, now)
    crowded = _crowded(worker for workers in found for worker in workers if worker.lives(now))
    return [
        ModelFigures(
            alias=name,
            at=now,
            info=models.get(name),
            queues=queues[name],
            paused=name in aliases,
            workers=[each for each in workers if each.lives(now)],
            gone=[each for each in workers if not (each.lives(now) or each.is_forgotten(now))],
            crowded=[crowded[host] for host in {each.host for each in workers} & crowded.keys()],
        )
        for name, workers in zip(names, found, strict=True)
        if name in (alias, *models, *aliases)
        or any(each.lives(now) for each in workers)
        or any(q.waiting for q in queues[name].values())
    ]


def read_unannounced(connection: redis.Redis, alias: str | None = None) -> str:
    """What workers do with a model before they announce it, in a sentence; empty if none has it.

    Args:
        alias: the model; else any, as long as none is announced.
    """
    found = read_figures(connection, alias)
    if any(model.info for model in found):
        return ""
    return "; ".join(model.held_up for model in found if model.workers and model.held_up)


def queue_key(queue: str) -> str:
    """The key of a queue's list of ids."""
    return Queue.redis_queue_namespace_prefix + queue


def queued_models(connection: redis.Redis) -> set[str]:
    """The models that have a queue, also an empty one, announced or not."""
    return models_of(connection.smembers(Queue.redis_queues_keys))


def models_of(keys: Iterable[Any]) -> set[str]:
    """The models of keys of queues; those of others are left out."""
    prefix = Queue.redis_queue_namespace_prefix
    names = (str_if_bytes(key).removeprefix(prefix) for key in keys)
    return {found[0] for found in map(read_queue_name, names) if found is not None}


def read_started(connection: redis.Redis, model: str) -> list[bytes]:
    """The jobs of a model that workers hold; each entry begins with a job's id."""
    with connection.pipeline(transaction=False) as pipe:
        for priority in PRIORITIES:
            queue = queue_name(model, priority)
            pipe.zrange(StartedJobRegistry(queue, connection=connection).key, 0, -1)
        return [entry for entries in pipe.execute() for entry in entries]


def date_seconds(date: bytes | None) -> float | None:
    """RQ's form of a date as seconds since 1970; None if the job has gone or the date is broken."""
    try:
        return str_to_date(date or b"").timestamp()
    except ValueError:
        return None


def _read_queues(
    connection: redis.Redis, models: Sequence[str], now: float
) -> dict[str, dict[Priority, QueueFigures]]:
    """The queues of these models, each with the rows of batches that wait in it."""
    places = [(model, priority) for model in models for priority in PRIORITIES]
    names = [queue_name(*place) for place in places]
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.zrange(open_key(name), 0, -1)
        lists = [(place, 0, queue_key(name)) for place, name in zip(places, names, strict=True)]
        for place, name, runs in zip(places, names, pipe.execute(), strict=True):
            batches = (Batch.of_run(connection, str_if_bytes(run)) for run in runs)
            lists += [(place, 1, each.waiting_key(name)) for each in batches]
    look, answers = load(connection, "lists"), []
    for start in range(0, len(lists), _LISTS_AT_ONCE):
        answers += look(args=[key for *_, key in lists[start : start + _LISTS_AT_ONCE]])
    counts = {place: [0, 0] for place in places}
    ages = defaultdict[tuple[str, Priority], list[float]](list)
    versions = dict.fromkeys(places, 1)
    for (place, kind, _), (count, date, version) in zip(lists, answers, strict=True):
        counts[place][kind] += count
        versions[place] = max(versions[place], version)
        if (since := date_seconds(date)) is not None:
            ages[place].append(max(0.0, now - since))
    queues: dict[str, dict[Priority, QueueFigures]] = {model: {} for model in models}
    for place, (jobs, rows) in counts.items():
        oldest = max(ages[place], default=None)
        queues[place[0]][place[1]] = QueueFigures(
            jobs=jobs, batch_rows=rows, oldest_seconds=oldest, wire_version=versions[place]
        )
    return queues


def _crowded(workers: Iterable[WorkerFigures]) -> dict[str, str]:
    """Machines whose workers may take more memory than there is, each with a sentence."""
    machines, told = defaultdict[str, list[WorkerFigures]](list), {}
    for worker in workers:
        machines[worker.host].append(worker)
    for host, here in machines.items():
        together, memory = sum(w.memory_limit for w in here), max(w.machine_memory for w in here)
        if 0 < memory < together:
            each = ", ".join(f"{w.name} {in_units(w.memory_limit)}" for w in here)
            told[host] = (
                f"the workers of {host} may take {in_units(together)} together ({each}), and it "
                f"has {in_units(memory)}; give each a --memory-limit"
            )
    return told
