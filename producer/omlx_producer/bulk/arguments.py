"""The keyword arguments of `omlx_producer.Producer.run`, as the options of a run."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from pydantic_core import to_jsonable_python

from omlx_producer.bulk.given import Given
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.records import Format
from omlx_producer.bulk.shape import Empty, Shape
from omlx_producer.client.fields import RequestFields
from omlx_producer.wire import Priority


class BulkArguments(RequestFields, total=False):
    """The options of `Producer.run` and `Producer.batch`; see docs/bulk.md.

    The fields of a request are for rows that do not set them; ``model`` is for all rows.

    Attributes:
        template: makes prompts of the fields of rows, as in ``"Summarise: {text}"``.
        id_field: the field with the custom_id; by default ``custom_id``, else ``id``.
        raw: send texts as bare prompts, not as user messages.
        system: a system message before each text.
        empty: ``skip``, ``fail`` or ``run`` rows with nothing for a field of the template.
        format: of a file; by default its name says it.
        delimiter: of the cells of a CSV file; by default its first line says it.
        limit: take the first rows only, this many.
        priority: the queue of the rows, by default ``bulk``.
        window: rows in Redis at once, at most.
        job_timeout: seconds that a row may run.
        require_known_model: False also takes models that no worker has announced.
        with_body: add the whole response to a table or a frame.
        keep: add the columns of a file to a table.
        csv_safe: put ``'`` before cells of a CSV that look like formulas.

    >>> arguments: BulkArguments = {"template": "# {title}", "max_completion_tokens": 8}
    >>> len(list(producer.run([{"title": "Rust"}, {"title": "Iron"}], **arguments)))
    2
    """

    template: str | None
    id_field: str | None
    raw: bool
    system: str | None
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


_SHAPE = {each.name for each in fields(Shape)}
_RUN = {each.name for each in fields(RunOptions)}


def read_arguments(rows: Any, arguments: BulkArguments) -> tuple[RunOptions, Given | None]:
    """The options of a run, and its rows if they are in memory."""
    asked: dict[str, Any] = dict(arguments)
    kind = asked.pop("format", None)
    shape = {name: asked.pop(name) for name in _SHAPE & asked.keys()}
    own = {name: asked.pop(name) for name in _RUN & asked.keys()}
    if "max_tokens" in asked:
        asked["max_completion_tokens"] = asked.pop("max_tokens")
    # In JSON's types: the run file keeps them.
    sampling = to_jsonable_python(
        {name: value for name, value in asked.items() if value is not None}
    )
    shaped = Shape(**shape, sampling=sampling)
    if isinstance(rows, str | os.PathLike):
        return RunOptions.of(os.fspath(rows), kind, shaped, **own), None
    given = Given.of(rows)
    return RunOptions.of("-", given.kind, shaped, **own), given
