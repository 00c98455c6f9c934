"""A row: one record of a sequence, from the first token of its prompt to the last of its answer.

Also the results of steps and windows, each for one row. This module imports no MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from omlx_worker.engine.rows.page import Page
from omlx_worker.engine.rows.picture import Picture, key_of
from omlx_worker.engine.rows.request import RowRequest, Sampling

HIGH, DEFAULT, BULK = 0, 1, 2
"""Levels, the best one first."""

Size = tuple[int, ...]
"""The size of a row: tokens to read (`Row.length`, or 0 while it decodes), tokens at its end at
most (`RowRequest.longest`), 1 if its prompt is scored, 1 if its steps need no array over the
vocabulary but their logits, vectors of its pictures, and tokens at its beginning whose pages it
will share with rows that have them. The last four are 0 if they are missing."""

Source = Literal["model", "lookup", "grammar"]
"""Who drafts: the model itself by its head or draft model, a lookup in its own text, or a grammar
that leaves one way to go on."""

Cut = Literal["failed", "slow"]

SOURCES: tuple[Source, ...] = ("model", "lookup", "grammar")


class Stage(Enum):
    """Where a row is: it waits, is read, decodes, is suspended with its pages, or is done."""

    WAITING = auto()
    READING = auto()
    DECODING = auto()
    SUSPENDED = auto()
    DONE = auto()


@dataclass(eq=False, slots=True)
class Row:
    """One sequence being generated. Its stage changes in the methods here alone.

    A thread that prepares jobs makes it; the decode thread owns it from its admission on. The
    scheduler sets its stage, its order and where reading stops, the engine the rest. The traffic
    thread reads ``cached``, and ``tokens`` as far as emissions have told it.

    Args:
        generated: tokens that an interrupted run has produced, oldest first. They count towards
            ``max_tokens`` and penalties, and are not emitted again.

    Attributes:
        request: what to generate.
        level: `HIGH`, `DEFAULT` or `BULK`.
        tokens: its prompt, and what it has produced after it, by an interrupted run too.
        key: its prompt as the prefix cache knows it: pictures by their digests.
        computed: how many of them the engine's caches hold, at most; exact once every step that
            was dispatched has landed.
        flying: steps that were dispatched for it and have not landed.
        looked: pictures of its prompt, from the first on, that need no more looks: the engine holds
            their vectors, or has read them.
        again: how many of its last tokens are not read: with fixed shapes steps decode them again,
            to round alike; those of a row that has ended nobody needs.
        pages: of the caches' pool.
        slot: its index in the batch's arrays; None while it has none.
        said: its text, a `RowText`; None before its tokens are fed to one.
        sampling: as it asks, or with the penalty of texts that repeat themselves.
        told: whether the log-probabilities of its prompt have been told. It may be read again.
        cached: tokens of its prompt that the prefix cache held when the row was first added; None
            before.
        kin: rows whose prompts begin alike, and the tokens in common, until it decodes.
        stops: counts of computed tokens at which reading stops: the prefix cache keeps what is read
            up to there, and other rows may go on from it.
        arrival: smaller for rows that queued up earlier.
        join_order: smaller for rows that joined the batch earlier.
        since: when it began to wait, in seconds of the scheduler's clock.
        aged: it has waited so long that it goes first and is not suspended again.
        kept_bytes: what the engine holds of it while it is suspended.
    """

    request: RowRequest
    level: int = DEFAULT
    generated: InitVar[Sequence[int]] = ()
    stage: Stage = Stage.WAITING
    tokens: list[int] = field(init=False)
    key: list[int] = field(init=False)
    computed: int = 0
    looked: int = 0
    flying: int = 0
    again: int = 0
    pages: list[Page] = field(default_factory=list)
    slot: int | None = None
    said: Any = None
    sampling: Sampling = field(init=False)
    told: bool = False
    cached: int | None = None
    kin: dict[Row, int] = field(default_factory=dict)
    stops: set[int] = field(default_factory=set)
    arrival: int = 0
    join_order: int = 0
    since: float = 0.0
    aged: bool = False
    kept_bytes: int = 0

    def __post_init__(self, generated: Sequence[int]) -> None:
        self.tokens = [*self.request.prompt, *generated]
        pictures = self.request.pictures
        self.key = key_of(self.request.prompt, pictures) if pictures else self.request.prompt
        self.sampling = self.request.sampling

    # Stages.

    def wait(self) -> None:
        """It waits for a place, with nothing in the engine."""
        self.stage, self.computed, self.kept_bytes = Stage.WAITING, 0, 0
        self.looked = 0

    def join(self) -> None:
        """It has a place in the batch, where its prompt is read."""
        self.stage = Stage.READING

    def decode(self) -> None:
        """Its prompt is read, or it is resumed."""
        self.stage, self.kept_bytes = Stage.DECODING, 0
        self.kin.clear()

    def suspend(self) -> None:
        """It loses its place, and the engine keeps all that it needs to go on."""
        self.stage = Stage.SUSPENDED

    def end(self) -> None:
        """It has finished, or was dropped."""
        self.stage = Stage.DONE
        self.kin.clear()

    @property
    def in_batch(self) -> bool:
        """Whether it has a place."""
        return self.stage in (Stage.READING, Stage.DECODING)

    @property
    def in_engine(self) -> bool:
        """Whether the engine holds something of it."""
        return self.in_batch or self.stage is Stage.SUSPENDED

    # Names and order.

    @property
    def row_id(self) -> str:
        return self.request.row_id

    @property
    def job_id(self) -> str:
        """The job of which it is a choice."""
        return self.request.row_id.partition(":")[0]

    @property
    def rank(self) -> tuple[int, int]:
        """Rows with a smaller rank go first."""
        return (HIGH if self.aged else self.level, self.arrival)

    # Tokens.

    @property
    def length(self) -> int:
        """Tokens of its prompt and its text."""
        return len(self.tokens)

    @property
    def produced(self) -> int:
        """Tokens of its text."""
        return len(self.tokens) - len(self.request.prompt)

    def text_tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        """Those of its text, from one place to another."""
        first = len(self.request.prompt)
        return self.tokens[first + start : None if end is None else first + end]

    def known(self, end: int) -> list[int]:
        """Its first tokens as the prefix cache knows them."""
        return [*self.key, *self.text_tokens()][:end]

    def unseen(self, tokens: int) -> Picture | None:
        """The picture to look at before its next tokens, as many as these, can be read."""
        left = self.request.pictures[self.looked :]
        picture = next((each for each in left if each.end > self.computed), None)
        return picture if picture and picture.start < self.computed + tokens else None

    def uncut(self, tokens: int) -> int:
        """As many of its next tokens, or more if they would end in a picture read as a whole."""
        end = self.computed + tokens
        for each in self.request.pictures:
            if each.both_ways and each.start < end < each.end:
                return each.end - self.computed
        return tokens

    def saw(self, picture: Picture) -> None:
        """The engine holds the vectors of this one, the first that was `unseen`."""
        self.looked = self.request.pictures.index(picture) + 1

    def shift_at(self, place: int) -> int:
        """From a place between its pictures, or after them, to the rotary position there."""
        before = (each for each in self.request.pictures if each.end <= place)
        return sum(each.span - each.count for each in before)

    @property
    def committed(self) -> int:
        """How many of its tokens steps go on from. The last one is pending: in no cache yet."""
        return len(self.tokens) - self.again

    @property
    def left(self) -> int:
        """Tokens to read before it decodes or, if it is only read, ends.

        The last token is not among them if a step follows, which reads it.
        """
        if self.is_over:
            return 0
        return self.committed - (not self.request.unread) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens still wanted of steps that are yet to be dispatched, at most."""
        if self.has_ended:
            return 0
        return self.request.longest - self.committed - self.flying

    @property
    def has_ended(self) -> bool:
        """Whether its tokens have ended it, as those of an interrupted run may have."""
        return self.said is not None and self.said.ended is not None

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be told."""
        return self.request.prompt_logprobs is not None and not self.told

    @property
    def is_over(self) -> bool:
        """Whether only its end is left to tell."""
        return self.has_ended and not self.is_scored

    @property
    def shareable(self) -> int:
        """Tokens that it may take from the prefix cache. The others are to be read or scored."""
        if targets := self.request.targets:
            return targets[0].place - 1
        return 0 if self.is_scored else self.committed - 1

    # Memory, and where reading stops.

    @property
    def size(self) -> Size:
        """What it asks of memory."""
        size = self.request.size(0 if self.stage is Stage.DECODING else self.length)
        return (*size, self._shares) if self.stage is Stage.WAITING else size

    @property
    def _shares(self) -> int:
        """Tokens at its beginning that rows in the engine have read, whose pages it will share."""
        read = (shared for kin, shared in self.kin.items() if kin.has_read(shared))
        return max(read, default=0)

    def has_read(self, tokens: int) -> bool:
        """Whether the engine holds as many of its tokens."""
        return self.stage is Stage.DECODING or (self.in_engine and self.computed >= tokens)

    @property
    def until_stop(self) -> int:
        """Tokens to read until the next stop, or all that are left."""
        stops = [stop - self.computed for stop in self.stops if stop > self.computed]
        return min([self.left, *stops])


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token of one row; log-probabilities where the row asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored(Sampled):
    """A token of a prompt, or a target.

    Attributes:
        rank: 1 for the likeliest token.
    """

    rank: int = 1


Report = list[Scored] | bytes
"""What reading a prompt gives: the scores of its tokens, or its vector as float32."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one step added to one row.

    Attributes:
        tokens: committed tokens: the accepted drafts and the one after them.
        drafted: drafts that were judged for the row.
        step_depth: the most drafts that the step could judge for any row.
        source: see `Emission`.
        cut: why the row ends here, if its constraint cannot be followed any further: its text
            has ``failed`` to match, or the constraint is too ``slow`` to follow.
    """

    row: Row
    tokens: list[Sampled]
    drafted: int = 0
    step_depth: int = 0
    source: Source = "model"
    cut: Cut | None = None

    @property
    def row_id(self) -> str:
        return self.row.row_id

    @property
    def accepted(self) -> int:
        return max(0, len(self.tokens) - 1)
