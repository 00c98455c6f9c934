"""What does the HTTP door cost, and does it hold many streams?

    python -m scripts.bench.gateway                    60 first tokens, 512 streams at once
    python -m scripts.bench.gateway --streams 128

A worker without a model serves, in a process of its own, and so does the gateway. First tokens are
of one job at a time, over HTTP and by `AsyncProducer` in turns. The streams run together, 40 tokens
each, timed from the moment at which all are asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from rich.console import Console
from rich.table import Table

from omlx_producer import AsyncProducer, Producer
from omlx_worker.processes import wait_until
from omlx_worker.queue.embedded import EmbeddedRedis, free_port
from tests.helpers.gateway import gateway_process
from tests.helpers.workers import ALIAS, worker_process

TOKENS = 40
BODY = {"model": ALIAS, "prompt": "def f(x):", "max_tokens": TOKENS, "stream": True}
BODY |= {"ignore_eos": True}


async def read(client: httpx2.AsyncClient, url: str, seed: int) -> tuple[float, float, int]:
    """Seconds until the first and the last token of a stream, and its characters."""
    began, first, characters = time.perf_counter(), 0.0, 0
    body = {**BODY, "seed": seed}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                choices = json.loads(line[6:])["choices"]
                characters += sum(len(choice["text"]) for choice in choices)
    return first, time.perf_counter() - began, characters


async def first_by_api(producer: AsyncProducer, seed: int) -> float:
    began = time.perf_counter()
    body = {name: value for name, value in BODY.items() if name != "stream"}
    job = await producer.submit({**body, "seed": seed}, priority="high")
    events = job.stream()
    await anext(events)
    spent = time.perf_counter() - began
    async for _ in events:
        pass
    return spent


async def measure(redis_url: str, gateway: str, firsts: int, streams: int) -> list[list[float]]:
    limits = httpx2.Limits(max_connections=None)
    async with (
        AsyncProducer(redis_url) as producer,
        httpx2.AsyncClient(limits=limits, timeout=120) as client,
    ):
        by_http, by_api = [], []
        for seed in range(firsts):
            by_http.append((await read(client, gateway, seed))[0])
            by_api.append(await first_by_api(producer, seed))
        together = await asyncio.gather(*(read(client, gateway, seed) for seed in range(streams)))
    assert all(characters for _, _, characters in together)
    return [by_http, by_api, [each[0] for each in together], [each[1] for each in together]]


def peak_memory(pid: int) -> int:
    """Bytes that a process has held, at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--firsts", type=int, default=60)
    parser.add_argument("--streams", type=int, default=512)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with (
        TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder)) as server,
        worker_process(server.url, max_rows=64, step_seconds=0.005),
        gateway_process(server.url, port := free_port()) as process,
    ):
        gateway = f"http://127.0.0.1:{port}"
        with Producer(server.url) as producer:
            wait_until(lambda: ALIAS in producer.models())
        found = asyncio.run(measure(server.url, gateway, options.firsts, options.streams))
        memory = peak_memory(process.pid)
    table = Table("seconds", "median", "most")
    names = ("first token over HTTP", "first token by AsyncProducer")
    names += (f"first token of {options.streams} streams", f"last token of {options.streams}")
    for name, seconds in zip(names, found, strict=True):
        table.add_row(name, f"{statistics.median(seconds):.4f}", f"{max(seconds):.3f}")
    Console().print(table)
    Console().print(f"the gateway has held {memory / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    main()
