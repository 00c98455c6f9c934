"""The command ``omlx-worker demo``."""

from __future__ import annotations

import logging
import os

import click
from pydantic import ValidationError

from omlx_producer.program import INTERRUPTED, INVALID, UNREACHABLE, fail, option
from omlx_worker.logs import start_logging
from omlx_worker.options import describe, require_mlx

FAILED = 1


@click.command()
@option(
    "--max-tokens",
    type=click.IntRange(1),
    default=96,
    show_default=True,
    help="Generate at most this many tokens for a prompt.",
)
def demo(max_tokens: int) -> None:
    """Run a server, the demo model, and a few prompts."""
    require_mlx()
    from omlx_producer.errors import OmlxQueueError
    from omlx_worker.queue.embedded import ServerError

    start_logging("warning")
    try:
        from omlx_worker.demo.run import run_demo

        run_demo(max_tokens)
    except ServerError as error:
        fail(UNREACHABLE, str(error))
    except ValidationError as error:
        fail(INVALID, describe(error))
    except OmlxQueueError as error:
        fail(FAILED, str(error))
    except KeyboardInterrupt:
        logging.shutdown()
        os._exit(INTERRUPTED)
