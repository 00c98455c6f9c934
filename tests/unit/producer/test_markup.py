"""A text is taken apart at its markers, in whatever pieces it comes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.wire import markup as module
from omlx_producer.wire.markup import Markup, Part, Reply, Splitter, read
from tests.helpers.markups import between

MARKS = between(("<think>", "</think>"), ("<call>", "</call>"))
BARE = between(("<think>", "</think>"), bare=True)
OPENED = MARKS.model_copy(update={"first": "reasoning"})
EARLY = MARKS.model_copy(update={"early": ("<think>",)})
BY_TOKEN = MARKS.model_copy(update={"by_token": {"<think>": 0, "</think>": 2, "<call>": 0}})


@pytest.mark.parametrize(
    ("text", "markup", "reply"),
    [
        ("plain\n", MARKS, Reply("plain\n")),
        ("", MARKS, Reply()),
        ("<think>\nhm\n</think>\n\nYes.", MARKS, Reply("Yes.", "hm")),
        ("hm\n</think>\nYes.", OPENED, Reply("Yes.", "hm")),
        ("cut\n", OPENED, Reply("", "cut\n")),
        ("I call.\n<call>\n{}\n</call>\n<call>1</call>", MARKS, Reply("I call.", "", ["{}", "1"])),
        ("a<call>1</call>b<call></call>\n", MARKS, Reply("a\nb", "", ["1", ""])),
        ("<think>a</think>b<think>c</think>", MARKS, Reply("b", "a\nc")),
        ("<think><call></think>", MARKS, Reply("", "<call>")),
        ("\n<think>a</think>b<think>c</think>", EARLY, Reply("b<think>c</think>", "a")),
        ("<think>a</think>b<call>1</call><think>", EARLY, Reply("b\n<think>", "a", ["1"])),
        ("a <cal", MARKS, Reply("a <cal")),
        ("<call>cut </cal", MARKS, Reply("", "", ["cut </cal"])),
        ("[C]f[C]g", between(call=("[C]", "")), Reply("", "", ["f[C]g"])),
        ("<think>", Markup(), Reply("<think>")),
        ('{"a": {}} {', BARE, Reply("", "", ['{"a": {}} {'])),
        ("\n {", BARE, Reply("", "", ["\n {"])),
        ("<think>{</think>\n{}", BARE, Reply("", "{", ["{}"])),
        ("a {}", BARE, Reply("a {}")),
    ],
)
def test_a_text_is_taken_apart(text: str, markup: Markup, reply: Reply) -> None:
    found = read(text, markup)
    assert (found.content, found.reasoning, found.calls) == (
        reply.content,
        reply.reasoning,
        reply.calls,
    )


def test_calls_are_taken_for_content_on_demand() -> None:
    text = "hm</think>I call.\n<call>\n{\n</call>"
    assert read(text, OPENED, calls=False).content == "I call.\n<call>\n{\n</call>"


PIECES = ["a", "{", " ", "\n", "<think>", "</think>", "<call>", "</call>", "<", "<th", "</"]


def split_simply(text: str, markup: Markup, marks: set[int]) -> list[tuple[Part, str]]:
    """The parts of a whole text by their definition."""
    part: Part = markup.first
    parts: list[tuple[Part, str]] = []
    length = len(text)

    def counts(found: re.Match[str]) -> bool:
        place = markup.by_token.get(found[0])
        if found[0] in markup.early and part == "content":
            said = [text for part, text in parts if part == "content"]
            return not "".join([*said, text[: found.start()]]).strip()
        return place is None or length - len(text) + found.start() + place in marks

    while True:
        edges = markup.after(part)
        first = part == "content" and (not parts or parts[-1][0] == "reasoning")
        if markup.bare and first and text.lstrip().startswith("{"):
            return [*parts, ("call", text)]
        found = re.finditer("|".join(map(re.escape, edges)), text) if edges else ()
        marker = next(filter(counts, found), None)
        if marker is None:
            return [*parts, (part, text)]
        parts.append((part, text[: marker.start()].rstrip("\n")))
        part, text = edges[marker[0]], text[marker.end() :].lstrip("\n")


def joined(parts: list[str]) -> str:
    return "\n".join(filter(None, parts))


@given(
    st.lists(st.sampled_from(PIECES)),
    st.data(),
    st.sampled_from([MARKS, OPENED, EARLY, BARE, BY_TOKEN, between(call=("<call>", "")), Markup()]),
)
def test_the_parts_do_not_depend_on_how_the_text_comes(
    pieces: list[str], data: st.DataObject, markup: Markup
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    marks = data.draw(st.sets(st.sampled_from(range(len(text))))) if text else set()
    splitter, reply = Splitter(markup), Reply()
    for start, end in itertools.pairwise(cuts):
        for span in splitter.feed(text[start:end], [at for at in marks if start <= at < end]):
            reply.add(span)
    for span in splitter.end():
        reply.add(span)
    whole, parts = read(text, markup, marks), split_simply(text, markup, marks)
    assert (reply.content, reply.reasoning, reply.calls) == (
        whole.content,
        whole.reasoning,
        whole.calls,
    )
    assert (reply.content, reply.reasoning, reply.calls) == (
        joined([text for part, text in parts if part == "content"]),
        joined([text for part, text in parts if part == "reasoning"]),
        [text for part, text in parts if part == "call"],
    )


class Counting:
    """A pattern that counts the characters it has to search."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self.pattern, self.characters = pattern, 0

    def search(self, text: str, at: int) -> re.Match[str] | None:
        self.characters += len(text) - at
        return self.pattern.search(text, at) if self.pattern else None


