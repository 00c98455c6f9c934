"""Which tokens of a row are thinking. This module imports no MLX."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from omlx_producer.wire import Markup
from omlx_producer.wire.markup import MOST_HEADER, Part

_BY_TOKEN = "\ue000"
"""Around the text of a token that writes a marker. No byte is written like it."""


@dataclass(frozen=True)
class Thinking:
    """How the tokens of a row tell its thinking.

    Attributes:
        markup: the markers in its text.
        tokens: the texts of the tokens that write `Markup.by_token`, by their ids.
        close: what ends the thinking at the budget: an end of it, and maybe a header.
        close_again: what ends thinking that begins after the budget is spent.
        bytes_of: what a token writes. From any thread.
        budget: tokens of thinking, at most, markers not counted; None without a limit.
    """

    markup: Markup
    tokens: Mapping[int, str]
    close: tuple[int, ...]
    close_again: tuple[int, ...]
    bytes_of: Callable[[int], bytes] = field(repr=False)
    budget: int | None = None

    @cached_property
    def longest(self) -> int:
        """Characters of the longest marker, as `written` writes it."""
        found = (marker for part in self.markup.edges for marker in self.markup.after(part))
        return max((len(self._by_token(marker)) for marker in found), default=0)

    @cached_property
    def edges(self) -> dict[Part, tuple[re.Pattern[str], dict[str, tuple[Part, int]]]]:
        """By the part that they end, the markers, each with the part it begins and what it keeps.

        The markers are written as `written` writes them.
        """
        made = {}
        for part in self.markup.edges:
            markers = {
                self._by_token(marker): (to, self.markup.kept.get(marker, 0))
                for marker, to in self.markup.after(part).items()
            }
            made[part] = re.compile("|".join(map(re.escape, markers)) or "(?!)"), markers
        return made

    @cached_property
    def early(self) -> frozenset[str]:
        """`Markup.early`, as `written` writes them."""
        return frozenset(map(_a_byte_each, self.markup.early))

    def written(self, token: int) -> str:
        """What a token writes, a character a byte. A token of a marker is unlike its spelling."""
        if (marker := self.tokens.get(token)) is not None:
            return f"{_BY_TOKEN}{_a_byte_each(marker)}{_BY_TOKEN}"
        return self.bytes_of(token).decode("latin-1")

    def _by_token(self, marker: str) -> str:
        place = self.markup.by_token.get(marker)
        if place is None:
            return _a_byte_each(marker)
        token = next(text for text in self.tokens.values() if marker.startswith(text, place))
        before, after = marker[:place], marker[place + len(token) :]
        return f"{_a_byte_each(before)}{_BY_TOKEN}{_a_byte_each(token)}{_BY_TOKEN}" + _a_byte_each(
            after
        )


class Thoughts:
    """Follows the thinking of one row, token by token, and holds it to its budget.

    All of it follows from the row's own tokens. So the end marker comes at one place in any
    company, at any depth and after any crash.

    Attributes:
        tokens: of its thinking so far, without markers that are complete.
    """

    def __init__(self, thinking: Thinking, generated: Iterable[int] = ()) -> None:
        self._thinking = thinking
        self._part: Part = thinking.markup.first
        self._has_content = False
        # What may begin a marker or is a header, and how many characters each token wrote of it.
        self._text, self._lengths = "", tuple[int, ...]()
        self._close, self._closing = thinking.close, 0
        self.tokens = 0
        self.commit(generated)

    @property
    def on(self) -> bool:
        """Whether the row thinks now."""
        return self._part == "reasoning"

    def commit(self, tokens: Iterable[int]) -> None:
        """Take the row's next tokens."""
        for token in tokens:
            self.feed(token)

    def feed(self, token: int) -> None:
        written = self._thinking.written(token)
        self._count_closing(token)
        self._text, self._lengths = self._text + written, (*self._lengths, len(written))
        self.tokens += self.on
        while self._part in self._thinking.edges:
            pattern, markers = self._thinking.edges[self._part]
            if (found := self._found(pattern)) is None:
                break
            if self.on:
                self.tokens -= self._tokens_from(found.start())
            to, kept = markers[found[0]]
            if self._part == "nothing":
                header = self._text[: found.start()].replace(_BY_TOKEN, "")
                to = self._thinking.markup.headed(header, to)
            if to == "reasoning" and self.nears_budget(0):
                self._close = self._thinking.close_again
            self._has_content = self._has_words(found.start())
            self._part = to
            self._forget(found.end() - kept)
        if self._part == "nothing" and len(self._text) > MOST_HEADER:
            self._part = "content"
        most = MOST_HEADER if self._part == "nothing" else self._thinking.longest - 1
        certain = max(0, len(self._text) - most)
        self._has_content = self._has_words(certain)
        self._forget(certain)

    def _found(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The next marker that counts; see `Markup.early`."""
        found = pattern.search(self._text)
        while found and found[0] in self._thinking.early and self._has_words(found.start()):
            found = pattern.search(self._text, found.start() + 1)
        return found

    def _has_words(self, characters: int) -> bool:
        """Whether the content up to a place of the text has more than space."""
        is_content = self._part == "content"
        return self._has_content or (is_content and bool(self._text[:characters].strip()))

    def _count_closing(self, token: int) -> None:
        """Count how many tokens of the close the last tokens are."""
        close, begun = self._close, self.on or self._closing
        if begun and token == close[self._closing]:
            self._closing = (self._closing + 1) % len(close)
        else:
            self._closing = int(self.on and len(close) > 1 and token == close[0])

    def _tokens_from(self, place: int) -> int:
        """How many tokens begin at a place of the text or after it."""
        count, begins = 0, len(self._text)
        for length in reversed(self._lengths):
            begins -= length
            if begins < place:
                break
            count += 1
        return count

    def _forget(self, characters: int) -> None:
        """Drop the beginning of the text."""
        self._text = self._text[characters:]
        lengths, left = list[int](), len(self._text)
        for length in reversed(self._lengths):
            if left <= 0:
                break
            lengths.append(min(length, left))
            left -= length
        self._lengths = tuple(reversed(lengths))

    @property
    def forced(self) -> int | None:
        """The only token that may come next: one that ends the thinking, at the budget, or with
        the character that has begun there; None for any.
        """
        goes_on = (self.on and not _is_partial(self._text)) or self._closing
        return self._close[self._closing] if goes_on and self.nears_budget(0) else None

    def nears_budget(self, tokens: int) -> bool:
        """Whether a token may be forced after the next ``tokens``."""
        budget = self._thinking.budget
        return budget is not None and self.tokens + tokens >= budget


def _is_partial(text: str) -> bool:
    """Whether a text of a character a byte ends within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text[-3:].encode("latin-1", "ignore"))
    return bool(decoder.getstate()[0])


def _a_byte_each(text: str) -> str:
    return text.encode().decode("latin-1")
