"""Help whose options come in titled sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command whose help shows each option under the title of its section.

    Sections come in the order of their first options, and options without one at the end.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, _Option)):
            if (record := param.get_help_record(ctx)) is not None:
                title = param.section if isinstance(param, _Option) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _Option(click.Option):
    def __init__(self, *args: Any, section: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


def option(*names: str, section: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """`click.option` in a section of the help of a `SectionedCommand`."""
    return click.option(*names, cls=_Option, section=section, **attributes)
