"""Formats of texts in JSON schemas, as patterns. llguidance's own let more through.

Dates are days of the calendar from year 0001 on. Times have no leap second, at most 9 digits of a
fraction, and capital letters. Names of hosts have at most 253 characters.
"""

from __future__ import annotations

from typing import Any

from omlx_producer.client.patterns import exact_pattern
from omlx_producer.wire.json_schema import NAMED

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_LONG, _SHORT = "(?:0[13578]|1[02])", "(?:0[469]|11)"
_DAY = f"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:{_LONG}|{_SHORT})-(?:29|30)|{_LONG}-31)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_MINUTE})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
}

_NO_SCHEMAS = ("const", "default", "enum", "examples")


def exact_schema(schema: Any) -> Any:
    """A JSON schema that llguidance reads as JSON Schema does: its patterns, and its formats as
    patterns."""
    if isinstance(schema, list):
        return [exact_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, held in schema.items():
        if keyword in NAMED and isinstance(held, dict):
            is_pattern = keyword == "patternProperties"
            made[keyword] = {
                exact_pattern(name) if is_pattern else name: exact_schema(inner)
                for name, inner in held.items()
            }
        elif keyword == "pattern" and isinstance(held, str):
            made[keyword] = exact_pattern(held)
        else:
            made[keyword] = held if keyword in _NO_SCHEMAS else exact_schema(held)
    wanted = made.get("format")
    if wanted == "unknown":
        # llguidance takes any text for this name. It refuses others that it does not know.
        made["format"] = f"{wanted} "
    others: Any = made.get("allOf", [])
    if isinstance(wanted, str) and wanted in _FORMATS and isinstance(others, list):
        del made["format"]
        made["allOf"] = [*others, _FORMATS[wanted]]
    return made
