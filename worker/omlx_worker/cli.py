"""The command ``omlx-worker``.

Exit codes: 0 ended as asked, 1 the engine broke, 2 usage or no such model, 3 Redis unreachable,
128 + signal when stopped at once, by a second signal or, before the model is loaded, by the first.
"""

from __future__ import annotations

import click

from omlx_producer.program import Program, check_variables
from omlx_worker.bench.cli import bench
from omlx_worker.demo.cli import demo
from omlx_worker.model_commands import check, convert
from omlx_worker.run import run
from omlx_worker.service.cli import service


@click.group("omlx-worker", cls=Program, context_settings={"max_content_width": 110})
@click.version_option(package_name="omlx-queue")
def main() -> None:
    """Run generation jobs from a Redis queue on this machine."""
    check_variables()


for command in (run, service, check, convert, demo, bench):
    main.add_command(command)
