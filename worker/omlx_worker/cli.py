"""The command ``omlx-worker``.

Exit codes: 0 ended as asked, 1 the engine broke, 2 usage or no such model, 3 Redis unreachable,
128 + signal when stopped at once, by a second signal or, before the model is loaded, by the first.
"""

from __future__ import annotations

import click

from omlx_producer.program import Program, check_variables
from omlx_worker.bench.cli import bench
from omlx_worker.demo.cli import demo
from omlx_worker.model_commands import check
from omlx_worker.run import run


class _WorkerProgram(Program):
    """Imports `batch`, which imports all of a client, when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(["batch", *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "batch":
            from omlx_worker.batch import batch

            return batch
        return super().get_command(ctx, cmd_name)


@click.group("omlx-worker", cls=_WorkerProgram, context_settings={"max_content_width": 110})
@click.version_option(package_name="omlx-queue")
def main() -> None:
    """Run generation jobs from a Redis queue on this machine."""
    check_variables()


for command in (run, check, demo, bench):
    main.add_command(command)
