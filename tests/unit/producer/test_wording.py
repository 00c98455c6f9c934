"""Messages name one thing in the singular."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from omlx_producer.bulk.run import Ended
from omlx_producer.cli.bulk import conclude
from omlx_producer.wording import counted


@pytest.mark.parametrize(("count", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_is_singular(count: int, said: str) -> None:
    assert counted(count, "row") == said


@pytest.mark.parametrize(
    ("failed", "repeatable", "said"),
    [
        (1, 1, "1 row failed; try again: omlx-submit retry out.jsonl\n"),
        (3, 2, "3 rows failed; try 2 of them again: omlx-submit retry out.jsonl\n"),
        (
            1,
            0,
            "1 row failed; another try would fail too; correct the input, and run the same "
            "command\n",
        ),
    ],
)
def test_a_run_with_failures_says_how_many_and_what_helps(
    failed: int, repeatable: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit):
        conclude(Ended(True, failed, repeatable), Path("out.jsonl"))
    assert capsys.readouterr().err == said
