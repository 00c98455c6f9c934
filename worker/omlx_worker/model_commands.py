"""``omlx-worker check``: a checkpoint before it is served."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from omlx_producer.program import INVALID, fail, json_option
from omlx_producer.terminal import write
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.logs import start_logging
from omlx_worker.options import (
    ModelCommand,
    by_source,
    read_settings,
    require_mlx,
    settings_options,
)


@click.command(cls=ModelCommand)
@settings_options(
    {
        *("model", "mtp_from", "vision_from", "max_pixels", "drafter"),
        *("state_dir", "mode", "mtp_depth", "memory_limit"),
    }
)
@json_option
def check(as_json: bool, **options: Any) -> None:
    """Say how this machine would serve a model, and serve nothing."""
    # Nothing is served, so the model needs no name for requests.
    settings, _ = read_settings({"model_alias": "check", **options})
    start_logging("warning")
    require_mlx()
    from omlx_worker.check import described, examine

    try:
        found = examine(settings)
    except ModelError as error:
        fail(INVALID, by_source(str(error)))
    write(json.dumps(found, default=asdict) + "\n" if as_json else described(found))
