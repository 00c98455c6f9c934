"""A job's events as the chunks of OpenAI's streams, of chats and of text completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from omlx_producer.wire import JobEvent, TokenLogprob, TokensEvent, Usage
from omlx_producer.wire.answer import CHAT, TEXT, begun_head, chat_logprobs, choice_of
from omlx_producer.wire.events import CUTS, ChoiceDelta, FinishReason, TextLogprobs
from omlx_producer.wire.markup import Markup, Part, Span, StreamedReply, read

Range = tuple[int, int]


class _Chunks:
    """Makes the chunks of one job's events, from its first event on.

    Attributes:
        head: of the answer; before the first event, as far as it is known.
    """

    _is_chat: ClassVar[bool]

    def __init__(
        self,
        job_id: str,
        model: str,
        *,
        include_usage: bool = False,
        include_drafted: bool = False,
    ) -> None:
        kind = CHAT if self._is_chat else TEXT
        self.head = {**begun_head(kind, job_id, int(time.time())), "model": model}
        self._include_usage = include_usage
        self._include_drafted = include_drafted
        self._markup = Markup()
        self._choices: dict[int, _Choice] = {}

    def take(self, event: JobEvent) -> Iterator[dict[str, Any]]:
        """The chunks that one event adds; one choice each, but for the usage."""
        if isinstance(event, TokensEvent):
            self.head |= event.head or {}
            self._markup = event.markup or self._markup
            for delta in event.choices:
                yield from self._begun(delta.index)
                choice = self._choices[delta.index]
                choice.logprobs += delta.logprobs or ()
                yield from self._of_text(delta.index, choice.feed(delta))
        elif event.end.ok:
            self.head |= event.head or {}
            for index, reason in enumerate(event.finish_reasons):
                calls = event.tool_calls[index] if event.tool_calls else []
                yield from self._begun(index)
                yield from self._of_text(index, self._choices[index].end(reason, calls=bool(calls)))
                if calls:
                    told = [{"index": at, **call.model_dump()} for at, call in enumerate(calls)]
                    yield self._of_choice(index, {"delta": {"tool_calls": told}})
                yield self._of_choice(index, self._said("content", ""), reason)
            if self._include_usage:
                yield self._chunk([], event.usage)

    def _begun(self, index: int) -> Iterator[dict[str, Any]]:
        if index not in self._choices:
            self._choices[index] = _Choice(self._markup)
            if self._is_chat:
                yield self._of_choice(index, {"delta": {"role": "assistant", "content": ""}})

    def _of_text(
        self, index: int, added: Iterable[tuple[Part, str, list[Range]]]
    ) -> Iterator[dict[str, Any]]:
        for part, text, drafted in added:
            if text:
                yield self._of_choice(index, self._said(part, text), drafted=drafted)

    def _said(self, part: Part, text: str) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        name = "content" if part == "content" else "reasoning_content"
        return {"delta": {name: text} if text else {}}

    def _of_choice(
        self,
        index: int,
        said: dict[str, Any],
        reason: FinishReason | None = None,
        drafted: Sequence[Range] = (),
    ) -> dict[str, Any]:
        written = self._choices[index]
        new, written.logprobs, logprobs = written.logprobs, [], None
        if new:
            logprobs = chat_logprobs(new) if self._is_chat else written.scores.take(new)
        choice = choice_of(index, said, reason, logprobs)
        if drafted and self._include_drafted:
            choice["drafted"] = drafted
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        kind = f"{CHAT}.chunk" if self._is_chat else TEXT
        chunk = {**self.head, "object": kind, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage and usage.model_dump()
        return chunk


class ChatChunks(_Chunks):
    """Makes ``chat.completion.chunk`` bodies of one job's events, from its first event on.

    Thinking comes as ``reasoning_content``. Calls of tools come whole, with the end of the job,
    since only then the worker has parsed them. Log-probabilities come with the next text of their
    choice, or with its end. A job that publishes no tokens, such as a short one of the queue
    ``bulk``, has only the last chunks. Failures make no chunk.

    Args:
        model: the alias that the chunks name, unless the events name one.
        include_usage: as in OpenAI's ``stream_options``: one more chunk, without choices, tells
            the usage at the end.
        include_drafted: the choice of a chunk gets ``drafted``, the starts and ends of the parts of
            its text that accepted drafts wrote, if there are any. Text that is held back until the
            job ends has none.

    >>> job = producer.submit(messages=[{"role": "user", "content": "Reverse a list."}])
    >>> chunks = ChatChunks(job.id, "demo")
    >>> deltas = [chunk["choices"][0]["delta"] for event in job.stream()
    ...           for chunk in chunks.take(event)]
    >>> deltas[0]
    {'role': 'assistant', 'content': ''}
    """

    _is_chat = True


class TextChunks(_Chunks):
    """Makes the ``text_completion`` chunks of one job's events; see `ChatChunks`.

    >>> job = producer.submit(prompt="def f(x):")
    >>> chunks = TextChunks(job.id, "demo")
    >>> text = [chunk["choices"][0]["text"] for event in job.stream()
    ...         for chunk in chunks.take(event)]
    >>> "".join(text) == job.result().text
    True
    """

    _is_chat = False


class _Choice:
    """One choice's text. What follows a call is held back until the call is known to be one.

    Attributes:
        logprobs: those that no chunk has told yet.
        scores: writes those of a text completion.
    """

    def __init__(self, markup: Markup) -> None:
        self.logprobs: list[TokenLogprob] = []
        self.scores = TextLogprobs()
        self._markup = markup
        self._reply = StreamedReply(markup)
        self._pieces: list[str] = []
        self._marks: list[int] = []
        self._length = 0
        # Of the whole text.
        self._drafted: list[Range] = []

    def feed(self, delta: ChoiceDelta) -> Iterator[tuple[Part, str, list[Range]]]:
        """The texts that a delta adds, each with the ranges of it that drafts wrote."""
        marks = delta.marks or ()
        self._pieces.append(delta.text)
        self._marks += marks
        ranges = delta.drafted or ()
        self._drafted += [(self._length + start, self._length + end) for start, end in ranges]
        self._length += len(delta.text)
        for span, added in self._reply.feed(delta.text, marks):
            before = len(added) - len(span.text)
            yield span.part, added, self._drafted_in(span, before) if self._drafted else []

    def _drafted_in(self, span: Span, before: int) -> list[Range]:
        """The drafted ranges of a span, as places in what is sent.

        Args:
            before: characters sent before the span's text.
        """
        end = span.at + len(span.text)
        inside = [(max(first, span.at), min(last, end)) for first, last in self._drafted]
        self._drafted = [each for each in self._drafted if each[1] > end]
        shift = before - span.at
        return [(first + shift, last + shift) for first, last in inside if first < last]

    def end(self, reason: FinishReason, *, calls: bool) -> Iterator[tuple[Part, str, list[Range]]]:
        text, cut = "".join(self._pieces), reason in CUTS
        whole = read(text, self._markup, self._marks, cut=cut)
        if whole.calls and not calls:
            whole = read(text, self._markup, self._marks, calls=False, cut=cut)
        sent = self._reply.so_far
        yield "reasoning", whole.reasoning[len(sent.reasoning) :], []
        yield "content", whole.content[len(sent.content) :], []
