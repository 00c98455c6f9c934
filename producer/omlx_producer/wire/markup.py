"""How the text of a chat marks thinking and calls of tools, and how it is taken apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

Part = Literal["content", "reasoning", "call", "nothing"]

_SPACE, _LINE_ENDS = re.compile(r"\s+"), re.compile(r"\n+")

MOST_HEADER = 256
"""Characters of the longest header. A longer text without its end is no header but content."""


class Markup(BaseModel):
    """The parts of a model's text, and the markers that lead from one to the next.

    Line ends beside a marker belong to it. A part without the marker of its end lasts until the
    text ends. What is in no part, such as the header of a channel, is ``nothing``: it is told
    nowhere, but before a call, whose text it begins.

    Attributes:
        first: the part in which the text begins, after what the prompt has opened.
        edges: by the part that they end, the markers, each with the part that it begins.
        headers: words that choose the part after ``nothing`` where its text holds one, in place of
            that of the marker. The first one decides.
        kept: of a marker, the characters at its end that belong to what follows.
        by_token: markers that count only where a token writes them, not where other tokens spell
            them. Each with the place in it where that token's text begins.
        early: markers that count only before the first word of the content. No token writes them,
            so later they are words of an answer that speaks of them.
        bare: whether content that begins with a brace is a call up to the end of the text.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    first: Part = "content"
    edges: dict[Part, dict[str, Part]] = {}
    headers: dict[str, Part] = {}
    kept: dict[str, int] = {}
    by_token: dict[str, int] = {}
    early: tuple[str, ...] = ()
    bare: bool = False

    def after(self, part: Part) -> dict[str, Part]:
        """The markers that end a part, each with the part that it begins."""
        return self.edges.get(part, {})

    def headed(self, header: str, part: Part) -> Part:
        """The part after a header, which would be ``part`` without a word that chooses."""
        return next((to for word, to in self.headers.items() if word in header), part)

    def without_calls(self) -> Markup:
        """The same, with calls as a part of the text around them."""
        edges: dict[Part, dict[str, Part]] = {
            part: {marker: to for marker, to in after.items() if to != "call"}
            for part, after in self.edges.items()
        }
        headers: dict[str, Part] = {
            word: "content" if to == "call" else to for word, to in self.headers.items()
        }
        return self.model_copy(update={"edges": edges, "headers": headers, "bare": False})


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
    """Takes one text apart as it comes. Text that may yet be a marker is held back.

    Attributes:
        part: in which the text so far ends.
    """

    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        # White space that belongs to what follows it, and after it what may begin a marker.
        self._gap: list[str] = []
        self._held = ""
        # Characters before those held back, and the marks so far.
        self._before = 0
        self._marks: set[int] = set()
        self.part: Part = markup.first
        self._has_content = False
        # Whether what begins here has been taken for a header already.
        self._is_no_header = False
        self._opens = self._after_marker = False
        self._may_be_bare = markup.bare
        self._edges = markup.after(self.part)
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
            if self._may_be_bare and self.part == "content":
                begun = _past(_SPACE, text, at)
                self._may_be_bare = begun == len(text)
                if text.startswith("{", begun):
                    self._enter("call")
                    self._after_marker = False
            found = self._found(text, at + self._is_no_header)
            self._is_no_header = False
            if found is None:
                break
            part = self._edges[found[0]]
            if self.part == "nothing" and found.start() - at > MOST_HEADER:
                self._give_up_header()
                continue
            if self.part == "nothing":
                yield from self._headed(text[at : found.start()], found, part)
                at = found.end()
                continue
            before = self._from_gap(text[at : found.start()])
            start = self._before + found.start() - len(before)
            yield from self._span(before.rstrip("\n"), start)
            at = found.end() - self._markup.kept.get(found[0], 0)
            self._enter(part)
        self._before += at
        yield from self._certain(text[at:])

    def _headed(self, header: str, end: re.Match[str], part: Part) -> Iterator[Span]:
        """Begin the part after a header. A call has its header in its text."""
        self._enter(self._markup.headed(header, part))
        if self.part == "call":
            self._after_marker = False
            yield from self._span(header + end[0], self._before + end.start() - len(header))

    def _found(self, text: str, at: int) -> re.Match[str] | None:
        """The next marker that counts."""
        found = self._marker.search(text, at) if self._marker else None
        while found and self._marker and not self._counts(found, at):
            found = self._marker.search(text, found.start() + 1)
        return found

    def _counts(self, found: re.Match[str], at: int = 0) -> bool:
        """Whether a marker counts, after the text of its part from ``at`` on."""
        place = self._markup.by_token.get(found[0])
        if place is not None:
            return self._before + found.start() + place in self._marks
        return not self._is_late(found[0], found.string, at, found.start())

    def _is_late(self, marker: str, text: str, at: int, start: int) -> bool:
        """Whether a marker has words of the content before it that it must not have.

        Args:
            at, start: where the text of its part and the marker begin.
        """
        if marker not in self._markup.early or self.part != "content":
            return False
        return self._has_content or _past(_SPACE, text, at) < start

    def end(self, *, cut: bool = False) -> Iterator[Span]:
        """What was held back: the text ends here.

        Args:
            cut: whether it ends before its end. What may begin a marker is then dropped.
        """
        if cut and self._held and self.part != "nothing":
            self._before += len(self._held)
            self._held = ""
        if self.part == "nothing":
            if not (cut or self._has_header(self._held)):
                self._give_up_header()
                yield from self.feed("")
                yield from self.end()
            return
        end = self._before + len(self._held)
        text, self._held = self._from_gap(self._held), ""
        yield from self._span(text, end - len(text))

    def _give_up_header(self) -> None:
        """Take what was held back as a header for content, which it is without its end."""
        self._enter("content")
        self._after_marker, self._is_no_header = False, True

    def _has_header(self, text: str) -> bool:
        """Whether a marker that begins a header is in a text."""
        begins = [each for each, to in self._markup.after("content").items() if to == "nothing"]
        return any(
            self._counts(found)
            for marker in begins
            for found in re.finditer(re.escape(marker), text)
        )

    def _certain(self, text: str) -> Iterator[Span]:
        """Hold back the end of a text without a whole marker; the rest is certain."""
        if self.part == "nothing":
            self._held = text
            begun = max((self._begun(text, marker) for marker in self._edges), default=0)
            if len(text) - begun > MOST_HEADER:
                self._give_up_header()
                yield from self.feed("")
            return
        begun = len(text) - max((self._begun(text, marker) for marker in self._edges), default=0)
        text, self._held = text[:begun], text[begun:]
        certain = text.rstrip("\n") if self._edges else text
        if self._may_be_bare and self.part == "content":
            certain = ""
        end, gap = self._before + len(certain), text[len(certain) :]
        self._before += begun
        told = self._from_gap(certain) if certain else ""
        yield from self._span(told, end - len(told))
        self._gap += [gap] if gap else []

    def _begun(self, text: str, marker: str) -> int:
        """Characters at the end of a text that may begin a marker."""
        begun = _begun(text, marker)
        # If a token writes its beginning, this is that token.
        by_token = begun and self._markup.by_token.get(marker) == 0
        at = self._before + len(text) - begun
        no_token = by_token and at not in self._marks
        return 0 if no_token or self._is_late(marker, text, 0, len(text) - begun) else begun

    def _from_gap(self, text: str) -> str:
        """A text with the gap before it, which is then empty."""
        text = "".join([*self._gap, text])
        self._gap.clear()
        return text

    def _span(self, text: str, at: int) -> Iterator[Span]:
        if text or self._opens:
            yield Span(self.part, text, self._opens, at)
            self._opens = False
        if self.part == "content":
            self._has_content = self._has_content or bool(text.strip())

    def _enter(self, part: Part) -> None:
        self._may_be_bare = self._markup.bare and self.part == "reasoning"
        self._opens = self._opens or part != self.part or part == "call"
        self.part, self._after_marker = part, True
        self._edges = self._markup.after(part)
        self._marker = _pattern(self._edges)


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _begun(text: str, marker: str) -> int:
    """Characters of a marker that a text ends with, less than all."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


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


def read(
    text: str,
    markup: Markup,
    marks: Collection[int] = (),
    *,
    calls: bool = True,
    cut: bool = False,
) -> Reply:
    """The parts of a whole text.

    Args:
        marks: see `omlx_producer.wire.events.ChoiceDelta`.
        calls: False takes calls for content.
        cut: see `Splitter.end`.
    """
    splitter, reply = Splitter(markup if calls else markup.without_calls()), Reply()
    for span in (*splitter.feed(text, marks), *splitter.end(cut=cut)):
        reply.add(span)
    return reply
