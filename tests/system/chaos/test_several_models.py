"""Workers of several models that fall over while they turn from one to another."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from omlx_producer.wire import PRIORITIES
from tests.system.chaos.invariants import MODELS, are_over, status_of
from tests.system.chaos.points import KILL, SWITCHING
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import submit
from tests.system.chaos.world import World, world


def fill(place: World, *, seed: int = 1, models: Sequence[str] = MODELS, tokens: int = 80) -> None:
    """Jobs of these models and all priorities."""
    random = Random(seed)
    place.jobs += [
        submit(
            place.connection,
            f"prompt {number}",
            model=random.choice(models),
            priority=random.choice(PRIORITIES),
            max_completion_tokens=random.randint(1, tokens),
            n=random.choice((1, 1, 2)),
        )
        for number in range(30)
    ]


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *(("starts", 2), ("started", 1), ("started", 2)),
        *(("gives-way", 1), ("gives-way", 3), ("ended", 1)),
    ],
)
def test_a_worker_killed_while_it_turns(
    point: str, count: int, nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        clients = len(place.connection.client_list())
        victim = place.start_worker(
            at=[(point, count, KILL)], models=MODELS, max_rows=2, step_seconds=0.01
        )
        place.wait_for_fall(victim)
        assert victim.code == -signal.SIGKILL, place.story()
        # The process of a model ends with its worker.
        place.wait_for(lambda: len(place.connection.client_list()) <= clients)
        place.check_at_rest()
        place.settle(models=MODELS)
        place.check()


@pytest.mark.parametrize(
    ("number", "point", "count"),
    [
        *((1, "load", 1), (2, "load", 1), (1, "after-claim", 3)),
        *((2, "before-commit", 2), (1, "after-commit", 1)),
    ],
)
def test_a_process_of_a_model_that_is_killed_ends_its_turn_alone(
    number: int, point: str, count: int, nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        orders = {"models": MODELS, "max_rows": 2, "step_seconds": 0.01}
        worker = place.start_worker(at_of_process=[(number, point, count, KILL)], **orders)
        place.settle()
        assert worker.code == 0, place.story()
        assert "was killed by signal 9" in place.story()
        place.check()


@pytest.mark.parametrize("seed", range(4))
def test_two_workers_of_the_same_models(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        fill(place, seed=seed)
        random = Random(seed)
        point = (random.choice(SWITCHING), random.randint(1, 3), KILL)
        place.start_worker(at=[point], models=MODELS, max_rows=2, step_seconds=0.01)
        place.start_worker(models=MODELS[::-1], max_rows=2, step_seconds=0.01)
        fill(place, seed=seed + 100)
        place.settle(models=MODELS)
        place.check()


def test_jobs_of_a_model_whose_folder_disappears_wait_for_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for model in MODELS:
        (folder / model).touch()
    orders = {"models": MODELS, "folder": str(folder)}
    with world(nursery, tmp_path) as place:
        (folder / "second").unlink()
        fill(place, models=("fake", "third"))
        others = list(place.jobs)
        fill(place, models=("second",))
        place.start_worker(max_rows=2, step_seconds=0.01, **orders)
        place.wait_for(lambda: are_over(place.connection, others), seconds=40)
        late = place.jobs[len(others) :]
        assert {status_of(place.connection, job.id) for job in late} == {"queued"}
        (folder / "second").touch()
        place.settle(**orders)
        place.check()
