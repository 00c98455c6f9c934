"""With a file of keys, a gateway serves those who have one, and each what its key allows."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner
from openai import OpenAI
from redis import Redis

from omlx_gateway.cli import main
from omlx_gateway.keys import KeyFile, KeyFileError, hash_key
from omlx_producer.figures import PAUSED_KEY
from omlx_producer.operate import pause_model
from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.rows.request import RowRequest
from tests.helpers import bulk_runs
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_worker import announce
from tests.helpers.gateway import running_gateway
from tests.helpers.workers import ALIAS, enqueue_raw, fetch, queue, running_worker, wait_for

CHAT: list[Any] = [{"role": "user", "content": "Reverse a list."}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "api-keys.jsonl"


@pytest.fixture
def add(file: Path) -> Callable[..., str]:
    """Makes a key as the command does."""

    def add_key(name: str, *options: str) -> str:
        result = CliRunner().invoke(main, ["keys", "add", name, "--file", str(file), *options])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    return add_key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_shown_once_and_kept_as_a_hash_in_a_private_file(
    file: Path, add: Callable[..., str]
) -> None:
    first = add("ann")
    second = add("ben", "--level", "bulk", "--models", "a,b")
    add("eve", "--admin")
    assert first != second
    text = file.read_text()
    assert first not in text
    assert json.loads(text.splitlines()[1]) == {
        "name": "ben",
        "sha256": hash_key(second),
        "level": "bulk",
        "models": ["a", "b"],
        "admin": False,
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    listed = CliRunner().invoke(main, ["keys", "list", "--file", str(file)])
    assert listed.stdout.splitlines() == [
        "ann  high  all models",
        "ben  bulk  a, b",
        "eve  high  all models  admin",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ann"], "'ann' has a key; choose another name"),
        (["a b"], "NAME: got 'a b'; give up to 64 letters"),
        (["ben", "--models", "a,,b"], "--models: got ''; give names of models"),
    ],
)
def test_a_key_that_cannot_be_made_leaves_the_file_as_it_was(
    file: Path, add: Callable[..., str], arguments: list[str], sentence: str
) -> None:
    add("ann")
    before = file.read_text()
    result = CliRunner().invoke(main, ["keys", "add", *arguments, "--file", str(file)])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_two_commands_at_the_same_time_lose_no_key(file: Path, add: Callable[..., str]) -> None:
    add("ann")
    other = file.with_name(file.name + ".new")
    other.touch()
    result = CliRunner().invoke(main, ["keys", "add", "ben", "--file", str(file)])
    assert result.exit_code == 2
    assert "another command writes it" in result.stderr
    assert other.exists()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: the line: "),
        ('{"name": "x", "sha256": "secret"}', "line 2: sha256: "),
        ('{"name": "ann", "sha256": "%s"}' % ("0" * 64), "'ann' has a line already"),
        (
            '{"name": "x", "sha256": "%s", "rate": 60}' % ("0" * 64),
            "line 2: rate: got 60; gateways limit no rates; remove it, and limit them in a proxy",
        ),
    ],
)
def test_a_broken_file_is_refused_by_its_line(
    file: Path, add: Callable[..., str], line: str, sentence: str
) -> None:
    add("ann")
    file.write_text(file.read_text() + line)
    with pytest.raises(KeyFileError, match=sentence) as refused:
        KeyFile(file)
    assert "secret" not in str(refused.value)
    result = CliRunner().invoke(main, ["--api-keys", str(file)])
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_other_machines_are_served_with_keys_only(
    file: Path, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    arguments = ["--host", "0.0.0.0", "--port", "0", "--redis-url", redis_url]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "give --api-keys FILE" in result.stderr
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    add("ann")
    result = CliRunner().invoke(main, [*arguments, "--api-keys", str(file)])
    assert result.exit_code == 0, result.output
    assert "ready at http://0.0.0.0:" in result.stderr


def test_every_path_but_health_and_the_page_needs_a_key(
    file: Path, add: Callable[..., str], redis_url: str
) -> None:
    key = add("ann")
    with running_gateway(redis_url, keys=KeyFile(file)) as url:
        for path in ("/health", "/"):
            assert httpx2.get(url + path).status_code == 200
        for path in ("/v1/models", "/status", "/nope", "//health", "/health/", "/%2e/health"):
            for headers in (
                {},
                bearer("omlx-wrong"),
                {"Authorization": "Bearer"},
                bearer(key[:-1]),
                bearer("x" * 20_000),
                {"Authorization": key},
                {"Authorization": f"Basic {key}"},
                {"Authorization": b"Bearer \xff\xfe"},
            ):
                answer = httpx2.get(url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert httpx2.get(url + path, headers=bearer(key)).status_code != 401
        with (
            OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="API key"),
        ):
            client.chat.completions.create(model=ALIAS, messages=CHAT)


def test_a_refused_body_is_not_read(file: Path, add: Callable[..., str], redis_url: str) -> None:
    add("ann")
    with running_gateway(redis_url, keys=KeyFile(file)) as url:
        where = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(where, timeout=20) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
            )
            answer = b""
            while part := client.recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.usefixtures("worker")
def test_a_key_joins_its_level_and_no_better_one(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis
) -> None:
    key = add("ann", "--level", "default")
    with (
        running_gateway(redis_url, keys=KeyFile(file)) as url,
        OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        for header, level in ({}, "default"), ({"X-Omlx-Priority": "bulk"}, "bulk"):
            answer = client.chat.completions.with_raw_response.create(
                model=ALIAS, messages=CHAT, extra_headers=header
            )
            job = fetch(connection, answer.headers["x-omlx-job"])
            assert job.origin == queue(connection, level).name
        with pytest.raises(openai.PermissionDeniedError, match="default and below"):
            client.chat.completions.create(
                model=ALIAS, messages=CHAT, extra_headers={"X-Omlx-Priority": "high"}
            )


@pytest.mark.usefixtures("worker")
def test_a_key_of_some_models_sees_and_uses_no_others(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis
) -> None:
    all_models, own, other = add("all"), add("own", "--models", ALIAS), add("x", "--models", "x,y")
    body = {"model": ALIAS, "messages": CHAT, "stream": True}
    with running_gateway(redis_url, keys=KeyFile(file)) as url:

        def ask(key: str, path: str, **options: Any) -> httpx2.Response:
            method = "POST" if "json" in options else "GET"
            return httpx2.request(method, url + path, headers=bearer(key), **options)

        for key in (all_models, own):
            answer = ask(key, "/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert len(ask(key, "/v1/models").json()["data"]) == 1
        assert ask(other, "/v1/models").json()["data"] == []
        for refused in (
            ask(other, "/v1/chat/completions", json=body),
            ask(other, "/v1/chat/completions", json={"messages": CHAT}),
            ask(other, "/v1/chat/completions", json={**body, "model": ["x"]}),
            ask(other, f"/v1/models/{ALIAS}"),
        ):
            assert refused.status_code == 403, refused.text


def test_the_page_and_its_buttons_need_an_admin_key(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis
) -> None:
    admin, other = add("eve", "--admin"), add("ann")
    announce(connection)
    announce(connection, "held")
    pause_model(connection, "held")
    batch = bulk_runs.upload(connection)
    buttons = ("pause/demo", "resume/held", f"cancel/{batch.id}")
    with running_gateway(redis_url, keys=KeyFile(file)) as url:

        def ask(key: str, method: str, path: str) -> httpx2.Response:
            headers = {**bearer(key), "X-Omlx-Page": "1"}
            return httpx2.request(method, f"{url}/status{path}", headers=headers)

        refused = [ask(other, "POST", f"/{each}") for each in buttons]
        for answer in (ask(other, "GET", ""), *refused):
            assert answer.status_code == 403
            assert "keys add NAME --admin" in answer.json()["error"]["message"]
        assert (connection.smembers(PAUSED_KEY), batch.read().state) == ({b"held"}, "open")
        assert len(ask(admin, "GET", "").json()["batches"]) == 1
        for each in buttons:
            assert ask(admin, "POST", f"/{each}").json() == {"changed": True}
        assert (connection.smembers(PAUSED_KEY), batch.read().state) == ({b"demo"}, "cancelled")


@pytest.mark.usefixtures("worker")
def test_the_same_idempotency_key_of_two_api_keys_makes_two_jobs(
    file: Path, add: Callable[..., str], redis_url: str
) -> None:
    clients = [add("ann"), add("ben")]
    with running_gateway(redis_url, keys=KeyFile(file)) as url:
        ids = []
        for key in clients * 2:
            with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                answer = client.chat.completions.create(
                    model=ALIAS, messages=CHAT, extra_headers={"Idempotency-Key": "one"}
                )
            ids.append(answer.id)
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]


def test_keys_come_and_go_with_their_lines(
    file: Path, add: Callable[..., str], redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = add("ann")
    with running_gateway(redis_url, keys=KeyFile(file)) as url:

        def status(key: str) -> int:
            return httpx2.get(f"{url}/v1/models", headers=bearer(key)).status_code

        second = add("ben")
        assert [status(first), status(second)] == [200, 200]
        file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
        assert [status(first), status(second)] == [401, 200]
        broken = "{\n" + file.read_text()
        file.write_text(broken)
        assert [status(first), status(second)] == [401, 200]
        file.write_bytes(b"\xff\n{")
        assert [status(first), status(second)] == [401, 401]
        assert caplog.text.count("line 1: the line: ") == 2
        assert caplog.text.count("line 2: the line: ") == 1
        file.write_text(broken)
        file.chmod(0o620)
        assert [status(first), status(second)] == [401, 401]
        file.chmod(0o600)
        assert [status(first), status(second)] == [401, 200]
        file.unlink()
        assert [status(first), status(second)] == [401, 401]
        assert caplog.text.count("no key is in force until then") == 2


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_stream_ends_when_its_key_is_removed(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis, path: str
) -> None:
    headers = bearer(add("ann"))
    own = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    body = {"model": ALIAS, own: "hello" if own != "messages" else CHAT, "stream": True}
    body["max_output_tokens" if own == "input" else "max_tokens"] = 500
    announce(connection, ALIAS)
    with (
        running_worker(redis_url, step_seconds=0.02),
        running_gateway(redis_url, keys=KeyFile(file)) as url,
        httpx2.stream("POST", f"{url}/v1/{path}", json=body, headers=headers) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert "error" not in json.loads(next(lines)[6:])
        file.write_text("")
        *_, last = lines
        assert json.loads(last[6:])["error"] == {
            "message": "the API key was removed while the request ran; ask again with another key",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
        job = fetch(connection, answer.headers["x-omlx-job"])
        wait_for(lambda: job.get_status() != "started")
        assert job.get_status() == "stopped"


def test_an_answer_is_not_given_to_a_key_that_was_removed_meanwhile(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis
) -> None:
    headers = bearer(add("ann"))
    body = {"model": ALIAS, "messages": CHAT, "max_tokens": 5}
    announce(connection, ALIAS)
    with (
        running_gateway(redis_url, keys=KeyFile(file)) as url,
        ThreadPoolExecutor() as threads,
    ):
        asked = threads.submit(
            httpx2.post, f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
        )
        wait_for(lambda: queue(connection, "high").count)
        file.write_text("")
        with running_worker(redis_url):
            assert asked.result().status_code == 401


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(
    file: Path, add: Callable[..., str], mode: int
) -> None:
    add("ann")
    file.chmod(mode)
    keys = ["keys", "list", "--file", str(file)], ["keys", "add", "ben", "--file", str(file)]
    for arguments in (*keys, ["--api-keys", str(file)]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert f"may write it (mode 0{mode:o}); run: chmod 600 {file}" in result.stderr
    file.chmod(0o644)
    assert KeyFile(file)


@pytest.mark.usefixtures("worker")
def test_a_stream_goes_on_for_its_own_key_alone(
    file: Path, add: Callable[..., str], redis_url: str, connection: Redis
) -> None:
    own, other, admin = add("ann"), add("ben"), add("eve", "--admin")
    body = {"model": ALIAS, "messages": CHAT, "stream": True, "cache_salt": "x"}
    raw = enqueue_raw(connection, b"no payload", "raw").id
    with running_gateway(redis_url, keys=KeyFile(file)) as url:

        def ask(key: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
            path = f"{url}/v1/chat/completions"
            return httpx2.post(path, json=body, headers=bearer(key) | headers)

        whole = ask(own, body)
        job = whole.headers["x-omlx-job"]
        again = {"Last-Event-ID": f"{job}:0"}
        texts = [
            re.sub(r'"created":\d+', "", found.text) for found in (whole, ask(own, body, **again))
        ]
        assert texts[0] == texts[1]
        for key in (other, admin):
            refused, absent = ask(key, body, **again), ask(key, body, **{"Last-Event-ID": "no:0"})
            assert refused.status_code == absent.status_code == 404
            assert refused.text == absent.text.replace("'no'", f"'{job}'")
        assert ask(own, body, **{"Last-Event-ID": f"{raw}:0"}).status_code == 404


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
def test_each_key_has_cache_salts_of_its_own_at_every_gateway(
    file: Path, add: Callable[..., str], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, ben = add("ann"), add("ben")
    prepare, salts = FakeEngine.prepare, list[str | None]()

    def noted(engine: FakeEngine, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        salts.append(request.cache_salt)
        return prepare(engine, request, job_id)

    monkeypatch.setattr(FakeEngine, "prepare", noted)
    window: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}

    def of_each_door(client: OpenAI, salt: str | None, *, rows: bool) -> set[str | None]:
        """The salts of a chat, of two texts, of a response, and perhaps of a batch's row."""
        salts.clear()
        given: Any = {"model": ALIAS, "extra_body": {"cache_salt": salt} if salt else {}}
        client.chat.completions.create(messages=CHAT, **given)
        client.completions.create(prompt=["x", "y"], **given)
        client.responses.create(input="x", **given)
        if rows:
            batch = client.batches.create(input_file_id=upload(client, ALIAS, salt=salt), **window)
            wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert len(salts) == 4 + rows
        return {*salts}

    with (
        running_gateway(redis_url, keys=KeyFile(file)) as one,
        running_gateway(redis_url, keys=KeyFile(file)) as two,
        running_gateway(redis_url) as without,
    ):
        found = []
        for url, key in ((one, ann), (two, ann), (one, ben), (without, "none")):
            with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                found.append(
                    [
                        of_each_door(client, salt, rows=url == one and bool(salt))
                        for salt in (None, "x")
                    ]
                )
                with pytest.raises(openai.BadRequestError, match="cache_salt: got 5"):
                    client.completions.create(model=ALIAS, prompt="x", extra_body={"cache_salt": 5})
    same, again, different, open_to_all = found
    assert same == again
    assert open_to_all == [{None}, {"x"}]
    own = [salt for each in (*same, *different) for salt in each]
    assert len({*own, "x"}) == 5


