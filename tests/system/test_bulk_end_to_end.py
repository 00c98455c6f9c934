"""A file of function signatures through two workers with the demo model, read by OpenAI's types."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.job import CHECKPOINT_SECONDS
from tests.helpers.bulk_runs import errors, jobs_in_redis, lines, submit
from tests.helpers.demo_worker import worker
from tests.helpers.workers import wait_for

ROWS, TOKENS, PLACES = 20, 8, 8


def signatures() -> Iterator[str]:
    """Functions and classes of the source that the demo model was not trained on."""
    for line in (resolve(DEMO) / "heldout.jsonl").read_text().splitlines():
        code = json.loads(line)["prompt"].splitlines(keepends=True)
        for number, text in enumerate(code):
            if text.lstrip().startswith(("def ", "class ")):
                yield "".join(code[max(0, number - 8) : number + 1])


def write_requests(path: Path, count: int) -> None:
    prompts = [prompt for _, prompt in zip(range(count), signatures(), strict=False)]
    assert len(prompts) == count
    with path.open("w") as stream:
        for number, prompt in enumerate(prompts):
            chat = number % 10 == 0
            prompted: dict[str, Any] = (
                {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            )
            body = {"model": "demo", "max_completion_tokens": TOKENS, "seed": number, **prompted}
            url = "/v1/chat/completions" if chat else "/v1/completions"
            line = {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body}
            stream.write(json.dumps(line) + "\n")


def test_rows_through_two_workers_are_all_there_and_openais_types_parse_them(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    write_requests(tmp_path / "rows.jsonl", ROWS)
    listener: Any = connection.pubsub(ignore_subscribe_messages=True)
    listener.psubscribe("omlx:tokens:*")
    listener.get_message(timeout=5)  # that it is subscribed
    with contextlib.ExitStack() as workers:
        for _ in range(2):
            workers.enter_context(
                worker(redis_url, "--max-batch", str(PLACES), "--mode", "mtp", "--mtp-depth", "1")
            )
        wait_for(lambda: connection.scard("rq:workers") == 2, 120, "two workers")
        began = time.monotonic()
        code, _, err = submit(
            *(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl", "--ordered"),
            seconds=200,
        )
        seconds = time.monotonic() - began
    assert code == 0, err
    results = lines(tmp_path / "out.jsonl")
    assert errors(tmp_path / "out.jsonl") == []
    assert [line["custom_id"] for line in results] == [f"row-{n}" for n in range(ROWS)]
    for number, line in enumerate(results):
        assert line["response"]["status_code"] == 200
        body = line["response"]["body"]
        if number % 10 == 0:
            chat = openai.types.chat.ChatCompletion.model_validate(body)
            assert chat.choices[0].message.role == "assistant"
        else:
            completion = openai.types.Completion.model_validate(body)
            assert completion.usage is not None
            assert 0 < completion.usage.completion_tokens <= TOKENS
    heard = [message["data"] for message in iter(lambda: listener.get_message(timeout=0.2), None)]
    listener.close()
    checkpoints = [data for data in heard if b'"type":"done"' not in data]
    assert len(heard) - len(checkpoints) == ROWS
    assert all(b'"type":"tokens"' in data for data in checkpoints)
    assert len(checkpoints) <= 2 * PLACES * (1 + seconds / CHECKPOINT_SECONDS)
    assert jobs_in_redis(connection) == 0
