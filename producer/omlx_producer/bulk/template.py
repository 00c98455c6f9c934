"""Prompts from columns: ``Summarise: {text}``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from omlx_producer.errors import InvalidRequest


class Template:
    """A text with fields in braces; ``{{`` and ``}}`` stand for braces.

    Unlike `str.format` it looks nothing up inside of values, so that a template is no program.

    Raises:
        InvalidRequest: if braces do not match, or a field has more than a name.
    """

    def __init__(self, text: str) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidRequest(
                f"--template: got {text!r} ({error}); write {{field}} for a field and {{{{ or }}}} "
                "for a brace"
            ) from None
        for _, field, spec, conversion in parts:
            if field is not None and (spec or conversion or not field):
                raise InvalidRequest(
                    f"--template: got the field {{{field}...}}; give a name alone, and write "
                    "{{ or }} for a brace"
                )
        self._parts = [(literal, field) for literal, field, _, _ in parts]

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row.

        Raises:
            InvalidRequest: if the row lacks a field.
        """
        return "".join(
            literal + (self._value(values, field) if field is not None else "")
            for literal, field in self._parts
        )

    def _value(self, values: Mapping[str, Any], field: str) -> str:
        value = values.get(field)
        if value is None:
            known = ", ".join(name for name in values if name is not None)
            raise InvalidRequest(
                f"{field}: the template needs it and the row has none; the row has {known}"
            )
        if isinstance(value, str | datetime.date | datetime.time):
            return str(value)
        return json.dumps(value, default=str)
