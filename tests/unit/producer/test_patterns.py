"""Patterns of JSON schemas match what ECMAScript's do."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from omlx_producer.client.compiling import grammar_of_schema

BYTES = LLTokenizer("byte")


def takes(text: str, **schema: object) -> bool:
    matcher = LLMatcher(BYTES, grammar_of_schema(json.dumps(schema)))
    tokens = list(json.dumps(text, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^.$", ["a", "\u0085", "😀"], ["\n", "\r", "\u2028", "\u2029"]),
        (r"^\s$", [" ", "\t", "\u00a0", "\ufeff"], ["\u0085", "a"]),
        (r"^[^\S,]$", [" ", "\ufeff"], ["\u0085", "a", ","]),
        (r"^\S$", ["a", "\u0085"], ["\ufeff", "\u2028"]),
        (r"^[\s,]$", ["\ufeff", ","], ["\u0085", "s"]),
        (r"^[\d\w]$", ["1", "_"], ["٣", "é"]),
        ("^[a-z&&[^b]]$", ["b]", "&]", "^]"], ["a", "b", "B]"]),
        ("^[[a]$", ["[", "a"], ["]"]),
        ("^[+--]$", ["+", ",", "-"], ["*", "."]),
        ("^[-a~~-]$", ["-", "a", "~"], ["b"]),
        ("^[^]$", ["a", "\n", "]"], ["", "ab"]),
        (r"^[\]\\]$", ["]", "\\"], ["a"]),
        (r"^\u0041\p{Lu}\u{1F600}\[.\]$", ["AÉ😀[x]"], ["AÉ😀."]),
    ],
)
def test_a_pattern_matches_what_ecmascripts_does(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not takes(text, type="string", pattern=pattern)] == []
    assert [text for text in wrong if takes(text, type="string", pattern=pattern)] == []


def test_names_of_properties_have_the_same_patterns() -> None:
    schema = json.dumps({"patternProperties": {"^[[a]$": {}}, "additionalProperties": False})
    matcher = LLMatcher(BYTES, grammar_of_schema(schema))

    assert matcher.try_consume_tokens(list(b'{"[": 1}')) == 8


@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
@given(st.text("ab-^&~[,", min_size=1, max_size=6), st.sampled_from("ab-^&~[,.c"))
def test_the_items_of_a_class_are_letters_and_ranges(items: str, letter: str) -> None:
    try:
        # Python reads them as ECMAScript does, and warns of what it may have one day.
        python = re.compile(f"^[x{items}]$")
    except re.error:
        return
    assert takes(letter, type="string", pattern=f"^[x{items}]$") == bool(python.match(letter))
