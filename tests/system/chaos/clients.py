"""What client processes do: ``omlx-submit``, a gateway, or submit jobs one after another."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from omlx_gateway import streaming
from omlx_gateway.cli import main as gateway
from omlx_producer import Producer, connection
from omlx_producer.bulk import batch, collector
from omlx_producer.cli.main import main
from omlx_producer.outage import passes
from omlx_producer.program import UNREACHABLE
from tests.system.chaos.workload import submit_once

SUBMIT_ALL = "submit-all"
GATEWAY = "gateway"


@dataclass
class ClientOrders:
    """What one client is to do.

    Attributes:
        args: of ``omlx-submit``; or `SUBMIT_ALL` and a file with a job a line; or `GATEWAY` and a
            port.
    """

    url: str
    log: str
    folder: str
    args: list[str]


def run_client(orders: ClientOrders) -> None:
    os.chdir(orders.folder)
    os.environ["OMLX_QUEUE_REDIS_URL"] = orders.url
    if orders.args[0] == SUBMIT_ALL:
        submit_all(orders.url, Path(orders.args[1]))
    _hurry()
    if orders.args[0] == GATEWAY:
        gateway(["--port", orders.args[1], "--redis-url", orders.url])
    sys.argv = ["omlx-submit", *orders.args]
    main()


def submit_all(url: str, path: Path) -> None:
    """Submit each job by its idempotency key; ends the process."""
    try:
        with Producer(url) as producer:
            for line in path.read_text().splitlines():
                submit_once(producer.connection, **json.loads(line))
                time.sleep(0.02)
    except RedisError as error:
        if not passes(error):
            raise
        os._exit(UNREACHABLE)
    os._exit(0)


def _hurry() -> None:
    """Waits that are long only to spare servers."""
    collector.RECONCILE_SECONDS = 1.0
    collector.WAIT_SECONDS = 0.1
    collector.LONGEST_PAUSE = 0.5
    connection.LONGEST_BLOCK_SECONDS = 0.5
    batch.ALIVE_SECONDS = 1
    streaming.PING_SECONDS = 0.5
