"""A job in flight: its rows, what they have produced, and what its consumers have been told."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from omlx_producer.wire import (
    ChoiceDelta,
    CompletionTokensDetails,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TokensEvent,
    Usage,
    token_digest,
)
from omlx_producer.wire.answer import head_of
from omlx_worker.decode.counters import DraftCounts
from omlx_worker.engine.rows.decision import probabilities
from omlx_worker.engine.rows.emission import Emission, Mark, Said
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import BULK, DEFAULT, HIGH, Row, Stage
from omlx_worker.queue.claim import Claim

CHECKPOINT_SECONDS = 5.0
"""How often a job that does not stream publishes its tokens: another worker goes on from there."""

LEVELS = {"high": HIGH, "default": DEFAULT, "bulk": BULK}


Place = tuple[int, int, int]
"""Where an event of a choice ends: tokens, characters, and the digest of the tokens."""


@dataclass(slots=True)
class WrittenChoice:
    """The text of one row, and how much of it has been published.

    Attributes:
        heard_tokens: how many of the row's tokens this has been fed; the row may have more.
        marks: of its tokens.
        sent: where the events end that were made so far.
        unsent_drafts: the parts of ``unsent_text`` that accepted drafts wrote.
    """

    row: Row
    heard_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] | None = None
    vector: bytes | None = None
    reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    sent: Place = (0, 0, 0)
    unsent_text: str = ""
    unsent_drafts: list[tuple[int, int]] = field(default_factory=list)
    # Characters that this run produces again and drops: a row's last step publishes text that was
    # held back, and the interrupted run had got that far.
    repeats: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def feed(self, emission: Emission) -> None:
        self.heard_tokens += len(emission.tokens)
        fresh = emission.text[self.repeats :]
        drafted = emission.drafted_text - self.repeats
        if drafted > 0:
            start = len(self.unsent_text)
            self.unsent_drafts.append((start, start + drafted))
        self.pieces.append(fresh)
        self.unsent_text += fresh
        self.repeats = max(0, self.repeats - len(emission.text))
        self.logprobs += emission.logprobs or ()
        self.marks += emission.marks
        self.prompt_logprobs = emission.prompt_logprobs or self.prompt_logprobs
        self.vector = emission.vector or self.vector
        self.reasoning_tokens = emission.reasoning_tokens
        self.finish_reason = emission.finish_reason or self.finish_reason

    def take_over(self, delta: ChoiceDelta) -> None:
        """Count a part of an interrupted run's stream as produced and published."""
        self.row.tokens += delta.tokens
        self.heard_tokens = self.row.produced
        self.pieces.append(delta.text)
        self.sent = self._after(delta.tokens, delta.text)
        self.logprobs += delta.logprobs or ()

    def go_on(self, text_of: Callable[[Row], Said]) -> None:
        """Let the row go on from the tokens that were taken over.

        Raises:
            ValueError: if the text that was published is not theirs.
        """
        said, (final, marks) = self.text, text_of(self.row)
        if not (said.startswith(final) or final.startswith(said)):
            raise ValueError("the text of the stream is not that of its tokens")
        self.pieces = [max(said, final, key=len)]
        self.marks = list(marks)
        self.unsent_text = final[len(said) :]
        self.repeats = max(0, len(said) - len(final))

    def take(self, index: int, *, with_logprobs: bool, with_drafts: bool) -> ChoiceDelta | None:
        """What is new since the last call."""
        before = self.sent
        text, self.unsent_text = self.unsent_text, ""
        drafts, self.unsent_drafts = self.unsent_drafts, []
        self.sent = self._after(self.row.text_tokens(before[0], self.heard_tokens), text)
        drafted = drafts if drafts and with_drafts else None
        return self.delta(index, before, self.sent, text, with_logprobs, drafted)

    def _after(self, tokens: Sequence[int], text: str) -> Place:
        sent, characters, digest = self.sent
        return sent + len(tokens), characters + len(text), token_digest(tokens, digest)

    def delta(
        self,
        index: int,
        before: Sequence[int],
        end: Sequence[int],
        text: str,
        with_logprobs: bool,
        drafted: list[tuple[int, int]] | None = None,
    ) -> ChoiceDelta | None:
        """What is between two places, with this text; None without either."""
        (since, offset, _), (until, _, digest) = before, end
        if since == until and not text:
            return None
        logprobs = self.logprobs[since:until] if with_logprobs else None
        begun, ended = (bisect_left(self.marks, (token,)) for token in (since, until))
        marks = [mark.offset for mark in self.marks[begun:ended]] or None
        return ChoiceDelta(
            index=index,
            text=text,
            tokens=self.row.text_tokens(since, until),
            start=since,
            offset=offset,
            digest=digest,
            logprobs=logprobs,
            drafted=drafted,
            marks=marks,
        )

    def end(self, index: int) -> ChoiceDelta:
        """Where its events end."""
        tokens, characters, digest = self.sent
        return ChoiceDelta(
            index=index, text="", tokens=[], start=tokens, offset=characters, digest=digest
        )


