"""OpenAI's own client uploads files and runs batches; a batch is one of the queue."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis
from redis.exceptions import RedisError

from omlx_gateway import outputs
from omlx_gateway.batches import shrink_indexes
from omlx_gateway.keys import KeyFile, add_key
from omlx_gateway.limits import Limits
from omlx_producer import Producer
from omlx_producer.bulk import batch as queue_batch
from omlx_producer.wire import queue_name
from omlx_producer.wire.keys import FILES_KEY, HTTP_BATCHES_KEY
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.fake_worker import announce
from tests.helpers.gateway import running_gateway
from tests.helpers.workers import ALIAS, running_worker, wait_for

ENDPOINT: Any = "/v1/chat/completions"
WINDOW: Any = "24h"


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {custom_id}."}]
    body = {"model": ALIAS, "messages": messages, "max_tokens": 8}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": ENDPOINT,
        "body": body | fields.pop("body", {}),
        **fields,
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@pytest.fixture
def known_model(redis_url: str, connection: Redis) -> None:
    """A model that a worker has announced, which has gone."""
    with running_worker(redis_url):
        wait_for(lambda: connection.exists("omlx:models"))


def begin(client: OpenAI, *lines: Any, window: Any = WINDOW, **options: Any) -> Batch:
    file = client.files.create(file=("input.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window=window, **options
    )


def until(client: OpenAI, batch: Batch, *statuses: str) -> Batch:
    def reached() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in statuses else None

    found: Batch = wait_for(reached, 30, f"a batch that is {statuses}")
    return found


def content(client: OpenAI, file_id: str | None) -> list[Any]:
    assert file_id
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.mark.usefixtures("worker")
def test_a_batch_runs_from_its_upload_to_its_output(client: OpenAI, tmp_path: Path) -> None:
    source = tmp_path / "batchinput.jsonl"
    source.write_bytes(jsonl(*(line(f"request-{n}") for n in range(1, 21))))
    with source.open("rb") as stream:
        file = client.files.create(file=stream, purpose="batch")
    assert (file.filename, file.bytes) == (source.name, source.stat().st_size)
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"description": "nightly eval job"},
    )
    assert batch.status in ("in_progress", "completed")
    assert batch.metadata == {"description": "nightly eval job"}
    done = until(client, batch, "completed", "failed")
    assert done.status == "completed", done.errors
    assert done.request_counts
    assert done.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert done.in_progress_at
    assert done.completed_at
    assert 0 <= (done.expires_at or 0) - done.created_at - 24 * 3600 <= 1
    assert done.error_file_id is None
    lines = content(client, done.output_file_id)
    assert [each["custom_id"] for each in lines] == [f"request-{n}" for n in range(1, 21)]
    for each in lines:
        body = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
        assert body.choices[0].message.content
    output = client.files.retrieve(done.output_file_id or "")
    assert output.purpose == "batch_output"
    assert output.bytes == len(client.files.content(output.id).content)
    assert client.files.content(file.id).content == source.read_bytes()


@pytest.mark.usefixtures("known_model")
def test_a_wrong_input_fails_with_the_numbers_of_its_lines(client: OpenAI) -> None:
    wrong = [
        line("a"),
        line("a"),
        line("b", url="/v1/completions"),
        line("c", body={"temperature": 9}),
        line("d", body={"model": "nobody"}),
        {"messages": [{"role": "user", "content": "x"}], "url": ENDPOINT},
        {**line("e"), "custom_id": None},
        line("f", body={"messages": [{"role": "user", "content": [1] * 200_000}]}),
    ]
    batch = begin(client, *wrong)
    failed = until(client, batch, "failed", "in_progress", "completed")
    assert failed.failed_at
    assert failed.errors
    assert failed.errors.data
    assert [error.line for error in failed.errors.data] == [2, 3, 4, 5, 6, 7, 8]
    words = ("the id '", "url", "temperature", "nobody", "body", "custom_id", "values")
    for error, word in zip(failed.errors.data, words, strict=True):
        assert word in (error.message or "")
    assert [error.param for error in failed.errors.data[2:4]] == ["temperature", "model"]


@pytest.mark.usefixtures("known_model")
def test_a_file_that_holds_no_json_is_told_of_no_options_of_commands(client: OpenAI) -> None:
    file = client.files.create(file=("x", b"name\nAnn\n"), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW
    )
    assert batch.errors
    told = [error.message for error in batch.errors.data or ()]
    problem = "not JSON (Expecting value: line 1 column 1 (char 0)); write an object a line"
    assert told == [f"line {number}: {problem}" for number in (1, 2)]


@pytest.mark.usefixtures("known_model")
def test_no_row_stays_of_a_batch_whose_last_row_is_wrong(
    client: OpenAI, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_batch, "BUFFER_ROWS", 1)
    failed = begin(client, line("a"), line("b"), line("c", body={"temperature": 9}), line("d"))
    assert failed.status == "failed"
    assert failed.errors
    assert [error.line for error in failed.errors.data or ()] == [3]
    assert failed.request_counts
    assert failed.request_counts.total == 0
    assert not connection.keys("omlx:batch:*:*")


@pytest.mark.usefixtures("known_model")
@pytest.mark.parametrize("lines", [b"", b"\n\n", b"{\n", b"\xff\n", b"[1]\n"])
def test_an_input_without_rows_fails(client: OpenAI, lines: bytes) -> None:
    file = client.files.create(file=("x", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW
    )
    failed = until(client, batch, "failed", "in_progress", "completed")
    assert failed.status == "failed"
    assert failed.errors
    assert failed.errors.data


@pytest.mark.usefixtures("known_model")
def test_a_batch_that_waits_is_cancelled_at_once(client: OpenAI) -> None:
    batch = until(client, begin(client, line("a"), line("b")), "in_progress")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelling_at
    assert cancelled.cancelled_at
    assert client.batches.cancel(batch.id).status == "cancelled"


@pytest.mark.usefixtures("known_model")
def test_a_batch_that_ends_as_it_is_to_be_cancelled_is_told_to_have_ended(
    client: OpenAI, connection: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = queue_batch.Batch.cancel

    def too_late(batch: queue_batch.Batch) -> bool:
        with running_worker(redis_url):
            wait_for(lambda: connection.hget(batch.key, "state") == b"done")
        return cancel(batch)

    batch = begin(client, line("a"))
    monkeypatch.setattr(queue_batch.Batch, "cancel", too_late)
    with pytest.raises(openai.ConflictError, match=f"{batch.id} is completed; only a batch that"):
        client.batches.cancel(batch.id)


class Slow:
    """Lets uploads begin, and go on once it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._upload = queue_batch.Batch.upload
        self.begun, self.goes_on = threading.Event(), threading.Event()
        monkeypatch.setattr(queue_batch.Batch, "upload", lambda *given: self(*given))

    def __call__(self, batch: queue_batch.Batch, rows: Iterable[Any], begun: str) -> int:
        self.begun.set()
        assert self.goes_on.wait(20)
        return self._upload(batch, rows, begun)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.goes_on.set()


