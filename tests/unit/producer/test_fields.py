"""The keyword arguments of submit are typed, and the types are those of a request."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel, JsonValue

from omlx_producer import GenerationRequest, Producer
from omlx_producer.client.fields import RequestFields, SubmitArguments, SubmitManyArguments

ROOT = Path(__file__).parents[3]


def written(annotation: Any) -> Any:
    """A field's type as users may write it: without limits, and with dicts for models."""
    if annotation is JsonValue:
        return Any
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation | dict[str, Any]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return written(args[0])
    if origin in (Union, UnionType):
        return Union[tuple(written(arg) for arg in args)]  # noqa: UP007 (the parts are computed)
    if origin is list:
        return Union[tuple(list[part] for part in parts(written(args[0])))]  # noqa: UP007
    if origin is dict:
        return dict[written(args[0]), written(args[1])]  # type: ignore[misc]
    return annotation


def parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def test_the_typed_fields_are_those_of_a_request() -> None:
    hints = get_type_hints(GenerationRequest, include_extras=True)
    expected = {name: written(hints[name]) for name in GenerationRequest.model_fields}
    # Only a translation from /v1/responses sets it.
    del expected["responses"]
    # A missing model is filled in, and validation folds the old name into the new one.
    expected["model"] |= None
    expected["max_tokens"] = expected["max_completion_tokens"]
    assert get_type_hints(RequestFields) == expected


@pytest.mark.parametrize(
    ("method", "typed"),
    [(Producer.submit, SubmitArguments), (Producer.submit_many, SubmitManyArguments)],
)
def test_the_typed_options_are_those_of_the_method(method: Any, typed: Any) -> None:
    hints = get_type_hints(method)
    keywords = {
        name: hints[name]
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    options = get_type_hints(typed)
    if method is Producer.submit:
        options = {name: kind for name, kind in options.items() if name not in hints_of_request()}
    assert options == keywords


def hints_of_request() -> set[str]:
    return set(get_type_hints(RequestFields))


SNIPPET = """
from omlx_producer import AsyncProducer, Producer, RequestFields

producer = Producer()
producer.submit(prompt="x", temperature=0, priority="bulk")
messages = [{"role": "user", "content": "x"}]
fields: RequestFields = {"messages": messages, "logit_bias": {"5": 1}}
job = producer.submit(**fields)
awaited = AsyncProducer().submit(prompt="x", temperature=0, priority="bulk")
print(job.result().usage.completion_tokens + 1, job.result().choices[0].text + "")

producer.submit(promt="x")
producer.submit(prompt="x", temperature="hot")
producer.submit(prompt="x", prioritty="bulk")
misspelt = AsyncProducer().submit(promt="x")
wrong = AsyncProducer().submit(prompt="x", priority="urgent")
job.result().usage.tokens
from omlx_producer import Produser
"""


@pytest.mark.slow
def test_mypy_finds_every_misspelt_name(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", snippet],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    first = SNIPPET.splitlines().index('producer.submit(promt="x")') + 1
    assert wrong == set(range(first, len(SNIPPET.splitlines()) + 1)), done.stdout
