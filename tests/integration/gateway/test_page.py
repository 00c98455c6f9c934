"""The page at / and the routes behind it: a snapshot of the queue, and its buttons."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from omlx_producer.operate import pause_model
from tests.helpers.bulk_runs import upload
from tests.helpers.fake_worker import announce, sign_on
from tests.helpers.gateway import running_gateway
from tests.helpers.redis_server import RedisServer

PRESS = {"X-Omlx-Page": "1"}
HOSTILE = '<img src=x onerror="alert(1)">/../?a#b'
ROOT = Path(__file__).parents[3]


@pytest.fixture
def client(redis_url: str) -> Iterator[httpx2.Client]:
    with running_gateway(redis_url) as url, httpx2.Client(base_url=url) as client:
        yield client


def test_a_snapshot_has_models_workers_queues_and_batches(
    client: httpx2.Client, connection: Redis
) -> None:
    announce(connection)
    sign_on(connection, "mac-1")
    batch = upload(connection)
    answer = client.get("/status")
    found: dict[str, Any] = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    (model,) = found["models"]
    assert (model["alias"], model["paused"], model["held_up"]) == ("demo", False, "")
    assert model["queues"]["bulk"]["waiting"] == 3
    (worker,), (row,) = model["workers"], model["table"]
    assert (worker["name"], worker["depth"], worker["acceptance"]) == ("mac-1", 2, 0.75)
    assert (row["workers of demo"], row["depth"], row["tok/s"]) == ("mac-1", "2 (auto)", "123")
    (shown,) = found["batches"]
    expected = {"id": batch.id, "state": "open", "rows": 3, "ok": 0, "left": 3, "models": ["demo"]}
    assert expected.items() <= shown.items()
    assert shown["created_at"] <= found["at"]


def test_the_history_has_the_rates_of_all_workers_together(
    client: httpx2.Client, connection: Redis
) -> None:
    announce(connection)
    for name, rate in (("mac-1", 10), ("mac-2", 5), ("mac-1", 20)):
        sign_on(connection, name, tokens_per_second=rate)
    found = client.get("/status/history").json()
    assert [rate for _, rate in found.pop("demo")] == [10, 15, 25]
    assert found == {}


def test_the_buttons_pause_resume_and_cancel(client: httpx2.Client, connection: Redis) -> None:
    announce(connection)
    batch = upload(connection)

    def press(path: str) -> tuple[int, Any]:
        answer = client.post(path, headers=PRESS)
        return answer.status_code, answer.json()

    assert press("/status/pause/demo") == (200, {"changed": True})
    assert connection.smembers("omlx:paused") == {b"demo"}
    assert press("/status/pause/demo") == (200, {"changed": False})
    assert press("/status/resume/demo") == (200, {"changed": True})
    assert connection.smembers("omlx:paused") == set()
    assert press(f"/status/cancel/{batch.id}") == (200, {"changed": True})
    assert batch.read().state == "cancelled"
    assert press(f"/status/cancel/{batch.id}") == (200, {"changed": False})
    (shown,) = client.get("/status").json()["batches"]
    assert (shown["id"], shown["state"]) == (batch.id, "cancelled")


def test_a_name_of_any_characters_is_paused(client: httpx2.Client, connection: Redis) -> None:
    announce(connection, HOSTILE)
    quoted = "".join(f"%{byte:02x}" for byte in HOSTILE.encode())
    assert client.post(f"/status/pause/{quoted}", headers=PRESS).status_code == 200
    assert connection.smembers("omlx:paused") == {HOSTILE.encode()}


@pytest.mark.parametrize("path", ["pause/demo", "resume/demo", "cancel/{batch}"])
def test_other_sites_press_no_button(client: httpx2.Client, connection: Redis, path: str) -> None:
    announce(connection)
    announce(connection, "held")
    batch = upload(connection)
    pause_model(connection, "held")
    button = "/status/" + path.format(batch=batch.id).replace("resume/demo", "resume/held")
    for headers, told in (
        ({"Origin": "http://elsewhere.example"}, "Origin: got 'http://elsewhere.example'"),
        ({}, "X-Omlx-Page: missing"),
    ):
        answer = client.post(button, headers={"Content-Type": "text/plain", **headers})
        assert answer.status_code == 403
        assert answer.json()["error"]["message"].startswith(told)
    assert connection.smembers("omlx:paused") == {b"held"}
    assert batch.read().state == "open"
    # Before they send the header, browsers ask. No answer allows it.
    asked = client.options(
        "/status/pause/demo",
        headers={
            "Origin": "http://elsewhere.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "x-omlx-page",
        },
    )
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]


def test_what_nobody_knows_is_a_404_with_a_sentence(client: httpx2.Client) -> None:
    unknown = ("pause/nobody", "resume/nobody", "cancel/batch-0123456789ab", "cancel/omlx:models")
    for path in unknown:
        answer = client.post(f"/status/{path}", headers=PRESS)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"]


def test_a_snapshot_without_redis_is_a_503(private_server: RedisServer) -> None:
    with running_gateway(private_server.url) as url, httpx2.Client(base_url=url) as client:
        assert client.get("/status").json()["models"] == []
        private_server.kill()
        answer = client.get("/status", timeout=30)
        assert answer.status_code == 503
        assert client.get("/").status_code == 200


def test_the_page_may_run_its_own_script_and_load_nothing_from_elsewhere(
    client: httpx2.Client,
) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    html = answer.text
    # That of SVG is a name, not a resource.
    assert set(re.findall(r"https?://[^\"'\s]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bsrc=|innerHTML|outerHTML|insertAdjacentHTML|document\.write", html)


def test_the_page_is_in_the_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "page.html" in packages["package-data"]["omlx_gateway"]
