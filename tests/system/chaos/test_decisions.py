"""A file of decisions whose workers are killed: each row is decided once, and as undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bulk_runs import batch_line, errors, ids, lines, write_jsonl
from tests.system.chaos.points import KILL
from tests.system.chaos.processes import Nursery
from tests.system.chaos.world import World, world

ROWS = 16
SHARED = "# The name of the next function.\n" * 12
CHOICES = (
    ["read", "read_all", "write"],
    ["Stack", "Queue"],
    ["self", "self, value", "value", "None"],
)
# More than a real model's loading must fit into a lease here.
ORDERS: dict[str, Any] = {"demo": True, "lease_seconds": 3.0, "max_rows": 2}


def write_decisions(path: Path) -> None:
    """Rows with one beginning, and three lists of choices. Some choices begin others."""
    write_jsonl(
        path,
        [
            batch_line(
                f"r{number}",
                f"{SHARED}def number_{number}(",
                max_tokens=None,
                structured_outputs={"choice": CHOICES[number % len(CHOICES)]},
                probabilities=True,
            )
            for number in range(ROWS)
        ],
    )


def decide(place: World, folder: Path, output: str, kills: Sequence[tuple[str, int]] = ()) -> None:
    """Run the file while workers are killed, one after another, and let others finish it."""
    options = ("--window", "6", "--queue-anyway", "--progress", "none")
    place.send_client("run", "rows.jsonl", "-o", output, *options)
    for point, count in kills:
        victim = place.start_worker(at=[(point, count, KILL)], **ORDERS)
        place.wait_for(lambda: not victim.alive, 120, "the victim to fall")  # noqa: B023
        assert victim.code == -signal.SIGKILL, place.story()
        place.check_at_rest()
    place.settle(200, **ORDERS)
    place.check()
    assert errors(folder / output) == []
    assert sorted(ids(folder / output)) == sorted(f"r{number}" for number in range(ROWS))


def decisions(path: Path) -> dict[str, tuple[str, Mapping[str, float]]]:
    """The text of each row, and the probabilities of its choices."""
    choices = {line["custom_id"]: line["response"]["body"]["choices"][0] for line in lines(path)}
    return {row: (choice["text"], choice["probabilities"]) for row, choice in choices.items()}


@pytest.mark.parametrize(
    "kills",
    [
        (("before-commit", 1), ("commit-sent", 2)),
        (("after-commit", 1), ("before-commit", 2), ("commit-sent", 1)),
    ],
)
def test_killed_decisions_are_made_once_and_are_those_of_an_undisturbed_run(
    kills: Sequence[tuple[str, int]], nursery: Nursery, tmp_path: Path
) -> None:
    write_decisions(tmp_path / "rows.jsonl")
    with world(nursery, tmp_path) as place:
        decide(place, tmp_path, "whole.jsonl")
        decide(place, tmp_path, "out.jsonl", kills)
    whole, found = decisions(tmp_path / "whole.jsonl"), decisions(tmp_path / "out.jsonl")
    assert {row: text for row, (text, _) in found.items()} == {
        row: text for row, (text, _) in whole.items()
    }
    for row, (_, shares) in found.items():
        assert shares == pytest.approx(whole[row][1], rel=1e-4)
        assert sum(shares.values()) == pytest.approx(1)
