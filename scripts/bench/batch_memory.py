"""How much memory does a batch take in Redis: waiting, with its answers, and once they are fetched?

    python -m scripts.bench.batch_memory                    100,000 rows
    python -m scripts.bench.batch_memory --rows 1000000     ten times as many

The batch, the Lua that claims and ends its rows, and ``omlx-submit results`` are the real ones. A
stub takes the engine's place: it answers with English prose of 500 tokens, another piece for each
row. Memory is the server's `used_memory` beyond that before the batch, after a first small one.
Answers are measured without the event streams of their jobs, which expire a minute after the end:
the stub ends far more rows in that minute than a model does. The aims are those for a million rows;
fewer rows are scaled. The script fails if an aim is missed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from redis import Redis
from rich.console import Console
from rich.table import Table

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import TOKEN_CHARACTERS, Row
from omlx_producer.wire import End, EndEvent, GenerationRequest, Usage, events_key, queue_name
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.lease import LeaseTable

ALIAS, MILLION = "stub", 1_000_000
CLAIM = 256
PROMPT_TOKENS, ANSWER_TOKENS = 50, 500
# Megabytes for a million rows.
AIMS = {"waiting": 1300, "answered": 1300, "fetched": 50}
# A text about Python that is part of Python.
PROSE = "\n".join(topics.values())


def prose(seed: str, tokens: int) -> str:
    """A piece of `PROSE`, the same for the same seed."""
    length = tokens * TOKEN_CHARACTERS
    start = random.Random(seed).randrange(len(PROSE) - length)
    return PROSE[start : start + length]


def rows(count: int) -> Iterator[Row]:
    for number in range(1, count + 1):
        prompt = prose(f"prompt {number}", PROMPT_TOKENS)
        request = GenerationRequest(model=ALIAS, prompt=prompt, max_completion_tokens=ANSWER_TOKENS)
        yield Row(f"request-{number}", number, request, f"{number:024x}")


def ending(job: Claim) -> Ending:
    usage = Usage(
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=ANSWER_TOKENS,
        total_tokens=PROMPT_TOKENS + ANSWER_TOKENS,
    )
    text = prose(job.id, ANSWER_TOKENS)
    body = {
        "id": f"cmpl-{job.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": ALIAS,
        "choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}],
        "usage": usage.model_dump(),
    }
    event = EndEvent.of(job.id, ANSWER_TOKENS, End(), finish_reasons=["length"], usage=usage)
    return Ending(event, result=body)


def answer_all(connection: Redis) -> None:
    """Be the worker until no row waits."""
    leases = LeaseTable(connection, "stub-worker", [queue_name(ALIAS, "bulk")])
    while jobs := leases.claim(CLAIM):
        verdicts = leases.commit([(job, ending(job)) for job in jobs])
        assert all(verdict is Commit.DONE for verdict in verdicts)


def expire_streams(connection: Redis) -> None:
    """Let the event streams of ended rows expire, as they would soon."""
    for key in connection.scan_iter(events_key("*"), count=10_000):
        assert connection.ttl(key) > 0
        connection.delete(key)


def fetch(url: str, batch: Batch, folder: Path, count: int) -> None:
    """Write all results to a file with the command."""
    code = "from omlx_producer.cli.main import main; main()"
    output = folder / f"{batch.id}.jsonl"
    arguments = ["results", batch.id, "-o", str(output), "--redis-url", url]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    with output.open("rb") as written:
        assert sum(1 for _ in written) == count


def measure(connection: Redis, url: str, folder: Path, count: int) -> dict[str, int]:
    """Bytes of the batch in Redis, by the name of an aim."""
    found = {}

    def used() -> int:
        return int(connection.info("memory")["used_memory"])

    empty = used()
    batch = Batch.create(connection)
    batch.upload(rows(count))
    found["waiting"] = used() - empty
    answer_all(connection)
    assert batch.read().ok == count
    expire_streams(connection)
    found["answered"] = used() - empty
    fetch(url, batch, folder, count)
    found["fetched"] = used() - empty
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory(prefix="omlx-batch-") as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis") as server, Redis.from_url(server.url) as connection:
            measure(connection, server.url, folder, CLAIM)
            found = measure(connection, server.url, folder, count)
    table = Table("rows are", "bytes/row", "MB for a million", "aim", title=f"{count:,} rows")
    scaled = {name: held * MILLION / count / 1e6 for name, held in found.items()}
    for name, held in found.items():
        table.add_row(name, f"{held / count:.0f}", f"{scaled[name]:.0f}", f"{AIMS[name]}")
    Console().print(table)
    if missed := [name for name, megabytes in scaled.items() if megabytes > AIMS[name]]:
        sys.exit(f"over the aim: {', '.join(missed)}")


if __name__ == "__main__":
    main()
