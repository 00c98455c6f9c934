"""What a consumer has had of a job, and what a stream that is read again adds to it.

A killed Redis server may come back without the last entries that it acknowledged. The worker then
writes them again, as they were. Another worker that goes on with the job writes the same tokens,
but may cut them into other events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from omlx_producer.events import ChoiceDelta, TokenLogprob, TokensEvent


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Delivered:
    """The tokens and the text of each choice that a consumer has had since its first cursor."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._count = 0
        self._again: list[TokensEvent] | None = None
        self._count_again = 0

    @property
    def is_behind(self) -> bool:
        """Whether the stream, read again, does not yet hold all that the consumer has had."""
        return self._again is not None

    def read_again(self) -> None:
        """The stream is read again from the consumer's first cursor."""
        self._again, self._count_again = [], 0

    def take(self, event: TokensEvent) -> TokensEvent | None:
        """What the next event of the stream adds to what the consumer has had.

        Its ``n`` may not grow: another worker may give out a row's last text with its last token.

        Raises:
            ValueError: if the stream, read again, holds other tokens or another text.
        """
        if self._again is None:
            self._add(event)
            return event
        self._again.append(event)
        self._count_again += _count(event)
        if self._count_again < self._count:
            return None
        rest = self._rest(_fold(self._again))
        if rest is None:
            return None
        self._again = None
        if not rest:
            return None
        fresh = event.model_copy(update={"choices": rest})
        self._add(fresh)
        return fresh

    def _add(self, event: TokensEvent) -> None:
        self._count += _count(event)
        for delta in event.choices:
            self._choices[delta.index].tokens += delta.tokens
            self._choices[delta.index].pieces.append(delta.text)
            self._choices[delta.index].marks += delta.marks or ()

    def _rest(self, again: dict[int, _Choice]) -> list[ChoiceDelta] | None:
        """What the stream holds beyond what was delivered; None while it holds less."""
        rest = []
        for index in sorted(self._choices.keys() | again.keys()):
            had, now = self._choices[index], again.get(index, _Choice())
            tokens, text = len(had.tokens), had.text
            if len(now.tokens) < tokens or len(now.text) < len(text):
                return None
            if now.tokens[:tokens] != had.tokens or not now.text.startswith(text):
                raise ValueError(f"choice {index} differs")
            delta = ChoiceDelta(
                index=index,
                text=now.text[len(text) :],
                tokens=now.tokens[tokens:],
                logprobs=now.logprobs[tokens:] or None,
                marks=[mark for mark in now.marks if mark not in had.marks] or None,
            )
            if delta.text or delta.tokens:
                rest.append(delta)
        return rest


def _count(event: TokensEvent) -> int:
    return sum(len(delta.tokens) for delta in event.choices)


def _fold(events: Iterable[TokensEvent]) -> dict[int, _Choice]:
    choices: defaultdict[int, _Choice] = defaultdict(_Choice)
    for event in events:
        for delta in event.choices:
            choice = choices[delta.index]
            choice.tokens += delta.tokens
            choice.pieces.append(delta.text)
            choice.logprobs += delta.logprobs or ()
            choice.marks += delta.marks or ()
    return choices
