"""Fixtures of bulk runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from click.testing import CliRunner, Result

from omlx_producer.cli.main import cli
from tests.helpers.fake_worker import announce
from tests.helpers.workers import ALIAS

Run = Callable[..., Result]


@pytest.fixture
def run(redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Run:
    """omlx-submit on the session's server, where one model is known."""
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    announce(connection, ALIAS, picture_tokens=1)
    return lambda *args, **options: CliRunner().invoke(
        cli, args, prog_name="omlx-submit", **options
    )
