"""The options of a run: what to run, and how. The run file keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from omlx_producer.bulk.collector import DEFAULT_WINDOW
from omlx_producer.bulk.output import real_path
from omlx_producer.bulk.records import Format, format_of
from omlx_producer.bulk.shape import Shape
from omlx_producer.bulk.store import read_settings, run_path
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.client.models import only_model
from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.wire import ModelInfo, Priority

MAX_SHOWN = 60
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how.

    Attributes:
        input: a path, or ``-`` for stdin.
        with_body: add the whole response to a table.
        keep: add the columns of the input to a table.
        csv_safe: see `omlx_producer.bulk.table.TableForm`.
        delimiter: of the cells of a CSV; by default what its name or its first line says.
        limit: take only so many rows from the start of the input.
        default_model: of rows that name none. A run keeps the one that it began with.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    input: str
    kind: Format
    shape: Shape
    priority: Priority = "bulk"
    window: Count = DEFAULT_WINDOW
    job_timeout: Count = JOB_SECONDS
    require_known_model: bool = True
    with_body: bool = False
    keep: bool = False
    csv_safe: bool = True
    delimiter: str | None = None
    limit: Count | None = None
    default_model: str | None = None

    @classmethod
    def of(cls, name: str, kind: Format | None, shape: Shape, **options: Any) -> RunOptions:
        """Options for an input. Without ``kind``, its name says which format it has.

        Raises:
            InvalidRequest: if there is no such input or format, or an option has a wrong value.
        """
        kind = kind or format_of(name)
        try:
            made = _OPTIONS.validate_python(
                {"input": name, "kind": kind, "shape": vars(shape), **options}
            )
        except ValidationError as error:
            raise _first_problem(error) from None
        require_input(name, made.kind)
        if made.delimiter is not None:
            made = replace(made, delimiter=_delimiter(made.delimiter, made.kind))
        return made

    @property
    def settings(self) -> dict[str, Any]:
        """The options in JSON's types, for the run file. The limit is that of one command."""
        name = self.input if self.input == "-" else str(Path(self.input).resolve())
        settings = {**asdict(self), "input": name}
        del settings["limit"]
        return settings

    def with_default_model(
        self, models: Mapping[str, ModelInfo], earlier: RunOptions | None
    ) -> RunOptions:
        """These options with the default model of an earlier run, else the only known model."""
        if earlier is not None and earlier.default_model is not None:
            return replace(self, default_model=earlier.default_model)
        with contextlib.suppress(InvalidRequest):
            return replace(self, default_model=only_model(models))
        return self

    @classmethod
    def of_run(cls, output: Path) -> RunOptions | None:
        """The options of the run that wrote an output; None if no run did.

        Raises:
            InvalidRequest: if a version with other options wrote them.
        """
        settings = read_settings(output)
        try:
            return None if settings is None else _OPTIONS.validate_python(settings)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise InvalidRequest(
                None,
                f"{run_path(output)}: another version of omlx-submit wrote it "
                f"({place or 'settings'}: {error.errors()[0]['msg']})",
                "use that version, or run with another output",
            ) from None

    @classmethod
    def to_retry(cls, output: Path) -> RunOptions:
        """The options of the run that wrote an output.

        Raises:
            InvalidRequest: if none did; see also `of_run`.
        """
        if (found := cls.of_run(real_path(output))) is None:
            raise InvalidRequest(
                None, f"{run_path(output)}: missing", "give the output of an omlx-submit run"
            )
        return found

    def changed(self, earlier: RunOptions) -> list[str]:
        """The options that shape requests and were others in an earlier run, with short values."""
        new, old = ({**asdict(each.shape), **each.shape.sampling} for each in (self, earlier))
        names = sorted((new.keys() | old.keys()) - {"sampling"})
        return [
            name if len(was := repr(old.get(name))) > MAX_SHOWN else f"{name} was {was}"
            for name in names
            if new.get(name) != old.get(name)
        ]


def _delimiter(given: str, kind: Format) -> str:
    """The character that an option for the delimiter means.

    Raises:
        InvalidRequest: if it is none, or the input has no cells.
    """
    delimiter = {"tab": "\t", "\\t": "\t"}.get(given.lower(), given)
    if kind != "csv":
        raise InvalidRequest("delimiter", f"got {given!r}, and the input is no CSV", "leave it out")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise InvalidRequest("delimiter", f"got {given!r}", "give one character, as in ; or tab")
    return delimiter


_OPTIONS = TypeAdapter(RunOptions)


def _first_problem(error: ValidationError) -> InvalidRequest:
    """The first wrong option."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][-1]).replace("kind", "format")
    remedy = problem["msg"].replace("Input should be", "give")
    remedy = remedy.replace("greater than or equal to", "at least")
    return InvalidRequest(name, f"got {shown(problem['input'])}", remedy)


def require_input(name: str, kind: Format) -> None:
    """Check that an input can be opened.

    Raises:
        InvalidRequest: with the remedy.
    """
    if name == "-" and kind == "parquet":
        raise InvalidRequest(None, "-: Parquet cannot be read from stdin", "give a file")
    if name != "-" and not Path(name).is_file():
        problem = "is no regular file" if Path(name).exists() else "there is no such file"
        raise InvalidRequest(None, f"{name}: {problem}", "give an input, or - for stdin")