@pytest.mark.usefixtures("known_model")
def test_a_batch_is_cancelled_during_its_upload(
    client: OpenAI, connection: Redis, slow: Slow
) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(begin, client, line("a"))
        assert slow.begun.wait(20)
        [batch] = client.batches.list().data
        assert batch.status == "validating"
        assert client.batches.cancel(batch.id).status == "cancelled"
        slow.goes_on.set()
        assert asked.result(20).status == "cancelled"
    assert not connection.keys("omlx:batch:*:waiting:*")
    assert not connection.exists("omlx:batches")


@pytest.mark.usefixtures("known_model")
def test_a_gateway_answers_others_while_it_uploads_and_makes_no_second_batch(
    client: OpenAI, slow: Slow
) -> None:
    headers = {"Idempotency-Key": "one"}
    file = client.files.create(file=("x", jsonl(line("a"))), purpose="batch").id

    def create() -> Batch:
        return client.batches.create(
            input_file_id=file,
            endpoint=ENDPOINT,
            completion_window=WINDOW,
            extra_headers=headers,
        )

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(create)
        assert slow.begun.wait(20)
        with pytest.raises(openai.ConflictError, match="another request with it uploads the batch"):
            create()
        assert client.models.list().data
        slow.goes_on.set()
        assert asked.result(20).id == create().id
    assert len(client.batches.list().data) == 1


@pytest.mark.usefixtures("worker")
def test_rows_that_wait_too_long_expire_into_the_error_file(client: OpenAI) -> None:
    rows = [line(name, body={"completion_window": "0.000001s"}) for name in "ab"]
    expired = until(client, begin(client, *rows, line("c")), "expired", "completed")
    assert expired.status == "expired"
    assert expired.expired_at
    errors = content(client, expired.error_file_id)
    assert [each["custom_id"] for each in errors] == ["a", "b"]
    assert {each["error"]["code"] for each in errors} == {"expired"}
    assert [each["custom_id"] for each in content(client, expired.output_file_id)] == ["c"]


@pytest.mark.usefixtures("known_model")
def test_a_batch_that_nobody_serves_ends_with_its_window(client: OpenAI, connection: Redis) -> None:
    batch = begin(client, line("a"), line("b"), window="0.000001s")
    elsewhere = Upkeep(LeaseTable(connection, "elsewhere", [queue_name("another", "default")]))
    assert sum(elsewhere.expire()) == 2
    expired = client.batches.retrieve(batch.id)
    assert expired.status == "expired"
    errors = content(client, expired.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "expired"),
        ("b", "expired"),
    ]