def test_a_name_given_to_another_key_gives_it_nothing_of_the_old_one(
    file: Path, add: Callable[..., str], redis_url: str
) -> None:
    window: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    old = add("ann")
    with running_gateway(redis_url, keys=KeyFile(file)) as url:
        with OpenAI(base_url=f"{url}/v1", api_key=old, max_retries=0) as client:
            made = upload(client, ALIAS)
            batch = client.batches.create(input_file_id=made, **window).id
        file.write_text("")
        new = add("ann")
        with OpenAI(base_url=f"{url}/v1", api_key=new, max_retries=0) as client:
            assert [*client.files.list(), *client.batches.list()] == []
            for attempt in (
                lambda: client.files.content(made),
                lambda: client.batches.cancel(batch),
            ):
                with pytest.raises(openai.NotFoundError):
                    attempt()


def upload(client: OpenAI, *models: str, salt: str | None = None) -> str:
    rows = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": CHAT, "max_tokens": 4, "cache_salt": salt},
        }
        for number, model in enumerate(models)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return client.files.create(file=("rows.jsonl", content), purpose="batch").id


@pytest.mark.usefixtures("worker")
def test_files_and_batches_belong_to_their_key(
    file: Path, add: Callable[..., str], redis_url: str, tmp_path: Path
) -> None:
    window: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    first, second = add("ann"), add("ben")
    with (
        running_gateway(redis_url, keys=KeyFile(file)) as url,
        OpenAI(base_url=f"{url}/v1", api_key=first, max_retries=0) as ann,
        OpenAI(base_url=f"{url}/v1", api_key=second, max_retries=0) as ben,
    ):
        made = upload(ann, ALIAS)
        batch = ann.batches.create(input_file_id=made, **window)
        wait_for(lambda: ann.batches.retrieve(batch.id).status == "completed")
        output = ann.batches.retrieve(batch.id).output_file_id
        assert output
        for attempt in (
            lambda: ben.files.retrieve(made),
            lambda: ben.files.content(made),
            lambda: ben.files.content(output),
            lambda: ben.files.delete(made),
            lambda: ben.batches.retrieve(batch.id),
            lambda: ben.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        for listed in ben.files.list, ben.batches.list:
            with pytest.raises(openai.BadRequestError, match="an unknown id"):
                listed(after=made if listed == ben.files.list else batch.id)
        with pytest.raises(openai.BadRequestError, match="no file has the id"):
            ben.batches.create(input_file_id=made, **window)
        assert [*ben.files.list(), *ben.batches.list()] == []
        assert {each.id for each in ann.files.list()} == {made, output}
        assert [each.id for each in ann.batches.list()] == [batch.id]
        assert ann.files.content(output).text.count("\n") == 1


@pytest.mark.usefixtures("worker")
def test_a_batch_with_a_row_for_a_model_that_its_key_may_not_use_fails(
    file: Path, add: Callable[..., str], redis_url: str, tmp_path: Path, connection: Redis
) -> None:
    key = add("ann", "--models", ALIAS)
    connection.hset("omlx:models", "other", connection.hget("omlx:models", ALIAS) or b"")
    with (
        running_gateway(redis_url, keys=KeyFile(file)) as url,
        OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        batch = client.batches.create(
            input_file_id=upload(client, ALIAS, "other"),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status == "failed")
        errors = client.batches.retrieve(batch.id).errors
    assert errors
    assert errors.data
    [error] = errors.data
    assert (error.code, error.line) == ("model_not_allowed", 2)
