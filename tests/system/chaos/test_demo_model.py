"""The same with a real model: interrupted texts are those of a run that nobody disturbed.

Lookups, the model's own drafts, shared beginnings and a schema are at work at once. More random
schedules: ``--chaos-model-schedules 20``.
"""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from omlx_producer import Producer
from omlx_producer.wire import events_key
from tests.helpers.workers import ALIAS, fetch
from tests.system.chaos.invariants import are_over
from tests.system.chaos.points import KILL
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import Accepted
from tests.system.chaos.world import World, world

FALLS = ("after-claim", "append-sent", "between-appends", "before-commit", "commit-sent")
"""Where workers of random schedules are killed."""

SHARED = "# Each of these functions is tested.\n" + "".join(
    f"def number_{n}():\n    return {n}\n\n\n" for n in range(12)
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "sizes": {"type": "array"}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt": "# As JSON:\n",
        "seed": 14,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    {"prompt": SHARED + "def fibonacci(n):", "temperature": 0.0},
    {"prompt": SHARED + "class Stack:", "temperature": 0.8, "seed": 13},
    {"prompt": SHARED + "class Queue:", "temperature": 0.0, "cache": False},
    {"prompt": "def fibonacci(n):", "temperature": 0.0},
    {"prompt": "import os\n", "temperature": 0.0, "repetition_penalty": 1.3},
    {"prompt": "class Stack:", "temperature": 0.8, "seed": 11},
    {"prompt": "for line in", "temperature": 1.0, "seed": 12, "top_p": 0.9},
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first: int = metafunc.config.getoption("--chaos-seed")
        count: int = metafunc.config.getoption("--chaos-model-schedules")
        metafunc.parametrize("seed", range(first, first + count), ids="seed-{}".format)


def submit_all(place: World, texts: list[str]) -> list[Accepted]:
    handles = Producer(place.connection).submit_many(
        [{"model": ALIAS, "max_completion_tokens": 30, "ignore_eos": True, **r} for r in REQUESTS],
        require_known_model=False,
    )
    return [
        Accepted(handle.id, [text], streams=True)
        for handle, text in zip(handles, texts, strict=True)
    ]


def run_undisturbed(place: World) -> None:
    place.jobs = submit_all(place, [""] * len(REQUESTS))
    place.settle(200, demo=True)
    for job in place.jobs:
        body = fetch(place.connection, job.id).return_value()
        job.texts = [body["choices"][0]["text"]]


def test_texts_survive_two_kills_and_a_drain(nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        run_undisturbed(place)
        # More than a real model's loading must fit into a lease here.
        orders: dict[str, Any] = {"demo": True, "lease_seconds": 3.0}
        jobs = submit_all(place, [job.texts[0] for job in place.jobs])
        place.jobs += jobs
        for count in (3, 3):
            victim = place.start_worker(at=[("between-appends", count, KILL)], **orders)
            place.wait_for(lambda: not victim.alive, 120, "the victim to fall")  # noqa: B023
            assert victim.code == -signal.SIGKILL, place.story()
            place.check_at_rest()
        began = [place.connection.xlen(events_key(job.id)) for job in jobs]
        assert max(began) > 1
        drained = place.start_worker(**orders)
        place.wait_for(
            lambda: place.connection.xlen(events_key(jobs[0].id)) > began[0] + 2, 120, "progress"
        )
        drained.send(signal.SIGTERM)
        place.wait_for(lambda: not drained.alive, 30, "the drain")
        place.settle(200, **orders)
        place.check()


def test_texts_survive_falls_wherever_they_come(
    seed: int, nursery: Nursery, tmp_path: Path
) -> None:
    random = Random(seed)
    orders: dict[str, Any] = {"demo": True, "lease_seconds": 3.0}
    orders["max_rows"] = random.choice([2, 4, 8])
    with world(nursery, tmp_path) as place:
        place.note(f"seed {seed}")
        run_undisturbed(place)
        jobs = submit_all(place, [job.texts[0] for job in place.jobs])
        place.jobs += jobs
        for _ in range(random.randint(2, 3)):
            at = [(random.choice(FALLS), random.randint(1, 8), KILL)]
            victim = place.start_worker(at=at, **orders)
            place.wait_for(
                lambda: not victim.alive or are_over(place.connection, jobs),  # noqa: B023
                120,
                "the victim to fall",
            )
            if victim.alive:
                break
            assert victim.code == -signal.SIGKILL, place.story()
            place.check_at_rest()
        place.settle(200, **orders)
        place.check()