@pytest.mark.usefixtures("worker")
def test_an_output_that_cannot_be_completed_breaks_off(
    client: OpenAI, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_batch, "ROWS_AT_ONCE", 2)
    done = until(client, begin(client, *(line(f"r{n}") for n in range(9))), "completed")
    output = client.files.retrieve(done.output_file_id or "").id
    results = done.id.replace("batch_", "omlx:batch:") + ":results"
    kind_of = outputs.kind_of

    def expiring(line: bytes) -> str:
        connection.delete(results)
        return kind_of(line)

    monkeypatch.setattr(outputs, "kind_of", expiring)
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{client.base_url}files/{output}/content")
    with pytest.raises(openai.NotFoundError, match="were deleted, or have expired"):
        client.files.content(output)


@pytest.mark.usefixtures("worker")
def test_a_batch_that_an_operator_fetches_stays_readable_to_its_client(
    client: OpenAI, redis_url: str, tmp_path: Path
) -> None:
    done = until(client, begin(client, line("a"), line("b")), "completed")
    with Producer(redis_url) as producer:
        batch = producer.find_batch(done.id.replace("_", "-"))
        batch.download(tmp_path / "out.jsonl")
        assert len(list(batch.results())) == 2
    assert len(content(client, done.output_file_id)) == 2


@pytest.mark.usefixtures("known_model")
def test_a_batch_with_a_broken_field_is_told_and_holds_up_no_others(
    client: OpenAI, connection: Redis
) -> None:
    good, broken = begin(client, line("a")), begin(client, line("b"))
    connection.hset(broken.id.replace("batch_", "omlx:batch:"), "rows", "many")
    listed = {each.id: each for each in client.batches.list()}
    assert listed[good.id].status == "in_progress"
    assert listed[broken.id].status == "failed"
    assert "rows: got 'many'" in str(listed[broken.id].errors)
    page = httpx2.get(f"{str(client.base_url).removesuffix('/v1/')}/status").json()
    assert {each["state"] for each in page["batches"]} == {"open", "broken"}


@pytest.mark.usefixtures("known_model")
def test_files_and_batches_are_listed_page_by_page(client: OpenAI) -> None:
    batches = [begin(client, line(f"r{n}")) for n in range(5)]
    newest = [batch.id for batch in reversed(batches)]
    first = client.batches.list(limit=2)
    assert [each.id for each in first.data] == newest[:2]
    assert first.has_more
    assert [each.id for each in client.batches.list(limit=2)] == newest
    assert [each.id for each in client.batches.list(after=newest[2])] == newest[3:]
    files = [batch.input_file_id for batch in batches]
    assert [each.id for each in client.files.list(order="asc", limit=2)] == files
    assert [each.id for each in client.files.list(purpose="batch")] == files[::-1]
    assert not client.files.list(purpose="batch_output").data
    for query in ("limit=0", "limit=x", "limit=101", "after=nothing"):
        with pytest.raises(openai.BadRequestError):
            client.get(f"/batches?{query}", cast_to=object)


@pytest.mark.usefixtures("known_model")
def test_lists_have_nothing_to_do_with_those_of_other_keys(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    ann, ben = add_key(keys, "ann"), add_key(keys, "ben")
    with running_gateway(redis_url, keys=KeyFile(keys)) as url:
        with OpenAI(base_url=f"{url}/v1", api_key=ann) as client:
            batches = [begin(client, line(f"r{n}")) for n in range(3)]
        with OpenAI(base_url=f"{url}/v1", api_key=ben) as client:
            connection.config_resetstat()
            assert not client.files.list().data
            assert not client.batches.list().data
            assert "cmdstat_hgetall" not in connection.info("commandstats")
            with pytest.raises(openai.BadRequestError, match="unknown id"):
                client.batches.list(after=batches[0].id)


def test_the_indexes_shrink_when_files_and_batches_expire_or_are_deleted(
    client: OpenAI, connection: Redis
) -> None:
    announce(connection)
    kept, gone = begin(client, line("a")), begin(client, line("b"))
    assert connection.zcard(FILES_KEY) == 6
    client.files.delete(gone.input_file_id)
    assert connection.zcard(FILES_KEY) == 5
    # As when it expires.
    connection.delete(gone.id.replace("batch_", "omlx:batch:"))
    shrink_indexes(connection)
    assert connection.zcard(FILES_KEY) == 3
    assert connection.zcard(HTTP_BATCHES_KEY) == 1
    assert [each.id for each in client.batches.list()] == [kept.id]


def test_a_deleted_file_is_gone(client: OpenAI, connection: Redis) -> None:
    file = client.files.create(file=("x", b"{}"), purpose="batch")
    assert client.files.delete(file.id).deleted
    assert not connection.keys("omlx:file*")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
PURPOSE = PART % (b"purpose", b"", b"batch")
FILE = PART % (b"file", b'; filename="x"', b"{}")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"{}", 400),
        ({"Content-Type": "application/json"}, b"{}", 400),
        ({"Content-Type": "multipart/form-data"}, b"{}", 400),
        (FORM, b"nonsense", 400),
        (FORM, PURPOSE + b"--b--\r\n", 400),
        (FORM, FILE + b"--b--\r\n", 400),
        (FORM, FILE + FILE + PURPOSE + b"--b--\r\n", 400),
        (FORM, FILE + PART % (b"purpose", b"", b"fine-tune") + b"--b--\r\n", 400),
        (FORM, FILE + PURPOSE + PART % (b"other", b"", b"x") + b"--b--\r\n", 400),
        (FORM, PURPOSE + PART % (b"file", b"", b"{}") + b"--b--\r\n", 400),
        (FORM, PURPOSE + PART % (b"file", b'; filename="x"', b"x" * 2000) + b"--b--\r\n", 413),
        (FORM, PART % (b"", b"", b"x") * 20 + b"--b--\r\n", 400),
    ],
)
def test_a_wrong_upload_leaves_nothing(
    redis_url: str, connection: Redis, headers: Any, body: bytes, status: int
) -> None:
    with running_gateway(redis_url, Limits(file_bytes=1500)) as url:
        answer = httpx2.post(f"{url}/v1/files", headers=headers, content=body)
    assert answer.status_code == status, answer.text
    assert "\n" not in answer.json()["error"]["message"]
    assert not connection.keys("omlx:file*")


