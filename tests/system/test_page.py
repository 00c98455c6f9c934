"""The gateway's page in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from starlette.types import ASGIApp, Receive, Scope, Send

from omlx_gateway.app import create_app
from omlx_gateway.errors import ApiError
from omlx_producer.operate import pause_model
from omlx_producer.wire.keys import PAUSED_KEY, workers_key
from tests.helpers.browser import CHROMIUM, Page, browser_page
from tests.helpers.bulk_runs import upload
from tests.helpers.fake_worker import FakeWorker, announce, sign_on
from tests.helpers.gateway import running_gateway
from tests.helpers.workers import ALIAS, running_worker, wait_for

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
LONG = "a-name-without-a-space-" * 8
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser_page(tmp_path / "browser") as page:
        yield page


def click(page: Page, label: str) -> None:
    """Press the button that a screen reader knows by this name."""
    selector = json.dumps(f'button[aria-label="{label}"]')
    wait_for(lambda: page.evaluate(f"document.querySelector({selector}) !== null"))
    page.evaluate(f"document.querySelector({selector}).click()")


def test_the_page_shows_the_model_of_a_worker_and_a_batch(
    page: Page, redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url), running_gateway(redis_url) as url:
        wait_for(lambda: connection.exists("omlx:models"))
        batch = upload(connection, 3, ALIAS)
        wait_for(lambda: batch.read().over)
        page.open(url)
        wait_for(lambda: "3 of 3" in page.text("#batches"))
        shown = page.text("#batches")
        assert batch.id in shown
        assert "done" in shown
        assert ALIAS in page.text("#models")
        assert ALIAS in page.text("#legend")
        assert page.evaluate("document.querySelectorAll('#plot polyline').length") == 1
        assert page.evaluate("document.querySelector('progress').value") == 3
    assert page.said == []


def test_buttons_pause_resume_and_cancel(page: Page, redis_url: str, connection: Redis) -> None:
    announce(connection)
    sign_on(connection, "mac-1")
    batch = upload(connection)
    with running_gateway(redis_url) as url:
        page.open(url)
        click(page, "Pause demo")
        wait_for(lambda: connection.smembers(PAUSED_KEY) == {b"demo"})
        click(page, "Resume demo")
        wait_for(lambda: connection.smembers(PAUSED_KEY) == set())
        assert "bulk 3" in page.text("#models")
        page.evaluate("window.confirm = () => false")
        click(page, f"Cancel {batch.id}")
        assert batch.read().state == "open"
        page.evaluate("window.confirm = () => true")
        click(page, f"Cancel {batch.id}")
        wait_for(lambda: batch.read().state == "cancelled")
        wait_for(lambda: "cancelled" in page.text("#batches"))


def test_a_prompt_streams_and_is_stopped(page: Page, redis_url: str, connection: Redis) -> None:
    with running_worker(redis_url, step_seconds=0.01), running_gateway(redis_url) as url:
        wait_for(lambda: connection.exists("omlx:models"))
        page.open(url)
        wait_for(lambda: page.evaluate("document.querySelector('#model').value") == ALIAS)
        page.evaluate("document.querySelector('#prompt').value = 'Reverse a list.'")
        page.evaluate("document.querySelector('#limit').value = 30")
        page.evaluate("document.querySelector('#run').click()")
        wait_for(lambda: " tokens in " in page.text("#figures"))
        assert page.text("#answer").strip()
        font = page.evaluate("getComputedStyle(document.querySelector('#answer')).fontFamily")
        assert "monospace" in font, "answers may hold code"
        page.evaluate("document.querySelector('#limit').value = 9000")
        page.evaluate("document.querySelector('#run').click()")
        wait_for(lambda: len(page.text("#answer")) > 20)
        page.evaluate("document.querySelector('#stop').click()")
        wait_for(lambda: page.evaluate("document.querySelector('#stop').disabled"))
    assert page.said == []


def test_drafted_text_is_marked(page: Page, redis_url: str, connection: Redis) -> None:
    announce(connection)
    with running_gateway(redis_url) as url:
        page.open(url)
        wait_for(lambda: page.evaluate("document.querySelector('#model').value") == "demo")
        page.evaluate("document.querySelector('#prompt').value = 'Reverse a list.'")
        page.evaluate("document.querySelector('#run').click()")
        (job_id,) = wait_for(lambda: connection.lrange("rq:queue:omlx:demo:high", 0, -1))
        worker = FakeWorker(connection, job_id.decode())
        worker.start()
        worker.step("\U0001f40d def <b>", drafted=[(2, 5), (6, 9)])
        worker.step("x")
        worker.finish()
        wait_for(lambda: " tokens in " in page.text("#figures"))
        marks = "[...document.querySelectorAll('#answer mark')].map((mark) => mark.textContent)"
        assert page.evaluate(marks) == ["def", "<b>"]
        assert page.text("#answer") == "\U0001f40d def <b>x"
        assert "drafted" in page.text("#figures")


def test_a_prompt_to_a_model_that_takes_none_says_why(
    page: Page, redis_url: str, connection: Redis
) -> None:
    announce(connection)
    sign_on(connection, "mac-1")
    pause_model(connection, "demo")
    with running_gateway(redis_url) as url:
        page.open(url)
        wait_for(lambda: page.evaluate("document.querySelector('#model').value") == "demo")
        page.evaluate("document.querySelector('#prompt').value = 'Reverse a list.'")
        page.evaluate("document.querySelector('#run').click()")
        told = "demo is paused; omlx-submit resume demo lets it go on"
        assert page.text("#figures") == f"The prompt waits: {told}."
        click(page, "Resume demo")
        wait_for(lambda: page.text("#figures") == "")
        connection.delete(workers_key("demo"))
        wait_for(lambda: page.text("#figures") == "The prompt waits: no worker serves demo.")
        page.evaluate("document.querySelector('#stop').click()")
        wait_for(lambda: page.text("#figures") == "")
    assert page.said == []


def test_a_narrow_screen_shows_all_without_scrolling_sideways(
    page: Page, redis_url: str, connection: Redis
) -> None:
    announce(connection, LONG)
    sign_on(connection, LONG, LONG)
    batch = upload(connection, 3, LONG)
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=390,
        height=844,
        deviceScaleFactor=1,
        mobile=True,
    )
    with running_gateway(redis_url) as url:
        page.open(url)
        wait_for(lambda: batch.id in page.text("#batches"))
        each, right = "[...document.querySelectorAll('*')]", "e.getBoundingClientRect().right"
        assert page.evaluate(f"{each}.filter((e) => {right} > 390).map((e) => e.outerHTML)") == []
        cell = "document.querySelector('#models td[data-column=rows]')"
        assert page.evaluate(f"getComputedStyle({cell}, '::before').content").startswith('"rows')


def test_the_chart_begins_with_what_was_before_the_page_was_opened(
    page: Page, redis_url: str, connection: Redis
) -> None:
    announce(connection)
    for _ in range(5):
        sign_on(connection, "mac-1")
    with running_gateway(redis_url) as url:
        page.open(url)
        wait_for(lambda: "demo" in page.text("#legend"))
        points = "document.querySelector('#plot polyline').getAttribute('points').split(' ').length"
        assert page.evaluate(points) >= 6


def test_foreign_names_are_text(page: Page, redis_url: str, connection: Redis) -> None:
    announce(connection, HOSTILE)
    sign_on(connection, HOSTILE, HOSTILE, reason='"><b>')
    with running_gateway(redis_url) as url:
        page.open(url)
        wait_for(lambda: page.text("#models").count(HOSTILE) == 5)
        assert HOSTILE in page.text("#legend")
        assert page.evaluate("document.querySelector('#model').value") == HOSTILE
        assert page.evaluate("document.querySelectorAll('img, b').length") == 0
        assert page.evaluate("document.querySelectorAll('script').length") == 1
        assert page.evaluate("document.title") == "omlx-queue"
        page.evaluate("document.querySelector('#models button').click()")
        wait_for(lambda: connection.smembers(PAUSED_KEY) == {HOSTILE.encode()})


class WithKey:
    """A gateway that answers 401 without its key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._app
        if scope["type"] == "http" and scope["path"] != "/":
            given = dict(scope["headers"]).get(b"authorization")
            if given != b"Bearer sesame":
                served = ApiError(401, "give an API key").response
        await served(scope, receive, send)


def test_the_page_asks_for_a_key_and_sends_it(
    page: Page, redis_url: str, connection: Redis
) -> None:
    announce(connection)
    with running_gateway(redis_url, app=WithKey(create_app(redis_url))) as url:
        page.open(url)
        wait_for(lambda: "wants an API key" in page.text())
        assert page.text("#models") == ""
        for key in ("wrong", "sesame"):
            page.evaluate(f"document.querySelector('#key').value = '{key}'")
            page.evaluate("document.querySelector('#key-form button').click()")
            if key == "wrong":
                wait_for(lambda: "wants an API key" in page.text())
        wait_for(lambda: "demo" in page.text("#models"))
        assert "wants an API key" not in page.text()
        page.open(f"{url}/?again")
        wait_for(lambda: "demo" in page.text("#models"))
