"""The keyword arguments of submit are typed, and the types are those of a request."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from omlx_producer import GenerationRequest, Producer
from omlx_producer.bulk.arguments import BulkArguments
from omlx_producer.bulk.options import RunOptions
from omlx_producer.client.fields import RequestFields, SubmitArguments, SubmitManyArguments
from omlx_producer.wire import WIRE_VERSION
from scripts.request_fields import pages

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("path", "text"), pages(), ids=lambda value: getattr(value, "name", ""))
def test_keywords_and_their_table_are_those_of_a_request(path: Path, text: str) -> None:
    assert path.read_text() == text, "run python -m scripts.request_fields"


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


def test_the_keywords_of_a_run_are_its_options() -> None:
    options = get_type_hints(RunOptions)
    keywords = get_type_hints(BulkArguments)
    own = RunOptions.model_fields.keys() - {"input", "sampling", "default_model"}
    assert keywords.keys() == own | hints_of_request()
    assert [
        name for name in own if keywords[name] not in (options[name], options[name] | None)
    ] == []


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


def plain(schema: Any) -> Any:
    """A JSON schema without its words."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = {name for name in ("title", "description") if isinstance(schema.get(name), str)}
    return {name: plain(each) for name, each in schema.items() if name not in words}


def test_a_request_of_other_fields_or_limits_has_another_wire_version() -> None:
    schema = json.dumps(plain(GenerationRequest.model_json_schema()), sort_keys=True)
    assert (WIRE_VERSION, zlib.crc32(schema.encode())) == (2, 698541451), (
        "raise WIRE_VERSION and mark the field with Since if older workers refuse what is taken "
        "here, then write both down"
    )