def test_a_client_that_hangs_up_while_it_sends_leaves_nothing(
    gateway: str, connection: Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(gateway.rpartition(":")[2])
    for path, kind in (("files", FORM["Content-Type"]), ("batches", "application/json")):
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + b"Content-Length: 99999\r\n\r\n" + FILE)
    for _ in range(20):
        assert httpx2.get(f"{gateway}/v1/files").status_code == 200
    assert not connection.keys("omlx:file*")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "a\\b", "ü\u2028", "x" * 1000])
def test_any_name_of_a_file_is_taken(client: OpenAI, name: str) -> None:
    file = client.files.create(file=(name, b"{}"), purpose="batch")
    assert len(file.filename) <= 255
    assert client.files.content(file.id).content == b"{}"


@pytest.mark.usefixtures("known_model")
def test_an_idempotency_key_makes_one_batch_of_two_requests(client: OpenAI) -> None:
    file = client.files.create(file=("x", jsonl(line("a"))), purpose="batch").id

    def create(key: str, **fields: Any) -> str:
        made = client.batches.create(
            input_file_id=file,
            endpoint=ENDPOINT,
            completion_window=WINDOW,
            extra_headers={"Idempotency-Key": key},
            **fields,
        )
        return made.id

    first = create("one")
    until(client, client.batches.retrieve(first), "in_progress")
    assert create("one") == first
    assert create("two") != first
    with pytest.raises(openai.BadRequestError, match="another request"):
        create("one", metadata={"a": "b"})
    assert len(client.batches.list().data) == 2


@pytest.mark.usefixtures("worker")
def test_an_upload_that_was_killed_is_listed_once_when_repeated(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise RedisError

    again: Any = {"extra_headers": {"Idempotency-Key": "one"}}
    with (
        running_gateway(redis_url) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(queue_batch.Batch, "upload", killed)
            with pytest.raises(openai.InternalServerError):
                begin(client, line("a"), **again)
        [key] = connection.keys("omlx:batch:*")
        connection.expire(key, queue_batch.UPLOAD_SECONDS - queue_batch.ALIVE_SECONDS - 1)
        until(client, begin(client, line("b")), "completed")
        done = until(client, begin(client, line("a"), **again), "completed")
        ids = [each.id for each in client.batches.list().data]
        files = [each.id for each in client.files.list().data]
    assert ids.count(done.id) == files.count(done.output_file_id or "") == 1


@pytest.mark.parametrize("path", ["files", "batches"])
@pytest.mark.parametrize("name", ["..%2F..%2Fx", "%00", "file-x", "batch_" + "0" * 24, "%0d%0aX"])
def test_an_id_that_is_none_is_not_found(gateway: str, path: str, name: str) -> None:
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/cancel")):
        answer = httpx2.request(method, f"{gateway}/v1/{path}/{name}{end}")
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"output_expires_after": {}}, "output_expires_after"),
    ],
)
def test_a_wrong_batch_is_refused_by_the_name_of_its_field(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    file = client.files.create(file=("x", jsonl(line("a"))), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": WINDOW, **fields}
    sent = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx2.post(f"{client.base_url}batches", content=sent, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not client.batches.list().data
