"""What do a thousand workers and a million rows cost their Redis?

    python -m scripts.bench.fleet                    everything, in about five minutes
    python -m scripts.bench.fleet --only idle --workers 200
    python -m scripts.bench.fleet --only expiry job makespan claims
    python -m scripts.bench.fleet --workers 4 --settle 1 --seconds 1 --rows 100000    a quick look

``idle``      the share of the server's thread that idle workers take, by command; how many of them
              one submission wakes, and how long the server takes for the message to a thousand and
              for their claims. The workers are real ones with an engine that does nothing, on
              threads of two processes. Two cores run 400 of them in real time; the share is scaled
              to a thousand.
``expiry``    the longest calls while the leader sweeps expired leases and expired entries.
``job``       the memory of a finished job of 64 tokens that were streamed or not, on a server
              with the settings of docs/fleet.md and on one without.
``makespan``  rows of unequal length over a thousand workers, beside the least that is possible. A
              model of the claims in Python: without Redis, which takes a tenth of a
              millisecond for each row.
``claims``    the time of a claim of 16 rows out of a million waiting rows in 100 batches, and out
              of a thousand in one.

The share of a thread is the server's own CPU time. The longest calls are from its SLOWLOG, which
counts the time of a script alone; a loaded machine makes them longer.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import logging
import math
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from redis import Redis
from rich.console import Console
from rich.table import Table

from omlx_producer import Producer
from omlx_producer.wire import JOB_FUNCTION, PRIORITIES, queue_name
from omlx_worker.control import worker
from omlx_worker.control.admission import MOST_COMING
from omlx_worker.control.rq_record import BEAT_SECONDS
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.queue.lease import GRACE_SECONDS, LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.leases import done, tokens
from tests.helpers.workers import ALIAS, running_worker

QUEUES = [queue_name(ALIAS, priority) for priority in PRIORITIES]
PROCESSES, RINGS, BELL = 2, 200, "bell"
WAKE_SECONDS = 0.5
SUBMISSIONS = 10
LEASES = 32_000
JOBS, JOB_TOKENS, TOKENS_A_STEP = 1000, 64, 4
WORKERS, SLOTS = 1000, 16
CLAIMS = 50


@contextlib.contextmanager
def a_server() -> Iterator[tuple[str, Redis]]:
    with (
        TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder)) as server,
        Redis.from_url(server.url) as connection,
    ):
        yield server.url, connection


# Calls


class Call(NamedTuple):
    """A call that the server has answered; `client` is an address and a port."""

    milliseconds: float
    command: bytes
    client: bytes


@contextlib.contextmanager
def all_calls(connection: Redis) -> Iterator[Callable[[], list[Call]]]:
    """Record the calls of a block."""
    connection.config_set("slowlog-max-len", 1_000_000)
    connection.config_set("slowlog-log-slower-than", 0)
    connection.slowlog_reset()

    def read() -> list[Call]:
        found: Any = connection.slowlog_get(-1)
        return [
            Call(entry["duration"] / 1000, entry["command"], entry["client_address"])
            for entry in found
        ]

    yield read
    connection.config_set("slowlog-log-slower-than", -1)


def scripts(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.command.startswith(b"EVAL")]


# Idle workers


def be_workers(url: str, count: int, quiet: Event) -> None:
    """Run workers until this process is killed. Once `quiet`, they only look if they are rung."""
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as workers:
        for _ in range(count):
            workers.enter_context(running_worker(url))
        quiet.wait()
        worker.LOOK_SECONDS = 3600.0
        threading.Event().wait()


def spent(connection: Redis) -> tuple[float, dict[str, tuple[float, int]]]:
    """Seconds of CPU of the server's thread; by command the seconds and the number of calls."""
    cpu: Any = connection.info("cpu")
    stats: Any = connection.info("commandstats")
    by_command = {
        name.removeprefix("cmdstat_"): (each["usec"] / 1e6, each["calls"])
        for name, each in stats.items()
    }
    return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], by_command


def claiming(url: str, connection: Redis) -> tuple[int, float]:
    """The workers that claim because of one submission, and the milliseconds of their claims."""
    claim = LeaseTable(connection, "", QUEUES)._claim._digest.encode()
    with Producer(url) as producer, all_calls(connection) as calls:
        producer.submit(
            model=ALIAS, prompt="x", max_completion_tokens=1, require_known_model=False
        ).result(timeout=60)
        time.sleep(WAKE_SECONDS)
        found = [call for call in calls() if claim in call.command]
    return len({call.client for call in found}), sum(call.milliseconds for call in found)


