"""``--model`` several times: each with options of its own."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import click

from omlx_producer.program import INVALID, fail
from omlx_worker.options import SECTIONS, ModelCommand, by_model, read_settings
from omlx_worker.settings import WorkerSettings

OF_A_MODEL = {*SECTIONS["Model"], *SECTIONS["Decoding"]} - {"switch_after", "state_dir"}
"""The options that each model may have for itself; all others are the worker's."""

_OTHERS = f"{__name__}.others"


class ModelsCommand(ModelCommand):
    """A command that takes ``--model`` several times, each followed by the model's own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        common, *models = by_model(args)
        first, *others = models or [[]]
        parsed = [
            self.make_context(ctx.info_name, common + each, parent=ctx.parent) for each in others
        ]
        ctx.meta[_OTHERS] = [each.params for each in parsed]
        return super().parse_args(ctx, common + first)

    @staticmethod
    def others(ctx: click.Context) -> list[dict[str, Any]]:
        """The options of the second model and those after it."""
        others: list[dict[str, Any]] = ctx.meta[_OTHERS]
        return others


def read_models(
    options: Sequence[Mapping[str, Any]],
) -> tuple[list[WorkerSettings], Container[str]]:
    """The settings of each model, and the names of those from the command line.

    Wrong ones end the program with a sentence.

    Args:
        options: of each model; those of the worker may be anywhere.
    """
    shared = {
        name: value
        for each in options
        for name, value in each.items()
        if value is not None and name not in OF_A_MODEL
    }
    read = [read_settings({**each, **shared}) for each in options]
    models, given = [settings for settings, _ in read], read[0][1]
    aliases = [model.alias for model in models]
    for alias in aliases:
        if aliases.count(alias) > 1:
            fail(
                INVALID,
                f"--model: got two models that are called {alias}; "
                "give each a name with --model-alias after its --model",
            )
    return models, given