@pytest.mark.parametrize("markup", [MARKS, BARE])
@pytest.mark.parametrize("space", ["\n", "\n \n"])
def test_what_was_searched_is_not_searched_again(
    markup: Markup, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module._pattern

    def counting(edges: Mapping[str, Part]) -> Counting:
        return Counting(made(edges))

    monkeypatch.setattr(module, "_pattern", counting)
    splitter = Splitter(markup)
    for _ in range(1000):
        list(splitter.feed(space))
    assert isinstance(splitter._marker, Counting)
    assert splitter._marker.characters <= 1000 * len(space)


@pytest.mark.timeout(60)  # milliseconds if each character is looked at once
def test_a_run_of_line_ends_takes_no_longer_than_other_text() -> None:
    text = "a" + "\n" * 200_000 + "b"
    assert read(text, MARKS).content == text
    splitter = Splitter(MARKS)
    told = [span.text for character in text[:50_000] for span in splitter.feed(character)]
    assert told == ["a"]


@pytest.mark.parametrize("cut", range(4))
def test_a_bare_call_keeps_its_line_ends_however_it_comes(cut: int) -> None:
    splitter, reply = Splitter(BARE), Reply()
    for piece in ("{\n}"[:cut], "{\n}"[cut:]):
        for span in splitter.feed(piece):
            reply.add(span)
    assert reply.calls == ["{\n}"]


def test_text_is_held_back_only_while_it_may_be_a_marker() -> None:
    splitter = Splitter(MARKS)
    heard = ["".join(span.text for span in splitter.feed(piece)) for piece in "ab <x\n\nc"]
    assert heard == ["a", "b", " ", "", "<x", "", "", "\n\nc"]


HARMONY = Markup(
    first="nothing",
    edges={
        "content": {"<c>": "nothing", "<e>": "nothing"},
        "reasoning": {"<c>": "nothing", "<e>": "nothing"},
        "nothing": {"<m>": "content"},
    },
    headers={"<c>analysis": "reasoning"},
    kept={"<c>": 3},
)


@given(
    st.lists(st.sampled_from(["a", "\n", "<c>", "<e>", "<m>", "analysis", "final", "x" * 150])),
    st.data(),
)
def test_headers_do_not_depend_on_how_the_text_comes(
    pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    splitter, reply = Splitter(HARMONY), Reply()
    for start, end in itertools.pairwise(cuts):
        for span in splitter.feed(text[start:end]):
            reply.add(span)
    for span in splitter.end():
        reply.add(span)
    whole = read(text, HARMONY)
    assert (reply.content, reply.reasoning) == (whole.content, whole.reasoning)


def test_a_text_after_a_message_without_a_header_is_content() -> None:
    assert read("<c>analysis<m>Hm.<e>It is.", HARMONY) == Reply("It is.", "Hm.")
    assert read("<c>analysis<m>Hm.<e>It is.", HARMONY, cut=True).content == ""
    assert read("<c>analysis<m>Hm.<e><c>fin", HARMONY).content == ""
    assert read("In my analysis:<c>final<m>It is.", HARMONY) == Reply("It is.")
    long = "It is. " * 50
    assert read(f"{long}<c>final<m>So.", HARMONY).content == f"{long}\nSo."