class OtherModel(ValueError):
    """The events of an interrupted run are another model's."""


class ActiveJob:
    """Folds the emissions of a job's rows into events and, at the end, the response.

    A job that was interrupted goes on from the tokens that are in its stream, `resume`: they count
    as produced and published, and its rows read them as part of their prompts.

    Args:
        fingerprint: of the model; None if it has none.

    Attributes:
        head: of its answer: that of its first event, whichever run has made it.
        sent: the count of tokens in the latest event; 0 before the first.
        drafts: those of this run.
        resumed_tokens: tokens of interrupted runs.
    """

    def __init__(
        self,
        claim: Claim,
        request: GenerationRequest,
        rows: list[RowRequest],
        *,
        streams: bool,
        fingerprint: str | None = None,
    ) -> None:
        self.claim = claim
        self.request = request
        self.streams = streams
        self.head = head_of(request, claim.id, int(time.time()), fingerprint)
        level = HIGH if claim.urgent else LEVELS.get(claim.priority, DEFAULT)
        goes_on = level < BULK and request.messages is not None
        decoded = [Row(replace(row, goes_on=goes_on), level) for row in rows]
        self.choices = [WrittenChoice(row) for row in decoded]
        self.sent = 0
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        # For each event its n, then each choice's place at its end.
        self._ends = array("Q", bytes(8 * self._width))
        self.drafts = DraftCounts()
        self.resumed_tokens = 0
        self._by_row = {choice.row.row_id: choice for choice in self.choices}

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def rows(self) -> list[Row]:
        return [choice.row for choice in self.choices]

    @property
    def _first(self) -> dict[str, Any]:
        """What only the first event says."""
        reply = self.choices[0].row.request.reply
        markup = None if reply is None else reply.markup
        return {"markup": markup, "head": self.head}

    @property
    def _width(self) -> int:
        return 1 + 3 * len(self.choices)

    @property
    def tokens(self) -> int:
        """Tokens produced so far, all choices together."""
        return sum(choice.heard_tokens for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Those of the prompt, which all choices share, or of all texts of ``input``."""
        rows = [row.request for row in self.rows]
        if self.request.input is not None:
            return sum(len(row.prompt) for row in rows)
        return rows[0].targets[0].place if rows[0].targets else len(rows[0].prompt)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held for every row.

        An interrupted row may find a part of its own text there, too. That does not count.
        """
        return min(self.prompt_tokens, *(row.cached or 0 for row in self.rows))

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Those of the choices that have finished."""
        return [choice.finish_reason for choice in self.choices if choice.finish_reason]

    @property
    def produced(self) -> bool:
        """Whether every row has produced its last token."""
        return all(row.stage is Stage.DONE for row in self.rows)

    @property
    def finished(self) -> bool:
        """Whether every row's last emission has been taken in."""
        return all(choice.finish_reason for choice in self.choices)

    def resume(self, events: Iterable[TokensEvent], text_of: Callable[[Row], Said]) -> None:
        """Go on from where an interrupted run's events end.

        Args:
            text_of: what a row's tokens say.

        Raises:
            ValueError: if the events are not those of a run of this job.
            OtherModel: if another model has made them.
        """
        for event in events:
            if event.head:
                models = {each.get("system_fingerprint") for each in (self.head, event.head)}
                if len(models - {None}) > 1:
                    raise OtherModel
                self.head = event.head
            self.sent = event.n
            for delta in event.choices:
                self.choices[delta.index].take_over(delta)
            self._note_end()
        for choice in self.choices:
            choice.go_on(text_of)
        self.resumed_tokens = self.tokens

    def feed(self, emission: Emission) -> None:
        """Take in what a step added to a row. A row that ends leaves its place to other jobs."""
        self._by_row[emission.row_id].feed(emission)
        if emission.prompt_logprobs is None:
            self.drafts.add(emission)
        if emission.finish_reason and not self.finished:
            left = len(self.choices) - len(self.finish_reasons)
            self.claim.sizes = self.claim.sizes[-left:]

    def take_event(self) -> TokensEvent | None:
        """What was produced since the last event, or None when there is nothing new.

        Text that a row held back until its stop token, which is no token of the text, comes
        without tokens; that stop token is counted then, so that ids still grow.
        """
        taken = [
            choice.take(index, with_logprobs=self.request.logprobs, with_drafts=self.streams)
            for index, choice in enumerate(self.choices)
        ]
        deltas = [delta for delta in taken if delta is not None]
        if not deltas:
            return None
        first = {} if self.sent else self._first
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        self.sent += max(1, sum(len(delta.tokens) for delta in deltas))
        self._note_end()
        return TokensEvent(job_id=self.id, n=self.sent, choices=deltas, **first)

    def take_due_event(self) -> TokensEvent | None:
        """What the job publishes now.

        A job that does not stream publishes at checkpoints, and at its end if it has published a
        part.
        """
        if self.finished:
            due = self.streams or self.sent > 0
        else:
            due = self.streams or time.monotonic() >= self._checkpoint_at
        return self.take_event() if due else None

    def events_after(self, n: int) -> list[TokensEvent]:
        """The events after the n-th token that `take_event` or an interrupted run has made."""
        texts = [choice.text for choice in self.choices]
        ends = [self._ends[at : at + self._width] for at in range(0, len(self._ends), self._width)]
        return [self._event(before, end, texts) for before, end in pairwise(ends) if before[0] >= n]

    def _event(self, before: array[int], end: array[int], texts: list[str]) -> TokensEvent:
        deltas = []
        for index, choice in enumerate(self.choices):
            at = slice(1 + 3 * index, 4 + 3 * index)
            text = texts[index][before[at][1] : end[at][1]]
            deltas.append(choice.delta(index, before[at], end[at], text, self.request.logprobs))
        written = [delta for delta in deltas if delta is not None]
        first = {} if before[0] else self._first
        return TokensEvent(job_id=self.id, n=end[0], choices=written, **first)

    def _note_end(self) -> None:
        self._ends.append(self.sent)
        for choice in self.choices:
            self._ends.extend(choice.sent)

    @property
    def prompt_logprobs(self) -> list[PromptLogprob]:
        """Those of the prompt, which the first choice has read; empty if it is not scored."""
        return self.choices[0].prompt_logprobs or []

    @property
    def probabilities(self) -> dict[str, float]:
        """Those of a decision's choices, whose rows have read and scored them."""
        scored = [
            (choice.row.request.targets, [each.logprob for each in choice.prompt_logprobs or ()])
            for choice in self.choices
        ]
        return probabilities(self.request.choices, scored)

    def usage(self) -> Usage:
        prompt, completion = self.prompt_tokens, self.tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices)
            ),
            speculation=self.drafts.to_wire(),
        )
