"""Whatever goes wrong with a request, its answer is an error in OpenAI's form."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from redis import Redis
from redis.exceptions import ResponseError
from starlette.requests import Request

from omlx_gateway import files, models
from omlx_gateway.cli import main
from omlx_gateway.keys import KeyFile, add_key
from omlx_gateway.routes import routes
from omlx_producer import MalformedResult
from tests.helpers.fake_worker import announce
from tests.helpers.gateway import error_of, running_gateway
from tests.helpers.workers import queue

SECRET = "the text of a prompt"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def address(gateway: str) -> tuple[str, int]:
    return "127.0.0.1", int(gateway.rpartition(":")[2])


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """All that the gateway sends before it hangs up."""
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(sent)
        answer = b""
        # Reset, if not all was read.
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65_536):
                answer += part
        return answer


MALFORMED = [
    (b"\r\n\x16\x03\x01 hello\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nA\nB: c\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2**17, 400),
    (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + CHUNKED + b"nonsense\r\n", 400),
    (POST.replace(b"v1", b"nowhere") + CHUNKED + b"nonsense\r\n", 400),
    (POST + b"Content-Type: text/plain\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 415),
    (POST + b"Connection: close\r\nContent-Length: 0\r\n\r\n", 415),
    (b"GET / HTTP/1.0\r\n\r\n", 403),
]


@pytest.fixture
def no_errors(gateway: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged as an error, by the gateway, its server or asyncio."""
    server = logging.getLogger("uvicorn.error")
    server.addHandler(caplog.handler)
    yield
    server.removeHandler(caplog.handler)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.usefixtures("no_errors")
def test_what_is_no_http_or_no_json_is_one_error(address: tuple[str, int]) -> None:
    for sent, status in MALFORMED:
        head, _, body = exchange(address, sent).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), sent[:80]
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["message"]


@pytest.mark.usefixtures("no_errors")
def test_a_body_that_breaks_after_its_answer_is_hung_up_on(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(POST.replace(b"v1", b"nowhere") + CHUNKED + b"5\r\nhello\r\n")
        assert client.recv(12) == b"HTTP/1.1 404"
        client.sendall(b"nonsense\r\n")
        rest = b"".join(iter(lambda: client.recv(65_536), b""))
    assert b"HTTP/1.1" not in rest


@pytest.mark.usefixtures("no_errors")
def test_a_client_may_leave_within_its_body(address: tuple[str, int], gateway: str) -> None:
    kinds = (b"application/json", b"multipart/form-data; boundary=b")
    for path, kind in itertools.product((b"completions", b"files", b"batches"), kinds):
        with socket.create_connection(address) as client:
            lines = (b"POST /v1/" + path + b" HTTP/1.1", b"Host: localhost")
            length = b"Content-Length: 99"
            client.sendall(b"\r\n".join((*lines, b"Content-Type: " + kind, length, b"", b"--b")))
    assert httpx2.get(f"{gateway}/health").status_code == 200


def test_a_route_or_method_that_nobody_serves_is_one_error(gateway: str) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/health/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PATCH", "/v1/files", 405),
        ("OPTIONS", "/", 405),
        ("BREW", "/v1/files/..%2f..%2fetc%2fpasswd", 404),
    ):
        answer = httpx2.request(method, gateway + path)
        assert answer.status_code == status
        assert path.partition("%")[0] in error_of(answer)["message"]
        assert ("allow" in answer.headers) == (status == 405)


BODIES = [
    *(b"", b"{", b"[]", b"\xff", b"1" * 5000, b"[" * 100_000),
    b'{"model": "\\ud800", "prompt": "x"}',
    b'{"a":' * 400 + b"1" + b"}" * 400,
]


def test_a_body_that_is_no_object_of_known_fields_is_one_error(gateway: str) -> None:
    kind = {"Content-Type": "application/json"}
    for path, body in itertools.product(("chat/completions", "completions", "batches"), BODIES):
        answer = httpx2.post(f"{gateway}/v1/{path}", content=body, headers=kind)
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"


