"""The keyword arguments of `omlx_producer.Producer.run`, as the options of a run."""

from __future__ import annotations

import os
from typing import Any

from omlx_producer.bulk.given import Given
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.records import Format
from omlx_producer.bulk.shape import Empty
from omlx_producer.client.fields import RequestFields
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import Priority

# Options that the command has under another name, or alone.
_OF_THE_COMMAND = {
    "detach": "call Producer.batch",
    "dry_run": "call omlx-submit run --dry-run",
    "output": "give out",
    "queue_anyway": "give require_known_model=False",
}


class BulkArguments(RequestFields, total=False):
    """The options of `Producer.run` and `Producer.batch`; see docs/bulk.md.

    `RunOptions` says what they mean. The fields of a request are for rows that do not set them;
    ``model`` is for all rows.

    >>> arguments: BulkArguments = {"template": "# {title}", "max_completion_tokens": 8}
    >>> len(list(producer.run([{"title": "Rust"}, {"title": "Iron"}], **arguments)))
    2
    """

    template: str | None
    image: str | None
    id_field: str | None
    raw: bool
    system: str | None
    embed: bool
    empty: Empty | None
    format: Format | None
    delimiter: str | None
    limit: int | None
    priority: Priority
    window: int
    job_timeout: int
    require_known_model: bool
    with_body: bool
    keep: bool
    csv_safe: bool
    each: str | None


def read_arguments(
    rows: Any, arguments: BulkArguments, *, files: bool
) -> tuple[RunOptions, Given | None]:
    """The options of a run, and its rows if they are in memory.

    Args:
        files: whether it has an output.

    Raises:
        InvalidRequest: if an option is none, or has a wrong value.
    """
    for name in arguments.keys() & _OF_THE_COMMAND.keys():
        raise InvalidRequest(name, "is of the command", _OF_THE_COMMAND[name])
    if not files and arguments.get("each") is not None:
        raise InvalidRequest("each", "goes with an output", "give out, or leave it out")
    asked = {name: value for name, value in arguments.items() if value is not None}
    if "max_tokens" in asked and "max_completion_tokens" not in asked:
        asked["max_completion_tokens"] = asked.pop("max_tokens")
    if isinstance(rows, str | os.PathLike):
        return RunOptions.of(os.fspath(rows), asked), None
    given = Given.of(rows)
    return RunOptions.of("-", asked | {"format": given.kind}), given
