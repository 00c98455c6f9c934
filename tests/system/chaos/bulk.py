"""What clients of schedules do: a run into a file, a detached batch, jobs one after another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from redis import Redis

from omlx_producer import Producer
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.plan import PREFIX_CHARACTERS
from omlx_producer.bulk.run import detach
from omlx_producer.wire import PRIORITIES, answer_text
from tests.helpers.bulk_runs import batch_line, errors, lines, write_jsonl
from tests.helpers.workers import ALIAS
from tests.system.chaos.clients import SUBMIT_ALL
from tests.system.chaos.workload import Accepted, planned

OUTPUT = "out.jsonl"


class BulkRows:
    """Rows with known texts, in a file. Their prompts have one of two beginnings.

    Args:
        chats: whether some rows are chats.
    """

    def __init__(self, path: Path, random: Random, *, chats: bool = True) -> None:
        self.path = path
        bodies: list[dict[str, Any]] = [
            {"seed": random.randrange(2**31), "max_tokens": random.randint(1, 20)}
            for _ in range(random.randint(4, 14))
        ]
        documents = [
            batch_line(
                f"{path.stem}-{number}",
                f"{random.choice('ab') * PREFIX_CHARACTERS} row {number}",
                **body,
            )
            for number, body in enumerate(bodies)
        ]
        for document in documents[::3] if chats else ():
            body = document["body"]
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
            document["url"] = "/v1/chat/completions"
        write_jsonl(path, documents)
        self.texts = {
            document["custom_id"]: planned("row", "bulk", document["body"])[1]
            for document in documents
        }

    def problems(self, name: str, results: Sequence[dict[str, Any]]) -> list[str]:
        """Exactly one line a row, with the row's text."""
        counts = Counter(line["custom_id"] for line in results)
        found = [
            f"{name}: row {row} has {counts[row]} lines" for row in self.texts if counts[row] != 1
        ]
        for line in results:
            body = (line.get("response") or {}).get("body") or {}
            texts = [answer_text(choice) for choice in body.get("choices", [])]
            if texts != self.texts.get(line["custom_id"]):
                found.append(f"{name}: row {line['custom_id']} has {texts or line}")
        return found


class FileRun(BulkRows):
    """``omlx-submit run``."""

    @property
    def args(self) -> list[str]:
        files = [self.path.name, "-o", OUTPUT]
        return ["run", *files, "--window", "4", "--queue-anyway", "--progress", "none"]

    def check(self, connection: Redis) -> list[str]:
        output = self.path.with_name(OUTPUT)
        return self.problems("run", [*lines(output), *errors(output)])


class DetachedBatch(BulkRows):
    """``omlx-submit run --detach``: nobody is left who waits for it."""

    def __init__(self, path: Path, random: Random, connection: Redis) -> None:
        super().__init__(path, random)
        options = RunOptions.of(str(path), {"require_known_model": False})
        self._id = detach(Producer(connection), options).id

    def check(self, connection: Redis) -> list[str]:
        batch = Batch(connection, self._id)
        state = batch.read()
        found = self.problems("batch", [json.loads(line) for line in batch.results(state)])
        if (state.state, state.ok) != ("done", len(self.texts)):
            found.append(f"batch: is {state.state} with {state.ok} of {len(self.texts)} rows")
        return found


class Submissions:
    """A client that submits jobs one after another, by idempotency keys."""

    def __init__(self, path: Path, random: Random) -> None:
        self.jobs: list[Accepted] = []
        self.args = [SUBMIT_ALL, path.name]
        orders = []
        for number in range(random.randint(2, 6)):
            key, priority = f"order {random.random()}", random.choice(PRIORITIES)
            length = random.randint(1, 40)
            fields = {"model": ALIAS, "prompt": f"o {number}", "max_completion_tokens": length}
            orders.append({"key": key, "priority": priority, "fields": fields})
            self.jobs.append(Accepted(*planned(key, priority, fields)))
        write_jsonl(path, orders)
