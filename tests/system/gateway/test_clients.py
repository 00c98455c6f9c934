"""A worker with the demo model serves OpenAI's clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from omlx_worker.queue.embedded import free_port
from tests.helpers.gateway import is_healthy
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

pytestmark = pytest.mark.timeout(300)

CHAT: list[Any] = [{"role": "user", "content": "Ann is 30."}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The base URL of a gateway."""
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
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def client(served: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=served, api_key="none") as client:
        yield client


@pytest.fixture
async def async_client(served: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=served, api_key="none") as client:
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
