"""How the text of a chat marks thinking and calls of tools, and how it is taken apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

Part = Literal["content", "reasoning", "call"]

_SPACE, _LINE_ENDS = re.compile(r"\s+"), re.compile(r"\n+")


class Markup(BaseModel):
    """The markers in a model's text; "" where the model has none.

    Line ends beside a marker belong to it. A call without an end marker lasts until the text ends.

    Attributes:
        thinks: whether the prompt has opened the thinking, so that the text begins inside it.
        bare: whether content that begins with a brace is a call up to the end of the text.
        by_token: markers that count only where a token writes them, not where other tokens spell
            them. Each with the place in it where that token's text begins.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    think_start: str = ""
    think_end: str = ""
    call_start: str = ""
    call_end: str = ""
    thinks: bool = False
    bare: bool = False
    by_token: dict[str, int] = {}

    def after(self, part: Part) -> dict[str, Part]:
        """The markers that end a part, each with the part that it begins."""
        edges: dict[str, Part]
        if part == "reasoning":
            edges = {self.think_end: "content"}
        elif part == "call":
            edges = {self.call_end: "content"}
        else:
            edges = {self.think_start: "reasoning", self.call_start: "call"}
        edges.pop("", None)
        return edges


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one part.

    Attributes:
        opens: set at the start of a part after a marker.
        at: characters of the whole text before it.
    """

    part: Part
    text: str
    opens: bool = False
    at: int = 0


class Splitter:
    """Takes one text apart as it comes. Text that may yet be a marker is held back."""

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        # White space that belongs to what follows it, and after it what may begin a marker.
        self._gap: list[str] = []
        self._held = ""
        # Characters before those held back, and the marks so far.
        self._before = 0
        self._marks: set[int] = set()
        self._part: Part = "reasoning" if markup.thinks else "content"
        self._opens = self._after_marker = False
        self._may_be_bare = markup.bare
        self._edges = markup.after(self._part)
        self._marker = _pattern(self._edges)

    def feed(self, text: str, marks: Collection[int] = ()) -> Iterator[Span]:
        """The spans that are certain with this further text.

        Args:
            marks: see `omlx_producer.wire.events.ChoiceDelta`.
        """
        self._marks.update(marks)
        text, at = self._held + text, 0
        while True:
            if self._after_marker:
                at = _past(_LINE_ENDS, text, at)
                self._after_marker = at == len(text)
            if self._may_be_bare and self._part == "content":
                begun = _past(_SPACE, text, at)
                self._may_be_bare = begun == len(text)
                if text.startswith("{", begun):
                    self._enter("call")
                    self._after_marker = False
            found = self._found(text, at)
            if found is None:
                break
            before = self._from_gap(text[at : found.start()])
            start = self._before + found.start() - len(before)
            yield from self._span(before.rstrip("\n"), start)
            at = found.end()
            self._enter(self._edges[found[0]])
        self._before += at
        yield from self._certain(text[at:])

    def _found(self, text: str, at: int) -> re.Match[str] | None:
        """The next marker that counts."""
        found = self._marker.search(text, at) if self._marker else None
        while found and self._marker and not self._counts(found):
            found = self._marker.search(text, found.start() + 1)
        return found

    def _counts(self, found: re.Match[str]) -> bool:
        place = self._markup.by_token.get(found[0])
        return place is None or self._before + found.start() + place in self._marks

    def end(self) -> Iterator[Span]:
        """What was held back: the text ends here."""
        end = self._before + len(self._held)
        text, self._held = self._from_gap(self._held), ""
        yield from self._span(text, end - len(text))

    def _certain(self, text: str) -> Iterator[Span]:
        """Hold back the end of a text without a whole marker; the rest is certain."""
        begun = len(text) - max((_begun(text, marker) for marker in self._edges), default=0)
        text, self._held = text[:begun], text[begun:]
        certain = text.rstrip("\n") if self._edges else text
        if self._may_be_bare and self._part == "content":
            certain = ""
        end, gap = self._before + len(certain), text[len(certain) :]
        self._before += begun
        told = self._from_gap(certain) if certain else ""
        yield from self._span(told, end - len(told))
        self._gap += [gap] if gap else []

    def _from_gap(self, text: str) -> str:
        """A text with the gap before it, which is then empty."""
        text = "".join([*self._gap, text])
        self._gap.clear()
        return text

    def _span(self, text: str, at: int) -> Iterator[Span]:
        if text or self._opens:
            yield Span(self._part, text, self._opens, at)
            self._opens = False

    def _enter(self, part: Part) -> None:
        self._may_be_bare = self._markup.bare and self._part == "reasoning"
        self._part, self._opens, self._after_marker = part, True, True
        self._edges = self._markup.after(part)
        self._marker = _pattern(self._edges)


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _begun(text: str, marker: str) -> int:
    """Characters of a marker that a text ends with."""
    return max(length for length in range(len(marker)) if text.endswith(marker[:length]))


def _pattern(edges: Mapping[str, Part]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, edges))) if edges else None


@dataclass(slots=True)
class Reply:
    """The parts of a text so far. Several of one kind are joined, calls stay apart.

    Attributes:
        calls: the texts between markers of calls.
        in_call: whether the text so far ends inside the last call.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    in_call: bool = False
    _parted: bool = False

    def add(self, span: Span) -> str:
        """Take in a span; returns what it adds to the content or the reasoning."""
        self.in_call = span.part == "call"
        if self.in_call:
            self.calls += [""] if span.opens else []
            self.calls[-1] += span.text
            return ""
        before = self.content if span.part == "content" else self.reasoning
        self._parted = bool(before) if span.opens else self._parted
        added = f"\n{span.text}" if span.text and self._parted else span.text
        self._parted = self._parted and not span.text
        if span.part == "content":
            self.content += added
        else:
            self.reasoning += added
        return added


class StreamedReply:
    """Takes a text apart as it comes.

    What follows a call is held back: if the call turns out to be none, it is content too.
    """

    def __init__(self, markup: Markup) -> None:
        self.so_far = Reply()
        self._splitter = Splitter(markup)

    def feed(self, text: str, marks: Collection[int] = ()) -> Iterator[tuple[Span, str]]:
        """The spans that may be sent, each with what it adds to its part."""
        for span in self._splitter.feed(text, marks):
            if span.part == "call" or not self.so_far.calls:
                yield span, self.so_far.add(span)


def read(text: str, markup: Markup, marks: Collection[int] = (), *, calls: bool = True) -> Reply:
    """The parts of a whole text.

    Args:
        marks: see `omlx_producer.wire.events.ChoiceDelta`.
        calls: False takes calls for content.
    """
    if not calls:
        markup = markup.model_copy(update={"call_start": "", "call_end": "", "bare": False})
    splitter, reply = Splitter(markup), Reply()
    for span in (*splitter.feed(text, marks), *splitter.end()):
        reply.add(span)
    return reply
