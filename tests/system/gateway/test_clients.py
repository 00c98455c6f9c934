"""A worker with the demo model serves the clients of docs/http.md, by the lines printed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from omlx_gateway import openai as without_server
from omlx_worker.queue.embedded import free_port
from tests.helpers.documentation import PAGES, ROOT
from tests.helpers.gateway import is_healthy
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PAGE = PAGES["docs/http.md"].read_text()
PRINTED_URL, PRINTED_REDIS = "http://127.0.0.1:8000", "redis://127.0.0.1:6379/0"
CHAT: list[Any] = [{"role": "user", "content": "Ann is 30."}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """The URLs of a gateway and of its Redis."""
    port = free_port()
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with redis_server() as server, redis.Redis.from_url(server.url) as connection:
        process = subprocess.Popen(
            [*command, "-m", "demo", "--redis-url", server.url, "--http", str(port)],
            env=environment,
        )
        try:
            wait_for(lambda: is_healthy(port, process) and connection.exists("omlx:models"), 120)
            yield f"http://127.0.0.1:{port}", server.url
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(params=["http", "in process"])
def client(served: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    url, redis_url = served
    with (
        OpenAI(base_url=f"{url}/v1", api_key="none")
        if request.param == "http"
        else without_server.OpenAI(redis_url)
    ) as client:
        yield client


@pytest.fixture(params=["http", "in process"])
async def async_client(
    served: tuple[str, str], request: pytest.FixtureRequest
) -> AsyncIterator[AsyncOpenAI]:
    url, redis_url = served
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        if request.param == "http"
        else without_server.AsyncOpenAI(redis_url)
    ) as client:
        yield client


def test_an_answer_is_a_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, response_format={"type": "json_object"}, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_an_answer_is_parsed_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": CHAT, "response_format": Person, "temperature": 0}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == parsed
    assert len(pieces) > 1
    assert "".join(pieces) == streamed.content


def test_a_tool_is_called_whole_and_streamed_and_its_answer_is_read(client: OpenAI) -> None:
    tools = [pydantic_function_tool(Person)]
    asked: Any = {"model": "demo", "messages": CHAT, "tools": tools, "temperature": 0}
    forced: Any = {"type": "function", "function": {"name": "Person"}}
    choice = client.chat.completions.parse(**asked, tool_choice=forced).choices[0]
    [call] = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Person)
    with client.chat.completions.stream(**asked, tool_choice="required") as stream:
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert final.finish_reason == "tool_calls"
    told = [*CHAT, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
    answer = client.chat.completions.create(
        **(asked | {"messages": told}), tool_choice="none", max_completion_tokens=20
    )
    assert answer.choices[0].message.content


async def test_asynchronous_clients_parse_and_call(async_client: AsyncOpenAI) -> None:
    asked: Any = {"model": "demo", "messages": CHAT, "temperature": 0}
    answer = await async_client.chat.completions.parse(**asked, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    tools = [pydantic_function_tool(Person)]
    async with async_client.chat.completions.stream(
        **asked, tools=tools, tool_choice="required"
    ) as stream:
        final = await stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Person)


def batch_rows() -> str:
    schema = {"name": "person", "schema": Person.model_json_schema()}
    schema_format = {"type": "json_schema", "json_schema": schema}
    tool = pydantic_function_tool(Person)
    bodies: list[dict[str, Any]] = [
        {"response_format": schema_format},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ]
    lines = (
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "demo", "messages": CHAT, "temperature": 0, **body},
        }
        for number, body in enumerate(bodies)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def needs(block: str) -> set[str]:
    """The packages that some lines import, or run."""
    if block.startswith(("curl", "llm")):
        return {block.split()[0]} - {"curl"}
    names = re.findall(r"^(?:from|import) (\w+)", block, flags=re.MULTILINE)
    return set(names) - sys.stdlib_module_names


def python_with(names: set[str]) -> Path:
    """A Python that has some packages; the test is skipped without one."""
    code = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {sorted(names)})))"
    for python in (sys.executable, os.environ.get("CLIENTS_PYTHON", sys.executable)):
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            return Path(python)
    pytest.skip(f"set CLIENTS_PYTHON to a Python with {', '.join(sorted(names))}")


BLOCKS = [(kind, block) for kind in ("python", "bash") for block in blocks(kind)]


@pytest.mark.parametrize(
    ("kind", "block"), BLOCKS, ids=[" ".join(sorted(needs(b))) or "curl" for _, b in BLOCKS]
)
def test_the_lines_of_a_client_run_as_printed(
    served: tuple[str, str], tmp_path: Path, kind: str, block: str
) -> None:
    def here(text: str) -> str:
        return text.replace(PRINTED_URL, served[0]).replace(PRINTED_REDIS, served[1])

    python = python_with(needs(block))
    (tmp_path / "batchinput.jsonl").write_text(batch_rows())
    (tmp_path / "extra-openai-models.yaml").write_text(here(blocks("yaml")[0]))
    program = [str(python), "-c"] if kind == "python" else ["bash", "-ec"]
    done = subprocess.run(
        [*program, here(block)],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "LLM_USER_PATH": str(tmp_path),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'producer'}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    if "Ann is 30" in block:
        assert re.search(r"name='.*' age=\d+|\"age\": \d+", done.stdout), done.stdout
    if "batchinput" in block:
        assert done.stdout.count('"custom_id"') == 3
