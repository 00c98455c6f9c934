"""``omlx-worker check`` and ``convert``: a checkpoint before it is served."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from omlx_producer.program import INTERRUPTED, INVALID, fail, json_option, option, say
from omlx_producer.terminal import in_units, write
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.logs import start_logging
from omlx_worker.options import ModelCommand, read_settings, require_mlx, settings_options


@click.command(cls=ModelCommand)
@settings_options(
    {
        *("model", "mtp_from", "draft_model", "state_dir"),
        *("mode", "mtp_depth", "lookup", "memory_limit"),
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
        fail(INVALID, str(error))
    write(json.dumps(found, default=asdict) + "\n" if as_json else described(found))


@click.command()
@click.argument("original", metavar="ORIGINAL")
@option("-o", "--output", metavar="FOLDER", type=Path, required=True, help="The new folder.")
@option(
    "--bits",
    type=click.Choice((4, 5, 6, 8)),
    help="Bits of quantised weights; else none is quantised.",
)
@option(
    "--group-size",
    type=click.Choice((32, 64, 128)),
    help="Weights that share a scale, with --bits.  [default: 64]",
)
@option(
    "--dtype",
    type=click.Choice(("bfloat16", "float16", "float32")),
    help="Precision of all other weights; else the original's.",
)
def convert(original: str, output: Path, **options: Any) -> None:
    """Convert a checkpoint to MLX, and keep its MTP head.

    ORIGINAL is a folder or a Hugging Face id, as its makers published it. Files that are in the
    cache of Hugging Face are not downloaded again.
    """
    require_mlx()
    from omlx_worker.engine.loading.conversion import Conversion

    if options["group_size"] and not options["bits"]:
        fail(INVALID, f"--group-size: got {options['group_size']}, but no --bits; give both")
    start_logging("warning")
    try:
        conversion = Conversion(original, output, **options)
        download = f"downloads {in_units(conversion.download)}, " if conversion.download else ""
        say(
            f"{download}writes about {in_units(conversion.size)} to {output}, and takes about "
            f"{in_units(conversion.memory)} of memory"
        )
        conversion.run()
    except ModelError as error:
        fail(INVALID, str(error))
    except KeyboardInterrupt:
        say(f"interrupted; {output} is not made")
        raise click.exceptions.Exit(INTERRUPTED) from None
    size = in_units(sum(path.stat().st_size for path in output.iterdir()))
    say(f"{output} has {size}, its MTP head included; serve it with:")
    write(f"omlx-worker run -m {shlex.quote(str(output))}\n")
