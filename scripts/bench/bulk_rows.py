"""How many real rows a second pass through omlx-submit run, and is every result complete?

    python -m scripts.bench.bulk_rows                    2,000 rows, two workers on one Redis
    python -m scripts.bench.bulk_rows --rows 200 --workers 1

The prompts are function signatures from packages that the demo model was not trained on; every
fourth row is a chat. OpenAI's own types parse every result, and the script counts the messages that
were published: a bulk row publishes its end only.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from redis import Redis

from omlx_producer.producer import Producer
from omlx_worker.engine.loading.checkpoint import DEMO
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.processes import wait_until_served, worker

HELD_OUT = ("click", "fakeredis", "openai", "hypothesis")
ALIAS = "demo"
CHAT_EVERY = 4


def signatures() -> Iterator[str]:
    """``def`` lines, their parameters and colon, of functions in `HELD_OUT`."""
    for package in HELD_OUT:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            sys.exit(f"the prompts are taken from {package}, which is not installed: pip install")
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            source = path.read_text()
            lines = source.splitlines(keepends=True)
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield "".join(lines[node.lineno - 1 : node.body[0].lineno - 1]).lstrip()


def requests(rows: int, tokens: int) -> list[dict[str, Any]]:
    prompts = list(itertools.islice((text for text in signatures() if text), rows))
    if len(prompts) < rows:
        sys.exit(f"--rows {rows}: there are {len(prompts)} signatures")
    lines = []
    for number, prompt in enumerate(prompts):
        chat = number % CHAT_EVERY == 0
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        lines.append(
            {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/v1/chat/completions" if chat else "/v1/completions",
                "body": {"model": ALIAS, "max_completion_tokens": tokens, "seed": number, **asked},
            }
        )
    return lines


class Listener:
    """Counts what is published about tokens, by kind of event, until it is closed."""

    def __init__(self, url: str) -> None:
        self.heard: Counter[str] = Counter()
        self._pubsub: Any = Redis.from_url(url).pubsub(ignore_subscribe_messages=True)
        self._pubsub.psubscribe("omlx:tokens:*")
        self._open = True
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while self._open:
            while message := self._pubsub.get_message(timeout=0.5):
                self.heard[json.loads(message["data"])["type"]] += 1

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._pubsub.close()


def check(path: Path, asked: list[dict[str, Any]]) -> int:
    """Hold the results against the requests; returns the tokens generated."""
    results = {line["custom_id"]: line for line in map(json.loads, path.open())}
    if len(results) != len(asked):
        sys.exit(f"{len(asked)} rows, but {len(results)} results")
    tokens = 0
    for request in asked:
        body = results[request["custom_id"]]["response"]["body"]
        kind = ChatCompletion if "messages" in request["body"] else Completion
        parsed = kind.model_validate(body)
        assert parsed.usage is not None
        tokens += parsed.usage.completion_tokens
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32, help="a row, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--mode", default="auto")
    args = parser.parse_args()
    asked = requests(args.rows, args.tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(EmbeddedRedis(folder / "redis")).url
        options = {"model": DEMO, "mode": args.mode, "max-batch": args.max_batch}
        threads = max(1, (os.cpu_count() or 1) // args.workers)
        processes = []
        for number in range(args.workers):
            state = str(folder / f"state-{number}")
            env = {"OPENBLAS_NUM_THREADS": str(threads), "OMLX_QUEUE_STATE_DIR": state}
            processes.append(stack.enter_context(worker(url, ALIAS, options, env)))
        producer = stack.enter_context(Producer(url))
        wait_until_served(producer, [ALIAS], processes)
        (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        listener = Listener(url)
        began = time.perf_counter()
        command = [sys.executable, "-c", "from omlx_producer.cli.main import main; main()", "run"]
        command += [str(folder / "rows.jsonl"), "-o", str(folder / "results.jsonl")]
        client = subprocess.run([*command, "--redis-url", url])
        seconds = time.perf_counter() - began
        listener.close()
        if client.returncode:
            sys.exit(f"omlx-submit ended with {client.returncode}")
        tokens = check(folder / "results.jsonl", asked)
    print(
        f"{args.rows} rows through {args.workers} workers in {seconds:.0f} s: "
        f"{args.rows / seconds:.1f} rows/s, {tokens / seconds:.0f} tokens/s generated; "
        f"published: {dict(listener.heard)}"
    )
    if set(listener.heard) != {"done"}:
        sys.exit("a bulk row published more than its end")


if __name__ == "__main__":
    main()
