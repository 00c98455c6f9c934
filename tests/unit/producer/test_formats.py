"""Texts of a format are what the standards and Python's own parsers take."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from omlx_producer.client.compiling import grammar_of_schema
from omlx_producer.client.formats import exact_schema

BYTES = LLTokenizer("byte")


@functools.cache
def start(form: str) -> LLMatcher:
    schema = json.dumps({"type": "string", "format": form})
    return LLMatcher(BYTES, grammar_of_schema(schema))


def takes(form: str, text: str) -> bool:
    matcher, tokens = start(form).deep_copy(), list(json.dumps(text).encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def is_read(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_a_date_is_a_day_of_the_calendar() -> None:
    years = ("0000", "0001", "0004", "0100", "0400", "1900", "2000", "2023", "2024", "9999")
    for year, month, day in itertools.product(years, range(14), range(33)):
        text = f"{year}-{month:02}-{day:02}"
        assert takes("date", text) == is_read(date.fromisoformat, text), text
    for year in range(0, 10_000, 4):
        assert takes("date", f"{year:04}-02-29") == is_read(date.fromisoformat, f"{year:04}-02-29")


@given(
    st.datetimes(),
    st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
def test_any_moment_can_be_said(moment: datetime, zone: timezone) -> None:
    said = moment.replace(tzinfo=zone).isoformat()
    assert takes("date-time", said)
    assert takes("date", said[:10])
    assert takes("time", said[11:])
    assert takes("date-time", moment.replace(tzinfo=UTC).isoformat().replace("+00:00", "Z"))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("time", "00:00:60Z"),
        ("time", "24:00:00Z"),
        ("time", "00:00:00z"),
        ("time", "00:00:00"),
        ("time", "00:00:00+24:00"),
        ("date-time", "2023-02-29T00:00:00Z"),
        ("date-time", "2024-02-29t00:00:00Z"),
        ("date-time", "2024-02-29 00:00:00Z"),
        ("hostname", ".".join(["a" * 63] * 4)),
        ("hostname", "a" * 64),
        ("hostname", "-a"),
        ("hostname", "a-.b"),
        ("hostname", "a..b"),
        ("hostname", ""),
    ],
)
def test_what_is_no_such_text_is_refused(form: str, text: str) -> None:
    assert not takes(form, text)


def test_a_host_may_have_a_name_as_long_as_names_are() -> None:
    assert takes("hostname", ".".join(["a" * 63] * 4)[:253])


def is_host(text: str) -> bool:
    label = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
    return len(text) <= 253 and all(map(label.fullmatch, text.split(".")))


@pytest.mark.parametrize(
    ("form", "is_right"),
    [
        ("date", lambda text: is_read(date.fromisoformat, text)),
        ("time", lambda text: is_read(time.fromisoformat, text) and len(text) > 8),
        ("date-time", lambda text: is_read(datetime.fromisoformat, text) and len(text) > 19),
        ("hostname", is_host),
    ],
)
def test_whatever_a_model_is_led_to_is_such_a_text(
    form: str, is_right: Callable[[str], bool]
) -> None:
    draw = random.Random(5)
    for _ in range(40):
        matcher, written = start(form).deep_copy(), bytearray()
        while not matcher.is_stopped():
            mask = matcher.compute_logit_bias()
            token = draw.choice([token for token in range(256) if mask[token]] or [256])
            written += bytes([token]) if token < 256 else b""
            if token == 256 or not matcher.consume_token(token):
                break
        assert is_right(json.loads(written)), written


def test_formats_are_replaced_wherever_a_schema_is() -> None:
    day = {"type": "string", "format": "date"}
    held = exact_schema(day)
    assert held == {"type": "string", "allOf": [{"pattern": held["allOf"][0]["pattern"]}]}
    for schema, wanted in (
        ({"items": day}, {"items": held}),
        ({"anyOf": [day, {"type": "null"}]}, {"anyOf": [held, {"type": "null"}]}),
        ({"$defs": {"format": day}, "$ref": "#/$defs/format"}, None),
        ({"properties": {"format": day, "default": day}}, None),
        ({"enum": [day], "const": day, "default": day, "examples": [day]}, {}),
        ({"format": "email"}, {}),
        ({"format": 5, "properties": {"a": True}}, {}),
    ):
        expected: Any = json.loads(json.dumps(schema).replace(json.dumps(day), json.dumps(held)))
        assert exact_schema(schema) == (expected if wanted is None else {**schema, **wanted}), (
            schema
        )
    both = exact_schema({"format": "hostname", "allOf": [{"minLength": 3}], "pattern": "^a"})
    assert [*both] == ["allOf", "pattern"]
    assert both["allOf"][0] == {"minLength": 3}
