"""Workers of several models that fall over while they turn from one to another."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from omlx_producer.wire import PRIORITIES
from tests.system.chaos.invariants import MODELS, are_over, status_of
from tests.system.chaos.points import KILL
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import Accepted, submit
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


def submit_to_second(place: World) -> list[Accepted]:
    """Jobs of a model whose folder may be gone when their turn comes."""
    jobs = [submit(place.connection, f"hello {number}", model="second") for number in range(20)]
    for job in jobs:
        job.endings = {"finished", "failed"}
    place.jobs += jobs
    return jobs


@pytest.mark.parametrize(
    ("point", "count"),
    [
        *(("load", 1), ("load", 2), ("load", 3), ("gives-way", 1), ("gives-way", 4)),
        *(("closed", 1), ("closed", 2), ("give-back-sent", 1), ("give-back-sent", 2)),
        *(("after-claim", 8), ("before-commit", 9)),
    ],
)
def test_a_worker_killed_while_it_turns(
    point: str, count: int, nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        victim = place.start_worker(
            at=[(point, count, KILL)], models=MODELS, max_rows=2, step_seconds=0.01
        )
        place.wait_for_fall(victim)
        assert victim.code == -signal.SIGKILL, place.story()
        place.check_at_rest()
        place.settle(models=MODELS)
        place.check()


@pytest.mark.parametrize("seed", range(4))
def test_two_workers_of_the_same_models(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        fill(place, seed=seed)
        random = Random(seed)
        point = (random.choice(("load", "gives-way", "give-back-sent")), random.randint(1, 3), KILL)
        place.start_worker(at=[point], models=MODELS, max_rows=2, step_seconds=0.01)
        place.start_worker(models=MODELS[::-1], max_rows=2, step_seconds=0.01)
        fill(place, seed=seed + 100)
        place.settle(models=MODELS)
        place.check()


def test_a_model_whose_folder_disappears_fails_its_jobs_alone(
    nursery: Nursery, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for model in MODELS:
        (folder / model).touch()
    orders = {"models": MODELS, "folder": str(folder)}
    with world(nursery, tmp_path) as place:
        fill(place, models=("fake", "third"))
        early = submit_to_second(place)
        place.start_worker(max_rows=2, step_seconds=0.01, **orders)
        place.wait_for(lambda: are_over(place.connection, early[:1]))
        (folder / "second").unlink()
        late = submit_to_second(place)
        place.wait_for(lambda: are_over(place.connection, place.jobs), seconds=40)
        assert status_of(place.connection, early[0].id) == "finished"
        assert status_of(place.connection, late[-1].id) == "failed"
        (folder / "second").touch()
        fill(place, seed=2)
        place.settle(**orders)
        place.check()
