"""Texts as grammars of llguidance name them, in Lark's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class Spelling:
    """Spells the markers of a model.

    Args:
        added: ids of the added tokens, by their text. A grammar names them by their ids, because
            llguidance does not take them for text.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = {text: token for text, token in added.items() if not text.isspace()}
        known = sorted(self._added, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, known)) or r"(?!)")

    def first(self, text: str) -> int | None:
        """The place of the first added token in a text; None without one."""
        found = self._tokens.search(text)
        return None if found is None else found.start()

    def token(self, text: str) -> tuple[int, int, str] | None:
        """Of the first added token in a text: its place, id and text; None without one."""
        found = self._tokens.search(text)
        return found and (found.start(), self._added[found[0]], found[0])

    def literal(self, text: str) -> str:
        """A text with added tokens by their ids, the rest in quotes."""
        written, at = [], 0
        for found in self._tokens.finditer(text):
            written += [quoted(text[at : found.start()])] if found.start() > at else []
            written.append(f"<[{self._added[found[0]]}]>")
            at = found.end()
        written += [quoted(text[at:])] if at < len(text) else []
        return " ".join(written)


_LEXEMES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>', re.DOTALL)


def numbered(grammar: str, names: Mapping[str, int]) -> str:
    """A grammar with the tokens that it names, such as ``<think>``, by their ids."""

    def number(found: re.Match[str]) -> str:
        return f"<[{names[found[0]]}]>" if found[0] in names else found[0]

    return _LEXEMES.sub(number, grammar)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def literally(text: str) -> str:
    """A regular expression, in Rust's syntax, that matches exactly this text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def text_without(*markers: str) -> str:
    """Any text in which no marker occurs, whichever tokens spell it."""
    return " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){literally(text)}(?s:.*)/" for text in markers)])
