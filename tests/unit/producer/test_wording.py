"""Messages name one thing in the singular."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import pytest

from omlx_producer.bulk.run import Ended
from omlx_producer.commands.file_run import conclude
from omlx_producer.terminal import counted


@pytest.mark.parametrize(("count", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_is_singular(count: int, said: str) -> None:
    assert counted(count, "row") == said


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({"failed": 1}, "1 row failed; try again with: omlx-submit retry out.jsonl\n"),
        (
            {"failed": 1, "lost": 1, "unparsable": 1},
            "3 rows failed; try 2 of them again with: omlx-submit retry out.jsonl\n",
        ),
        (
            {"invalid_request": 1},
            "1 row failed; another try would fail too; correct the input, and run the same "
            "command\n",
        ),
        (
            {"invalid_request": 1, "model_not_found": 2},
            "3 rows failed; no worker has announced the model for 2 of them; start one, then try "
            "again with: omlx-submit retry out.jsonl\n",
        ),
    ],
)
def test_a_run_with_failures_says_how_many_and_what_helps(
    failures: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit):
        conclude(Ended(True, Counter(failures)), Path("out.jsonl"), "rows.jsonl")
    assert capsys.readouterr().err == said


def test_failures_of_an_input_on_stdin_are_tried_again_from_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(click.exceptions.Exit):
        conclude(Ended(True, Counter(failed=1)), Path("out.jsonl"), "-")
    assert capsys.readouterr().err == (
        "1 row failed; save the input in FILE, and try again with: omlx-submit retry out.jsonl "
        "--input FILE\n"
    )