@pytest.fixture
def faulty(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A gateway with a bug in a route, and in a route that runs on a thread."""

    def refuse(_: Request) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(models, "key_of", refuse)
    monkeypatch.setattr(files, "owner_of", refuse)
    with running_gateway(redis_url) as url:
        yield url


def test_a_path_or_a_method_that_is_wrong_is_told_with_the_right_one(gateway: str) -> None:
    for method, path, told in (
        ("POST", "/chat/completions", "no such path; give /v1/chat/completions (the base URL ends"),
        ("GET", "/models", "no such path; give /v1/models (the base URL ends in /v1)"),
        ("POST", "/v1/v1/completions", "no such path; give /v1/completions (the base URL"),
        ("GET", "/nothing", "no such path; give one that docs/http.md names"),
        ("GET", "/v1/chat/completions", "no GET here; give POST"),
        ("PUT", "/v1/files", "no PUT here; give GET, HEAD, POST"),
    ):
        answer = httpx2.request(method, gateway + path)
        assert f"{method} {path}: {told}" in error_of(answer)["message"]


def test_an_event_to_go_on_from_needs_a_stream(gateway: str, connection: Redis) -> None:
    """Else the request would run again, and its answer begin anew."""
    announce(connection)
    body = {"model": "demo", "prompt": "x"}
    headers = {"Last-Event-ID": "nope"}
    answer = httpx2.post(f"{gateway}/v1/completions", json=body, headers=headers, timeout=5)
    assert answer.status_code == 400
    assert error_of(answer)["message"] == (
        "Last-Event-ID: got 'nope', and no stream is asked for; give stream: true, or leave it out"
    )
    assert not queue(connection, "high").count


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files"])
def test_a_bug_is_a_500_whose_place_is_logged_and_whose_message_is_not(
    faulty: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = httpx2.get(faulty + path)
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "internal_error"
    assert SECRET not in answer.text + caplog.text
    assert "RuntimeError" in caplog.text
    assert "in refuse" in caplog.text


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ResponseError(f"Command # 1 ({SECRET}) of pipeline caused error: X"), "redis_error", "X"),
        (MalformedResult("j1", "no body"), "malformed_result", "no body"),
    ],
)
def test_what_redis_refuses_or_holds_is_told_without_what_was_written(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: str, message: str
) -> None:
    def refuse(_: Request) -> None:
        raise raised

    monkeypatch.setattr(models, "key_of", refuse)
    with running_gateway(redis_url) as url:
        error = error_of(httpx2.get(f"{url}/v1/models"))
    assert (error["code"], error["message"]) == (code, message)


def test_names_of_this_machine_and_allowed_ones_are_served(redis_url: str) -> None:
    with running_gateway(redis_url, hosts=["Mac"]) as url:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "mac"):
            assert httpx2.get(f"{url}/health", headers={"Host": host}).status_code == 200


def test_a_name_that_another_site_gave_this_machine_is_refused(gateway: str) -> None:
    hosts = ["evil.example", "127.0.0.1.evil.example:8000", "localhost@evil", "[", "localhost.", ""]
    for host in hosts:
        answer = httpx2.get(f"{gateway}/v1/models", headers={"Host": host})
        assert answer.status_code == 403
        assert error_of(answer)["code"] == "host_not_allowed"
        assert "--allow-host" in error_of(answer)["message"]


# What browsers say of pages of other sites: to names of this machine and over TLS, and else.
SITES = [
    *({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}),
    *({"Origin": "http://elsewhere.example"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"}),
]
FORM_KINDS = [
    *({}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data; boundary=b"}),
    *({"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": ""}),
]


def test_pages_of_other_sites_can_only_read(gateway: str) -> None:
    """Unless the browser asks first, as for JSON, and for headers beyond those of forms."""
    effects = [
        (method, re.sub("{.*?}", "x", route.path))
        for route in routes
        for method in route.methods or ()
        if method not in ("GET", "HEAD")
    ]
    assert ("POST", "/v1/batches/x/cancel") in effects
    own = {"Origin": gateway}
    with httpx2.Client(base_url=gateway) as browser:
        for method, path in effects:
            for site, kind in zip(SITES, FORM_KINDS, strict=True):
                answer = browser.request(method, path, headers=site | kind, content=b"{}")
                assert answer.status_code == 403, (method, path)
                assert error_of(answer)["code"] == "site_not_allowed"
                assert next(iter(site.values())) in error_of(answer)["message"]
            for allowed in ({}, own, own | {"Sec-Fetch-Site": "same-origin"}):
                answer = browser.request(method, path, headers=allowed)
                assert error_of(answer)["code"] != "site_not_allowed"
        assert browser.get("/v1/batches", headers=SITES[0]).status_code == 200
        asked = {"Authorization": "Bearer none", **SITES[0]}
        assert browser.delete("/v1/files/x", headers=asked).status_code == 404


def test_with_keys_a_gateway_has_any_name(redis_url: str, tmp_path: Path) -> None:
    key = add_key(path := tmp_path / "keys", "ann")
    with running_gateway(redis_url, keys=KeyFile(path)) as url:
        told = {"Host": "mac.example", "Authorization": f"Bearer {key}"}
        assert httpx2.get(f"{url}/v1/models", headers=told).status_code == 200


def refusal(*arguments: str) -> tuple[int, str]:
    """The exit code and the only line of a gateway that does not start."""
    result = CliRunner().invoke(main, arguments)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.exit_code, result.stderr


def test_a_redis_that_does_not_answer_is_one_sentence_with_the_remedy() -> None:
    code, told = refusal("--redis-url", "redis://u:secret@127.0.0.1:1/0")
    assert code == 3
    assert "Redis at redis://127.0.0.1:1/0 does not answer" in told
    assert "start a server there, or name another with --redis-url" in told


def test_a_redis_that_is_too_old_is_refused_and_health_tells(
    gateway: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Redis.info
    monkeypatch.setattr(Redis, "info", lambda self: told(self) | {"redis_version": "7.0.15"})
    code, said = refusal("--redis-url", redis_url)
    assert code == 3
    assert "is of version 7.0.15, and jobs need Redis 7.2 or newer, or Valkey; upgrade it" in said
    answer = httpx2.get(f"{gateway}/health")
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "unsuitable_redis"
    assert error_of(answer)["message"] in said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_is_one_sentence(redis_url: str, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, told = refusal("--redis-url", redis_url, "--host", host, "--port", port)
    assert code == 2
    assert f"--host {host} --port {port}: nothing can be served there (Address already" in told
    assert told.endswith("(Address already in use); give another\n")


def test_a_wrong_url_of_redis_is_one_sentence_with_the_option() -> None:
    code, told = refusal("--redis-url", "redis://127.0.0.1/abc", "--port", "0")
    assert code == 2
    assert "--redis-url: got 'abc' for the database; give a number" in told
