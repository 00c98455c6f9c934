"""Runs a worker to its end, and ends its program."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from omlx_producer.program import INVALID, UNREACHABLE, fail
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.options import by_source
from omlx_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from redis import Redis

    from omlx_worker.control.in_turn import ModelsInTurn
    from omlx_worker.control.worker import GenerationWorker

BROKEN, STOPPED_AT_ONCE = 1, 128

log = logging.getLogger("omlx_worker")


def work(
    make: Callable[[Redis], GenerationWorker | ModelsInTurn],
    settings: WorkerSettings,
    connection: Redis,
    url: str,
) -> int:
    """Run a worker to its end; returns the exit code. Errors end the program with a sentence."""
    from omlx_worker.connection import unusable
    from omlx_worker.control.rq_record import NameTaken
    from omlx_worker.ports import serve_ports

    try:
        # RQ asks the server for its own address.
        worker = make(connection)
        worker.require_free_name()
        with serve_ports(settings, worker, url):
            worker.work(burst=settings.burst)
    except (ModelError, NameTaken) as error:
        fail(INVALID, by_source(str(error)))
    except Exception as error:
        if told := unusable(url, error):
            fail(UNREACHABLE, told)
        log.exception("the worker ends")
        fail(BROKEN, f"the worker cannot go on: {error}")
    return worker.exit_code or (UNREACHABLE if worker.unreachable else 0)


def end(code: int) -> NoReturn:
    """End the program."""
    if code > STOPPED_AT_ONCE:
        # The engine may be in a step, which makes an orderly exit crash.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)
