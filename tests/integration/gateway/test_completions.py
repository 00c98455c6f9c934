"""OpenAI's own client talks to the gateway; a request is a job of the queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from redis import Redis

from omlx_gateway import completions
from omlx_gateway.limits import Limits
from omlx_producer import Producer
from omlx_producer.client.cancel import cancel_job
from tests.helpers.fake_engine import BREAKS_PREPARE, BREAKS_STEP, GOES_ROUND
from tests.helpers.fake_worker import FakeWorker, announce
from tests.helpers.gateway import running_gateway
from tests.helpers.image_parts import grey, image, part_of, url_of
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import (
    ALIAS,
    fetch,
    queue,
    running_worker,
    started,
    status,
    wait_for,
)

CHAT: list[Any] = [{"role": "user", "content": "Reverse a list."}]
LINKED = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.fixture
def slow_worker(redis_url: str, connection: Redis) -> Iterator[None]:
    with running_worker(redis_url, step_seconds=0.02):
        wait_for(lambda: connection.exists("omlx:models"))
        yield


@pytest.mark.usefixtures("worker")
def test_a_chat_is_answered_and_streams_the_same_text(client: OpenAI) -> None:
    asked: Any = {"model": ALIAS, "messages": CHAT, "seed": 5, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**asked)
    assert answer.usage
    assert answer.usage.completion_tokens > 1
    whole = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(whole)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == answer.choices[0].finish_reason


@pytest.mark.usefixtures("worker")
def test_several_texts_with_logprobs_are_the_same_streamed_and_whole(client: OpenAI) -> None:
    asked: Any = {"model": ALIAS, "prompt": "def f(x):", "n": 2, "logprobs": 2, "seed": 3}
    answer = client.completions.create(**asked)
    texts, offsets = {0: "", 1: ""}, dict[int, list[int]]({0: [], 1: []})
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert [choice.text for choice in answer.choices] == [texts[0], texts[1]]
    for choice in answer.choices:
        assert choice.logprobs is None or choice.logprobs.text_offset == offsets[choice.index]


@pytest.mark.usefixtures("worker")
def test_several_prompts_have_the_answers_of_each_in_order(client: OpenAI) -> None:
    asked: Any = {"model": ALIAS, "n": 2, "seed": 3}
    prompts = ["def f(x):", "class A:", "import"]
    answer = client.completions.create(**asked, prompt=prompts)
    alone = [client.completions.create(**asked, prompt=prompt) for prompt in prompts]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [
        choice.text for each in alone for choice in each.choices
    ]
    totals = [each.usage.total_tokens for each in alone if each.usage]
    assert answer.usage
    assert answer.usage.total_tokens == sum(totals)
    with pytest.raises(openai.BadRequestError, match="at most 128") as refused:
        client.completions.create(**asked, prompt=["x"] * 129)
    assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: got 20000 char") as refused:
        client.completions.create(**asked, prompt=["x", "x" * 20_000])
    assert refused.value.param == "prompt[1]"


@pytest.mark.usefixtures("slow_worker")
def test_a_prompt_that_fails_ends_those_beside_it(client: OpenAI, connection: Redis) -> None:
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=ALIAS, prompt=["x", BREAKS_PREPARE], max_tokens=9_000)
    wait_for(lambda: sorted(job_states(connection)) == ["failed", "stopped"])


@pytest.mark.usefixtures("worker")
async def test_the_asynchronous_client_streams_many_at_once(gateway: str) -> None:
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none") as client:

        async def text(number: int) -> str:
            stream = await client.chat.completions.create(
                model=ALIAS, messages=CHAT, seed=number, stream=True
            )
            return "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            )

        texts = await asyncio.gather(*map(text, range(30)))
        assert all(texts)
        assert texts[3] == await text(3)


@pytest.mark.usefixtures("worker")
def test_tools_are_called(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: Any = {"model": ALIAS, "messages": CHAT, "tools": [tool], "max_completion_tokens": 200}
    for seed in range(10):
        answer = client.chat.completions.create(**asked, seed=seed)
        if not answer.choices[0].message.tool_calls:
            continue
        chunks = list(client.chat.completions.create(**asked, seed=seed, stream=True))
        streamed = [
            call
            for chunk in chunks
            if chunk.choices
            for call in chunk.choices[0].delta.tool_calls or ()
        ]
        whole = answer.choices[0].message.tool_calls
        assert [call.function.name for call in streamed if call.function] == ["f"] * len(whole)
        return
    pytest.fail("no seed calls a tool")


@pytest.mark.usefixtures("worker")
def test_a_picture_is_seen_in_a_chat_in_a_response_and_in_a_batch(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": ALIAS, "seed": 1}

    def chat(data: bytes) -> Any:
        return {**asked, "messages": [{"role": "user", "content": [part_of("a"), image(data)]}]}

    one, other = (
        client.chat.completions.create(**chat(grey(shade=shade))).choices[0].message.content
        for shade in (1, 2)
    )
    assert one != other
    parts: Any = [{"type": "input_text", "text": "a"}]
    parts.append({"type": "input_image", "detail": "auto", "image_url": url_of(grey(shade=1))})
    messages: Any = [{"role": "user", "content": parts}]
    response = client.responses.create(model=ALIAS, input=messages, extra_body={"seed": 1})
    assert response.output_text == one
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    lines = json.dumps(row | {"body": chat(grey(shade=1))}).encode()
    file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").json()
    assert output["response"]["body"]["choices"][0]["message"]["content"] == one


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("fields", "status_code", "param"),
    [
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1] * 200_000}]}, 400, "request"),
        (
            {"messages": [{"role": "user", "content": [LINKED]}]},
            400,
            "messages[0].content[0].image_url.url",
        ),
        ({"unheard_of": 1}, 400, "unheard_of"),
        ({"prompt": "x"}, 400, "prompt"),
        ({"messages": None}, 400, "messages"),
        ({"model": "nobody"}, 404, "model"),
        ({"stream_options": 3}, 400, "stream_options"),
        ({"stream_options": {"include_all": True}}, 400, "stream_options"),
        ({"audio": {"voice": "x", "format": "wav"}}, 400, "audio"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    client: OpenAI, fields: dict[str, Any], status_code: int, param: str
) -> None:
    body = {"model": ALIAS, "messages": CHAT, **fields}
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.status_code == status_code
    assert refused.value.param == param
    assert refused.value.message.count("\n") == 0
    # The remedies of other doors.
    assert not re.search("queue.anyway|require_known", refused.value.message)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": NaN, "messages": NaN}'),
        b'{"messages": [%b1]}' % (b"[]," * 500_000),
    ],
)
def test_a_body_that_is_no_request_is_refused(gateway: str, body: bytes) -> None:
    header = {"Content-Type": "application/json; charset=utf-8"}
    answer = httpx2.post(f"{gateway}/v1/chat/completions", content=body, headers=header)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_pages_of_other_sites_submit_nothing(
    gateway: str, connection: Redis, kind: str | None
) -> None:
    header = {"Content-Type": kind} if kind else {}
    body = json.dumps({"model": ALIAS, "messages": CHAT}).encode()
    answer = httpx2.post(f"{gateway}/v1/chat/completions", content=body, headers=header)
    assert answer.status_code == 415
    assert connection.keys("rq:job:*") == []


def test_other_paths_and_methods_have_errors_in_the_same_form(gateway: str) -> None:
    for method, path, status_code in (("GET", "/nope", 404), ("PUT", "/v1/models", 405)):
        answer = httpx2.request(method, gateway + path)
        assert answer.status_code == status_code
        assert answer.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_a_long_body_is_refused(redis_url: str) -> None:
    with running_gateway(redis_url, Limits(body_bytes=300)) as url:
        request = {"model": ALIAS, "messages": CHAT, "user": "x" * 300}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=request)
        assert answer.status_code == 413


@pytest.mark.usefixtures("worker")
def test_a_request_joins_the_queue_that_its_header_names(client: OpenAI, connection: Redis) -> None:
    for level, options in (("high", {}), ("bulk", {"X-Omlx-Priority": "bulk"})):
        answer = client.chat.completions.with_raw_response.create(
            model=ALIAS, messages=CHAT, extra_headers=options
        )
        job = fetch(connection, answer.headers["x-omlx-job"])
        assert job.origin == queue(connection, level).name
    with pytest.raises(openai.BadRequestError, match="X-Omlx-Priority"):
        client.chat.completions.create(
            model=ALIAS, messages=CHAT, extra_headers={"X-Omlx-Priority": "urgent"}
        )


@pytest.mark.usefixtures("worker")
def test_an_idempotency_key_makes_one_job_of_two_requests(client: OpenAI) -> None:
    header = {"Idempotency-Key": "one"}
    first, second = (
        client.chat.completions.create(model=ALIAS, messages=CHAT, extra_headers=header)
        for _ in range(2)
    )
    assert first.id == second.id
    with pytest.raises(openai.BadRequestError, match="another request"):
        client.chat.completions.create(model=ALIAS, messages=CHAT, n=2, extra_headers=header)


@pytest.mark.usefixtures("slow_worker")
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("detach", ["true", ""])
def test_hanging_up_cancels_the_job_unless_it_is_detached(
    gateway: str, connection: Redis, streams: bool, detach: str
) -> None:
    body = {
        "model": ALIAS,
        "prompt": "x",
        "max_tokens": 60 if detach else 300,
        "stream": streams,
        "ignore_eos": True,
    }
    headers = {"X-Omlx-Detach": detach}
    with contextlib.suppress(httpx2.TimeoutException), httpx2.Client(timeout=0.5) as client:
        sent = client.stream("POST", f"{gateway}/v1/completions", json=body, headers=headers)
        with sent as answer:
            next(answer.iter_lines())
    if detach:
        assert started(connection) == 1
    wait_for(lambda: started(connection) == 0)
    [key] = connection.keys("rq:job:*")
    ended = status(fetch(connection, key.decode().removeprefix("rq:job:")))
    assert ended == ("finished" if detach else "stopped")


def test_a_header_to_detach_says_true_or_false(gateway: str, connection: Redis) -> None:
    refused = httpx2.post(
        f"{gateway}/v1/completions",
        json={"model": ALIAS, "prompt": "x"},
        headers={"X-Omlx-Detach": "maybe"},
    )
    assert refused.status_code == 400
    assert "X-Omlx-Detach: got 'maybe'; give true or false" in refused.text
    assert not connection.keys("rq:job:*")


@pytest.mark.parametrize("streams", [True, False])
def test_hanging_up_in_the_queue_cancels_the_job_and_is_no_error(
    gateway: str, connection: Redis, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    announce(connection, ALIAS)
    body = json.dumps({"model": ALIAS, "prompt": "x", "stream": streams})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    port = int(gateway.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        [key] = wait_for(lambda: connection.keys("rq:job:*"))
    wait_for(lambda: connection.hget(key, "status") == b"canceled")
    assert caplog.text == ""


@pytest.mark.usefixtures("slow_worker")
@pytest.mark.slow
def test_a_stream_that_was_cut_goes_on_at_another_gateway(
    gateway: str, redis_url: str, connection: Redis
) -> None:
    body = {"model": ALIAS, "messages": CHAT, "max_tokens": 60, "stream": True, "seed": 4}

    def read(url: str, headers: dict[str, str], most: int) -> tuple[str, str]:
        text, last = "", ""
        with httpx2.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    last = line[4:]
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
                    if last and last.endswith(f":{most}"):
                        break
        return text, last

    begun, last = read(gateway, {"X-Omlx-Detach": "true"}, 10)
    with running_gateway(redis_url) as other:
        rest, _ = read(other, {"Last-Event-ID": last}, 0)
        whole, _ = read(other, {"Last-Event-ID": last.partition(":")[0] + ":0"}, 0)
    assert begun
    assert begun + rest == whole
    answer = httpx2.post(
        f"{gateway}/v1/chat/completions", json=body, headers={"Last-Event-ID": "../x"}
    )
    assert answer.status_code == 400


@pytest.mark.usefixtures("worker")
def test_a_job_that_fails_answers_with_its_sentence(client: OpenAI) -> None:
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError, match="tokens") as refused:
            client.completions.create(
                model=ALIAS, prompt="x" * 9_999, max_tokens=9_999, stream=streams
            )
        assert refused.value.param == "prompt"


def job_states(connection: Redis) -> list[str]:
    names = [key.decode().removeprefix("rq:job:") for key in connection.keys("rq:job:*")]
    return [status(fetch(connection, name)) for name in names]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("streams", [False, True])
def test_the_client_does_not_ask_again_after_a_job_that_failed(
    gateway: str, connection: Redis, streams: bool
) -> None:
    with (
        OpenAI(base_url=f"{gateway}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as failed,
    ):
        client.completions.create(model=ALIAS, prompt=BREAKS_STEP, stream=streams)
    assert failed.value.code == "job_failed"
    assert job_states(connection) == ["failed"]


@pytest.mark.usefixtures("slow_worker")
async def test_the_client_does_not_ask_again_for_a_job_that_somebody_cancelled(
    gateway: str, connection: Redis
) -> None:
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none") as client:
        asked = asyncio.create_task(
            client.completions.create(model=ALIAS, prompt="x", max_tokens=9_000)
        )
        await asyncio.to_thread(wait_for, lambda: started(connection) == 1)
        [key] = connection.keys("rq:job:*")
        cancel_job(connection, key.decode().removeprefix("rq:job:"), keep_for=60)
        with pytest.raises(openai.ConflictError) as cancelled:
            await asked
    assert cancelled.value.code == "job_cancelled"
    assert job_states(connection) == ["stopped"]


@pytest.mark.usefixtures("slow_worker")
def test_a_job_that_takes_too_long_is_cancelled(
    gateway: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "RESULT_SECONDS", 0.3)
    with (
        OpenAI(base_url=f"{gateway}/v1", api_key="none") as client,
        pytest.raises(openai.InternalServerError) as late,
    ):
        client.completions.create(model=ALIAS, prompt="x", max_tokens=9_000)
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    wait_for(lambda: job_states(connection) == ["stopped"])


@pytest.mark.usefixtures("worker")
def test_models_are_listed_and_health_is_told(client: OpenAI, gateway: str) -> None:
    [model] = client.models.list()
    assert (model.id, model.object) == (ALIAS, "model")
    assert client.models.retrieve(ALIAS) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    assert httpx2.get(f"{gateway}/health").json() == {"status": "ok"}


def test_while_redis_is_away_the_answer_is_503(private_server: RedisServer) -> None:
    with running_gateway(private_server.url) as url:
        private_server.kill()
        for path in ("/health", "/v1/models"):
            answer = httpx2.get(url + path, timeout=30)
            assert answer.status_code == 503
            assert "Redis is unavailable" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_drafted_text_is_marked_only_where_it_is_asked_for(
    gateway: str, redis_url: str, connection: Redis, is_chat: bool
) -> None:
    path, body = "completions", {"model": ALIAS, "prompt": "a", "stream": True}
    if is_chat:
        path = "chat/completions"
        body = {"model": ALIAS, "messages": [{"role": "user", "content": "a"}], "stream": True}
    with Producer(redis_url) as producer:
        job = producer.submit(body, require_known_model=False)
    worker = FakeWorker(connection, job.id)
    worker.start()
    worker.step("def f(", drafted=[(3, 6)])
    worker.step("x")
    worker.finish()
    headers = {"Last-Event-ID": f"{job.id}:0"}
    found = []
    for options in ({"include_drafted": True}, {}):
        answer = httpx2.post(
            f"{gateway}/v1/{path}", json={**body, "stream_options": options}, headers=headers
        )
        lines = answer.text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        found.append([choice["drafted"] for choice in choices if "drafted" in choice])
    assert found == [[[[3, 6]]], []]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_repeats_itself_says_that_it_ended_so(client: OpenAI, stream: bool) -> None:
    asked: Any = {"max_pattern_size": 4, "min_count": 5}
    answer = client.chat.completions.create(
        model=ALIAS,
        messages=[{"role": "user", "content": GOES_ROUND}],
        max_tokens=50,
        extra_body={"repetition_detection": asked},
        stream=stream,
    )
    choices: Any = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    text = "".join((c.delta if stream else c.message).content or "" for c in choices)
    assert (text, choices[-1].finish_reason) == ("ab" * 5, "repetition")


@pytest.mark.usefixtures("worker")
def test_a_response_that_repeats_itself_is_incomplete_for_that_reason(client: OpenAI) -> None:
    asked: Any = {"max_pattern_size": 4, "min_count": 5}
    response = client.responses.create(
        model=ALIAS, input=GOES_ROUND, extra_body={"repetition_detection": asked}
    )
    assert (response.status, response.output_text) == ("incomplete", "ab" * 5)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "repetition"