def ring_milliseconds(listeners: int) -> float:
    """Of the server's CPU, for one message to this many subscribers."""
    with a_server() as (url, connection), contextlib.ExitStack() as clients:
        for _ in range(listeners):
            client = clients.enter_context(Redis.from_url(url))
            pubsub: Any = clients.enter_context(client.pubsub())
            pubsub.subscribe(BELL)
            pubsub.get_message(timeout=10)
        before = spent(connection)[0]
        for _ in range(RINGS):
            connection.publish(BELL, 1)
        connection.ping()
        return 1000 * (spent(connection)[0] - before) / RINGS


def idle(options: argparse.Namespace, console: Console) -> None:
    context = multiprocessing.get_context("spawn")
    with a_server() as (url, connection):
        quiet = context.Event()
        each = options.workers // PROCESSES
        processes = [
            context.Process(target=be_workers, args=(url, each, quiet), daemon=True)
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        while connection.hlen(f"omlx:workers:{ALIAS}") < each * PROCESSES:
            time.sleep(0.2)
        time.sleep(min(options.settle, 20.0))
        before, began = spent(connection), time.monotonic()
        time.sleep(options.seconds)
        after, took = spent(connection), time.monotonic() - began
        quiet.set()
        time.sleep(min(options.settle, worker.LOOK_SECONDS + BEAT_SECONDS))
        looks = [claiming(url, connection) for _ in range(SUBMISSIONS)]
        for process in processes:
            process.kill()
            process.join()
    share = (after[0] - before[0]) / took
    scale = WORKERS / options.workers
    table = Table("idle workers", f"{options.workers}", f"scaled to {WORKERS:,}", "calls a second")
    table.add_row("share of the server's thread", f"{share:.1%}", f"{scale * share:.1%}", "")
    parts = []
    for name, (seconds, count) in after[1].items():
        old_seconds, old_count = before[1].get(name, (0.0, 0))
        parts.append(((seconds - old_seconds) / took, (count - old_count) / took, name))
    for part, rate, name in sorted(parts, reverse=True)[:8]:
        table.add_row(f"  {name}", f"{part:.2%}", f"{scale * part:.2%}", f"{scale * rate:.0f}")
    console.print(table)
    woken = ", ".join(str(clients) for clients, _ in looks)
    console.print(f"workers that claim, of {SUBMISSIONS} submissions: {woken}")
    claims = statistics.median(milliseconds for _, milliseconds in looks)
    ring = ring_milliseconds(WORKERS)
    console.print(
        f"the server's time for one submission: ring {ring:.1f} ms, claims {claims:.1f} ms"
    )


# What expires


def expire_leases(connection: Redis, count: int) -> None:
    """Leases of dead workers, which expire together."""
    score = time.time() + GRACE_SECONDS - 60
    with connection.pipeline(transaction=False) as pipe:
        for n in range(count):
            job, execution = f"job-{n}", f"omlx-{n:032x}"
            fields = {"status": "started", "origin": QUEUES[1], "omlx_execution": execution}
            pipe.hset(f"rq:job:{job}", mapping=fields)
            pipe.zadd(f"rq:wip:{QUEUES[1]}", {f"{job}:{execution}": score})
        pipe.execute()


def expire_entries(connection: Redis, count: int) -> None:
    """Finished jobs that are gone and still in RQ's registry."""
    for start in range(0, count, 10_000):
        entries = {f"job-{n}": 1 + n for n in range(start, start + 10_000)}
        connection.zadd(f"rq:finished:{QUEUES[1]}", entries)


def expiry(options: argparse.Namespace, console: Console) -> None:
    table = Table("expire together", "calls", "longest call", "99th percentile", "all calls")
    for name, plant, count in (
        ("leases", expire_leases, LEASES),
        ("finished jobs", expire_entries, options.rows),
    ):
        with a_server() as (_url, connection):
            plant(connection, count)
            upkeep = Upkeep(LeaseTable(connection, "leader", QUEUES))
            with all_calls(connection) as calls:
                for _ids in upkeep.sweep():
                    pass
                found = sorted(call.milliseconds for call in scripts(calls()))
        percentile = found[int(0.99 * len(found))]
        table.add_row(
            f"{count:,} {name}",
            f"{len(found):,}",
            f"{found[-1]:.1f} ms",
            f"{percentile:.1f} ms",
            f"{sum(found) / 1000:.2f} s",
        )
    console.print(table)


# A finished job


def finish_jobs(url: str, connection: Redis, streamed: bool) -> None:
    leases = LeaseTable(connection, "worker", QUEUES)
    with Producer(url) as producer:
        for _ in range(JOBS):
            producer.submit(model=ALIAS, prompt="hello " * 20, require_known_model=False)
    while jobs := leases.claim(MOST_COMING):
        for n in range(TOKENS_A_STEP, JOB_TOKENS + 1, TOKENS_A_STEP) if streamed else ():
            leases.append([(job, tokens(job.id, n, TOKENS_A_STEP)) for job in jobs])
        leases.commit([(job, done(job.id, JOB_TOKENS if streamed else 0)) for job in jobs])


def memory_of_a_job(settings: dict[str, int], streamed: bool) -> float:
    """Kilobytes of a finished job."""
    with a_server() as (url, connection):
        for name, value in settings.items():
            connection.config_set(name, value)
        before: Any = connection.info("memory")["used_memory"]
        finish_jobs(url, connection, streamed)
        after: Any = connection.info("memory")["used_memory"]
    return float(after - before) / JOBS / 1000


def job(_: argparse.Namespace, console: Console) -> None:
    defaults = {
        "stream-node-max-bytes": 4096,
        "hash-max-listpack-value": 64,
        "hash-max-listpack-entries": 512,
    }
    table = Table("memory of a finished job", "not streamed", "streamed")
    for name, settings in (("as docs/fleet.md sets Redis", {}), ("as Redis comes", defaults)):
        table.add_row(
            name, *(f"{memory_of_a_job(settings, streamed):.1f} KB" for streamed in (False, True))
        )
    console.print(table)


# Makespan


def simulate(lengths: list[int]) -> int:
    """Steps until the last row has ended: a worker claims as it has room, up to `MOST_COMING`.

    Every worker steps once in each unit of time, however many rows it has.
    """
    following = iter(lengths)
    # A worker claims once when it starts, and one row whenever one of its rows ends.
    ends = list(itertools.islice(following, WORKERS * min(SLOTS, MOST_COMING)))
    heapq.heapify(ends)
    for length in following:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def makespan(options: argparse.Namespace, console: Console) -> None:
    rows = f"{options.rows:,} rows, {WORKERS:,} workers"
    table = Table(rows, "mean", "longest", "steps", "of the least")
    generator = random.Random(1)
    for name, draw in (
        ("uniform", lambda: generator.randint(1, 1000)),
        ("lognormal", lambda: min(2048, 1 + int(generator.lognormvariate(5, 1)))),
        ("one in twenty is long", lambda: 2000 if generator.random() < 0.05 else 100),
    ):
        lengths = [draw() for _ in range(options.rows)]
        steps, longest = simulate(lengths), max(lengths)
        least = max(sum(lengths) / (WORKERS * SLOTS), longest)
        mean = f"{statistics.fmean(lengths):.0f}"
        table.add_row(name, mean, f"{longest}", f"{steps:,}", f"{steps / least:.3f}")
    console.print(table)


# Claims


def plant_batches(connection: Redis, rows: int, batches: int) -> None:
    """Open batches, as docs/wire.md writes them."""
    queue, date = QUEUES[2], "2026-01-01T00:00:00.000000Z"
    request = {"model": ALIAS, "prompt": "hello", "max_completion_tokens": 4}
    body = json.dumps([JOB_FUNCTION, None, [], {"request": request}])
    for batch in range(batches):
        run, each = f"{batch:012x}", rows // batches
        fields = {"state": "open", "priority": "bulk", "job_timeout": 3600, "created_at": 1}
        fields |= {"queues": queue, "rows": each, "left": each, "keep_seconds": 604_800}
        connection.hset(f"omlx:batch:{run}", mapping=fields)
        for start in range(1, each + 1, 1000):
            connection.rpush(
                f"omlx:batch:{run}:waiting:{queue}",
                *(f'{n} {n:024x} {date} "{n}"\n{body}' for n in range(start, start + 1000)),
            )
        connection.zadd("omlx:batches", {run: 1})
        connection.zadd(f"omlx:batches:{queue}", {run: 0})


def claims(options: argparse.Namespace, console: Console) -> None:
    table = Table("waiting rows", "batches", "median claim of 16", "longest claim")
    for rows, batches in ((1000, 1), (options.rows, 100)):
        with a_server() as (_url, connection):
            plant_batches(connection, rows, batches)
            # While the server writes its file anew, each page that it changes is copied first.
            while connection.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.1)
            leases = LeaseTable(connection, "worker", QUEUES)
            with all_calls(connection) as calls:
                for _claim in range(CLAIMS):
                    assert len(leases.claim(16) or ()) == 16
                found = sorted(call.milliseconds for call in scripts(calls()))
        median = statistics.median(found)
        table.add_row(f"{rows:,}", f"{batches}", f"{median:.2f} ms", f"{found[-1]:.2f} ms")
    console.print(table)


PARTS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "idle": idle,
    "expiry": expiry,
    "job": job,
    "makespan": makespan,
    "claims": claims,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--workers", type=int, default=400, help="idle workers")
    parser.add_argument("--seconds", type=float, default=30.0, help="to watch idle workers for")
    parser.add_argument("--settle", type=float, default=math.inf, help="seconds before, at most")
    parser.add_argument("--rows", type=int, default=1_000_000, help="a multiple of 100,000")
    options = parser.parse_args()
    for part in options.only:
        PARTS[part](options, Console())


if __name__ == "__main__":
    main()
