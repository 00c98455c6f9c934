"""The options of a run, described once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from omlx_producer.bulk.collector import DEFAULT_WINDOW
from omlx_producer.bulk.output import real_path
from omlx_producer.bulk.records import Format, format_of
from omlx_producer.bulk.shape import Shape
from omlx_producer.bulk.store import read_settings, run_path
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.client.models import only_model
from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.wire import ModelInfo, Priority
from omlx_producer.wire.remedy import remedy_of

MAX_SHOWN = 60
Count = Annotated[int, Field(ge=1)]


class RunOptions(Shape):
    """What to run, and how: the options of ``omlx-submit run``, the keywords of `Producer.run`, and
    what a run keeps of them.

    Attributes:
        input: a path, which may be a folder of pictures, or ``-`` for stdin.
        each: a folder, for a file with the text of each row; see `omlx_producer.bulk.texts`.
        csv_safe: see `omlx_producer.bulk.table.TableForm`.
        default_model: of rows that name none. A run keeps the one that it began with.
    """

    input: str
    format: Format = Field(description="The format of INPUT; by default its suffix.")
    delimiter: str | None = Field(default=None, description="CSV separator; else line 1 tells it.")
    limit: Count | None = Field(default=None, description="Take the first rows only, this many.")
    priority: Priority = Field(default="bulk", description="Queue of the rows.")
    require_known_model: bool = True
    window: Count = Field(default=DEFAULT_WINDOW, description="Rows of a batch; two are in Redis.")
    job_timeout: Count = Field(default=JOB_SECONDS, description="Seconds a row may run.")
    with_body: bool = Field(default=False, description="Add whole responses to a CSV or Parquet.")
    keep: bool = Field(default=False, description="Add the input's columns to a table.")
    csv_safe: bool = Field(
        default=True, description="Put ' before cells of a CSV that look like formulas."
    )
    each: str | None = Field(default=None, description="Also write a text file for each row there.")
    default_model: str | None = None

    @classmethod
    def of(cls, name: str, asked: Mapping[str, Any]) -> RunOptions:
        """Options for an input.

        Args:
            asked: options of a run by name, and fields of a request. Without ``format``, the
                suffix of the input says it.

        Raises:
            InvalidRequest: if there is no such input or format, or an option has a wrong value.
        """
        own = cls.model_fields.keys() - {"input", "sampling", "default_model"}
        values: dict[str, Any] = {option: asked[option] for option in own & asked.keys()}
        # In JSON's types: a run keeps them.
        sampling = {
            option: _jsonable(option, value) for option, value in asked.items() if option not in own
        }
        values["format"] = values.get("format") or format_of(name)
        try:
            made = cls.model_validate({**values, "input": name, "sampling": sampling})
        except ValidationError as error:
            raise _first_problem(error) from None
        require_input(name, made.format)
        if made.keep and made.format == "pictures":
            raise InvalidRequest("keep", "pictures have no columns to add", "leave it out")
        if made.delimiter is not None:
            delimiter = _delimiter(made.delimiter, made.format)
            return made.model_copy(update={"delimiter": delimiter})
        return made

    @property
    def settings(self) -> dict[str, Any]:
        """The options in JSON's types, for the run's record. The limit is that of one command."""
        name = self.input if self.input == "-" else str(Path(self.input).resolve())
        each = self.each and str(Path(self.each).resolve())
        return self.model_dump(mode="json", exclude={"limit"}) | {"input": name, "each": each}

    def with_default_model(
        self, models: Mapping[str, ModelInfo], earlier: RunOptions | None
    ) -> RunOptions:
        """These options with the default model of an earlier run, else the only known model."""
        if earlier is not None and earlier.default_model is not None:
            return self.model_copy(update={"default_model": earlier.default_model})
        with contextlib.suppress(InvalidRequest):
            return self.model_copy(update={"default_model": only_model(models, vectors=self.embed)})
        return self

    @classmethod
    def of_run(cls, output: Path) -> RunOptions | None:
        """The options of the run that wrote an output; None if no run did.

        Raises:
            InvalidRequest: if a version with other options wrote them.
        """
        settings = read_settings(output)
        try:
            return None if settings is None else cls.model_validate(settings)
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
        shape = Shape.model_fields.keys() - {"sampling"}
        new, old = (each.model_dump(include=shape) | {**each.sampling} for each in (self, earlier))
        names = sorted(new.keys() | old.keys())
        return [
            name if len(was := repr(old.get(name))) > MAX_SHOWN else f"{name} was {was}"
            for name in names
            if new.get(name) != old.get(name)
        ]

    def replaces(self, earlier: RunOptions, path: Path, results: int, allowed: bool) -> bool:
        """Whether a run with these options replaces results of an earlier one with others.

        Args:
            path: the output.
            results: how many it has.

        Raises:
            InvalidRequest: if it does, and may not.
        """
        changed = self.changed(earlier)
        if not changed or not results:
            return False
        if not allowed:
            raise InvalidRequest(
                None,
                f"{path}: has results of other options ({', '.join(changed)})",
                "give those again, or another output, or replace, which keeps a copy",
            )
        return True


def _jsonable(option: str, value: Any) -> Any:
    """A value in JSON's types.

    Raises:
        InvalidRequest: if it has none.
    """
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError as error:
        raise InvalidRequest(option, f"cannot be sent as JSON ({error})", "change it") from None


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


def _first_problem(error: ValidationError) -> InvalidRequest:
    """The first wrong option."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    remedy = remedy_of(RunOptions.model_fields[name])
    return InvalidRequest(name, f"got {shown(problem['input'])}", f"give {remedy}")


def require_input(name: str, kind: Format) -> None:
    """Check that an input can be opened.

    Raises:
        InvalidRequest: with the remedy.
    """
    if name == "-" and kind in ("parquet", "pictures"):
        what = kind.replace("parquet", "Parquet")
        raise InvalidRequest(None, f"-: {what} cannot be read from stdin", "give a file")
    if kind == "pictures" and Path(name).is_dir():
        return
    if name != "-" and not Path(name).is_file():
        problem = "is no regular file" if Path(name).exists() else "there is no such file"
        raise InvalidRequest(None, f"{name}: {problem}", "give the path of a file")
