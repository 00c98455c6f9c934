"""Users' callbacks and webhooks, each with a time limit.

Both run code or requests that whoever may enqueue has chosen. RQ stops a callback by raising an
exception in its thread, which a blocking call does not notice. So each runs on a thread of its own,
which is left behind at the limit.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from rq.job import Job, JobStatus
from rq.timeouts import TimerDeathPenalty
from rq.webhook import Webhook

from omlx_producer.errors import one_line

log = logging.getLogger("omlx_worker.control.callbacks")

LIMIT_SECONDS = 5.0
"""For one callback, or for all webhooks of a job together."""


class CallbackFailed(Exception):
    """A callback raised or ran too long. The message says which, in one line."""


class ServedJob(Job):
    """RQ's job, with its callbacks and webhooks under this worker's limits.

    Attributes:
        webhook_hosts: the hosts that webhooks may call.
    """

    webhook_hosts: Collection[str] = ()

    def call(self, execute: Callable[..., None], *args: Any) -> None:
        """Run one of `rq.callbacks`' functions for this job.

        Raises:
            CallbackFailed: if the callback raised or ran too long.
        """
        _within_limit(lambda: execute(self, _Penalty, *args))

    def send_webhooks(self, status: str | JobStatus, *, exc_string: str | None = None) -> None:
        """Send the webhooks of a status to allowed hosts. Errors are logged, never raised."""
        due = [webhook for webhook in self.webhooks if webhook.job_status == status]
        allowed = [webhook for webhook in due if self._allows(webhook)]

        def send() -> None:
            for webhook in allowed:
                try:
                    _send(webhook, self, exc_string)
                except Exception as error:  # noqa: BLE001 (as RQ: it cannot fail the job)
                    log.warning("a webhook of job %s failed: %s", self.id, error)

        if allowed:
            try:
                _within_limit(send)
            except CallbackFailed as error:
                log.warning("the webhooks of job %s were cut off: %s", self.id, error)

    def _allows(self, webhook: Webhook) -> bool:
        host = urlsplit(webhook.url).hostname
        if host in self.webhook_hosts:
            return True
        log.warning(
            "the webhook of job %s to %s is not sent: start the worker with --allow-webhooks %s "
            "to allow it",
            self.id,
            host,
            host,
        )
        return False


class _Penalty(TimerDeathPenalty):
    """RQ's time limit of a callback, or this module's if it is shorter."""

    def __init__(self, timeout: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(min(timeout, LIMIT_SECONDS), *args, **kwargs)  # type: ignore[no-untyped-call]


def _within_limit(call: Callable[[], None]) -> None:
    """Call on a new thread and wait for the end.

    Raises:
        CallbackFailed: if the call raises or does not end in time.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (SystemExit must not end the worker)
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="omlx-callback", daemon=True).start()
    try:
        error = outcome.exception(LIMIT_SECONDS)
    except TimeoutError:
        raise CallbackFailed(f"it ran longer than {LIMIT_SECONDS:g} s") from None
    if error is not None:
        raise CallbackFailed(one_line(f"{type(error).__name__}: {error}")) from error


# Without a handler of redirects: an allowed host must not lead to another one.
_opener = OpenerDirector()
for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):
    _opener.add_handler(handler)


def _send(webhook: Webhook, job: Job, exc_string: str | None) -> None:
    """`Webhook.send` without redirects."""
    headers, data = webhook.headers or {}, None
    if webhook.method == "POST":
        data = json.dumps(webhook.get_payload(job, exc_string=exc_string)).encode()
        headers = {"Content-Type": "application/json", **headers}
    request = Request(webhook.url, data=data, headers=headers, method=webhook.method)
    with _opener.open(request, timeout=min(webhook.timeout, LIMIT_SECONDS)) as response:
        if not 200 <= response.status < 300:
            raise ValueError(f"{webhook.url} answered {response.status}")
