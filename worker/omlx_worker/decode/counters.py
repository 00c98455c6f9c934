"""Counts of steps, tokens and drafts: those of a job and of the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omlx_producer.terminal import counted
from omlx_producer.wire import Speculation
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.row import SOURCES, Source


@dataclass(slots=True)
class DraftCounts:
    """Sums over the steps of rows.

    Attributes:
        steps: steps, each counted once per row.
        drafted: drafts judged.
        accepted: drafts accepted at each position of a step, the first one first.
    """

    steps: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, emission: Emission) -> None:
        self.steps += 1
        self.drafted += emission.drafted
        self.accepted += [0] * (emission.drafted - len(self.accepted))
        for position in range(emission.accepted):
            self.accepted[position] += 1

    @property
    def acceptance(self) -> float:
        """The accepted share of all drafts."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    def to_wire(self) -> Speculation:
        return Speculation(steps=self.steps, drafted=self.drafted, accepted=list(self.accepted))


def drafts_by_source() -> dict[Source, DraftCounts]:
    """A count for each source of drafts, all zero."""
    return {source: DraftCounts() for source in SOURCES}


@dataclass(slots=True)
class Counters:
    """What the engine has done since the worker started. Only the decode thread writes it, but for
    the counts of switches, which are the main thread's.

    `WorkerFigures` has fields of the same names.

    Attributes:
        rows: rows in the batch now.
        waiting: rows without a place in it, suspended ones included.
        steps: decode steps.
        decode_rows: rows summed over the steps.
        tokens: generated tokens.
        prompt_windows: forwards that read prompts, as the scheduler asked for them.
        prompt_tokens: tokens read, including those read again, and the last token of each prompt,
            which its first step reads.
        cached_tokens: tokens not read, because a prefix was kept.
        traces: steps and windows that rows waited for until they were traced for a new shape.
        contests: comparisons of kernels that rows waited for.
        miscounted_pages: see `Engine`; when the worker was last idle.
        pictures: looks of the tower at pictures, also at those that it knows.
        picture_seconds: what these took.
        pauses: how often a row made place for a more urgent one.
        switches: how often the model was loaded in place of another one.
        switch_seconds: what that took, from the last claim for the other to the first for this.
    """

    rows: int = 0
    waiting: int = 0
    steps: int = 0
    decode_rows: int = 0
    tokens: int = 0
    prompt_windows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    traces: int = 0
    contests: int = 0
    miscounted_pages: int = 0
    pictures: int = 0
    picture_seconds: float = 0.0
    pauses: int = 0
    switches: int = 0
    switch_seconds: float = 0.0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def mean_batch(self) -> float:
        return self.decode_rows / self.steps if self.steps else 0.0

    def stepped(self, rows: int, emissions: Sequence[Emission]) -> None:
        """A step was run for ``rows`` rows and brought these emissions."""
        self.steps += 1
        self.decode_rows += rows
        for emission in emissions:
            self.tokens += len(emission.tokens)
            self.drafts.add(emission)

    def __str__(self) -> str:
        tokens, steps = counted(self.tokens, "token"), counted(self.steps, "step")
        windows = counted(self.prompt_windows, "window")
        text = f"{tokens} in {steps}, mean batch {self.mean_batch:.1f}, prompts in {windows}"
        if self.traces:
            text += f", {counted(self.traces, 'trace')}"
        drafts = self.drafts
        if not drafts.drafted:
            return text
        places = ", ".join(map(str, drafts.accepted))
        return (
            f"{text}; {drafts.acceptance:.0%} of {counted(drafts.drafted, 'draft')} accepted "
            f"(by position: {places})"
        )
