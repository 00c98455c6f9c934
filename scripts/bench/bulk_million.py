"""How much memory do the client and Redis take for a million rows through omlx-submit run?

    python -m scripts.bench.bulk_million                  about 20 minutes on two idle CPU cores
    python -m scripts.bench.bulk_million --rows 20000     a quick look
    python -m scripts.bench.bulk_million --rows 50000 --shared 8000    prompts of 2,000 tokens

The client, the server, and the Lua that claims and ends jobs are the real ones. A stub takes the
engine's place: it ends claimed jobs at once with the same short text. Memory is the client's
resident set, from `ps`, and the server's `used_memory`; the run fails when either exceeds its
bound. The script then resumes the run, which finds all rows done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from omlx_producer.wire import MODELS_KEY, PRIORITIES, End, EndEvent, ModelInfo, Usage, queue_name
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.queue.ending import Ending
from omlx_worker.queue.lease import LeaseTable

# 300 bytes for each of a million rows, and the client itself.
CLIENT_MEBIBYTES, REDIS_MEBIBYTES = 400, 32
ALIAS = "stub"
CLAIM = 256
SAMPLE_SECONDS = 0.5


@dataclass
class Peaks:
    """The most memory seen, in bytes, and rows in Redis."""

    client: int = 0
    redis: int = 0
    jobs: int = 0


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--window", type=int, default=1024)
    options.add_argument("--shared", type=int, default=0, help="characters that prompts share")
    options.add_argument("--stub-worker", metavar="URL", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.stub_worker:
        serve(chosen.stub_worker)
        return
    with tempfile.TemporaryDirectory(prefix="omlx-bulk-") as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", chosen.rows, "# " * (chosen.shared // 2))
        with EmbeddedRedis(folder / "redis") as server:
            measure(folder, server.url, chosen.rows, chosen.window)


def measure(folder: Path, url: str, rows: int, window: int) -> None:
    """Run all rows, then run them again, and say what it took."""
    info = ModelInfo(model=ALIAS, context_length=4096, longest_token=16)
    with Redis.from_url(url) as connection:
        connection.hset(MODELS_KEY, ALIAS, info.model_dump_json())
        stub = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.bulk_million", "--stub-worker", url]
        )
        try:
            within = True
            for what in ("run", "resume"):
                started = time.monotonic()
                peaks = run_client(folder, url, window, connection)
                seconds = time.monotonic() - started
                written = sum(1 for _ in (folder / "results.jsonl").open("rb"))
                print(
                    f"{what}: {written} results of {rows} rows in {seconds:.1f} s "
                    f"({rows / seconds:.0f} rows/s); at most {peaks.jobs} jobs in Redis; "
                    f"client {peaks.client / 2**20:.0f} MiB (bound {CLIENT_MEBIBYTES}), "
                    f"Redis {peaks.redis / 2**20:.0f} MiB (bound {REDIS_MEBIBYTES})",
                    flush=True,
                )
                within &= written == rows and peaks.jobs <= window
                within &= peaks.client <= CLIENT_MEBIBYTES * 2**20
                within &= peaks.redis <= REDIS_MEBIBYTES * 2**20
        finally:
            stub.kill()
            stub.wait()
    if not within:
        sys.exit("out of bounds")


def run_client(folder: Path, url: str, window: int, connection: Redis) -> Peaks:
    """omlx-submit run as a process, watched to its end."""
    code = "from omlx_producer.cli.main import main; main()"
    arguments = ["run", "rows.jsonl", "-o", "results.jsonl", "--window", str(window)]
    client = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--redis-url", url],
        cwd=folder,
    )
    peaks = Peaks()
    while client.poll() is None:
        peaks.client = max(peaks.client, resident_bytes(client.pid))
        memory = connection.info("memory")["used_memory"]
        peaks.redis = max(peaks.redis, memory)
        peaks.jobs = max(peaks.jobs, connection.eval("return #redis.call('KEYS', 'rq:job:*')", 0))
        time.sleep(SAMPLE_SECONDS)
    if client.returncode:
        sys.exit(f"omlx-submit ended with {client.returncode}")
    return peaks


def resident_bytes(pid: int) -> int:
    """The resident set of a process; 0 when it has just ended."""
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return 1024 * int(found.stdout.strip() or 0)


def write_rows(path: Path, rows: int, beginning: str) -> None:
    with path.open("w") as stream:
        for row in range(rows):
            prompt = f"{beginning}def function_{row}(x):\n"
            body = {"model": ALIAS, "prompt": prompt, "max_tokens": 16}
            line = {"custom_id": f"request-{row}", "method": "POST"}
            stream.write(json.dumps({**line, "url": "/v1/completions", "body": body}) + "\n")


def ended(job: Claim) -> Ending:
    """The same short text for every job."""
    usage = Usage(prompt_tokens=8, completion_tokens=12, total_tokens=20)
    text = "    return x\n" * 4
    body = {
        "id": f"cmpl-{job.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": ALIAS,
        "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
        "usage": usage.model_dump(),
    }
    event = EndEvent.of(job.id, 12, End(), finish_reasons=["stop"], usage=usage)
    return Ending(event, result=body)


def serve(url: str) -> None:
    """Claim jobs and end them at once, as a worker's scripts do."""
    connection = Redis.from_url(url)
    queues = [queue_name(ALIAS, priority) for priority in PRIORITIES]
    leases = LeaseTable(connection, "stub-worker", queues)
    while True:
        jobs = leases.claim(CLAIM) or []
        leases.commit([(job, ended(job)) for job in jobs])
        if not jobs:
            time.sleep(0.005)


if __name__ == "__main__":
    main()
