"""The shapes that are traced, proven and timed before rows wait for them.

A step or a window of prompts is traced for each new shape, and its kernels are compared; either
takes as long as many steps. So rows that nobody asked for run through a closed list of shapes, a
step at a time while the worker has nothing else to do:

===================================  =======================================================
steps: rows                          1, 2, 4 and so on, up to 32; more once there were more
drafts                               each of `depths_of`, and each change from one to another
sampling                             greedy; sampled; sampled with top-p, top-k or min-p
positions of the longest row         up to 256, up to 512 and up to 1,024
first windows of prompts: rows       1, 2, 4 and so on, up to 256 tokens in all
their tokens                         16, 32, 48, 64, 96 and 128 a row, see `FirstWindows`
===================================  =======================================================

The shapes of one row up to 256 positions, which the first job needs, come before the worker says
that it is ready. What else rows meet is traced where they meet it, and kernels are compared there,
see `Contest`.

Where `mx.compile` is off nothing is traced, and the list is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from omlx_worker.engine.kernels.compiling import compiles
from omlx_worker.engine.ragged import first_windows
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.interface import FIRST_ROWS, depths_of
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row

log = logging.getLogger(__name__)

SAMPLINGS = (Sampling(temperature=0), Sampling(), Sampling(filters={"top_p": 0.9}))

LENGTHS = (256, 512, 1024)
"""Positions of the longest row, at most."""

PROMPT = 16
"""Prompt tokens of each row. The longest has pages for more."""

AT_ONCE = 4
"""Rows that are read at a time, at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows that run together.

    Attributes:
        length: positions of the longest row, at most; of a window, tokens of each row.
        sampling: of steps; None for a first window of prompts.
    """

    rows: int
    length: int
    sampling: Sampling | None = None

    @property
    def is_first(self) -> bool:
        """Whether the first job needs it."""
        return self.rows == 1 and (self.sampling is None or self.length == LENGTHS[0])


def shapes(max_rows: int) -> list[Shape]:
    """The list, in the order in which jobs are likely to need them."""
    counts = [1 << power for power in range(max(0, max_rows - 1).bit_length() + 1)]
    steps = [
        Shape(min(rows, max_rows), length, sampling)
        for length in LENGTHS
        for rows in counts
        for sampling in SAMPLINGS
    ]
    windows = [Shape(*shape) for shape in first_windows.shapes(max_rows)]
    return sorted(
        [*steps, *windows], key=lambda shape: (not shape.is_first, shape.length > LENGTHS[0])
    )


def changing(depths: Sequence[int]) -> list[int]:
    """The depths of some steps that come to each from none, from a deeper one and from itself.

    Which of the deeper ones is the same; see `omlx_worker.engine.ragged.step.fit`.
    """
    downwards = [depth for depth in reversed(depths) for _ in range(2)]
    return [0, *downwards, *(step for depth in depths[1:-1] for step in (depth, 0))]


class WarmUp:
    """Runs through the list of shapes. Used by the engine's thread.

    Args:
        max_rows: rows at the same time, at most.

    Attributes:
        limit: bytes of weights and rows. A shape that takes more is left out.
    """

    def __init__(self, decoder: RaggedDecoder, max_rows: int) -> None:
        self.limit = decoder.weight_bytes
        self._decoder = decoder
        self._most, self._met = max_rows, min(max_rows, FIRST_ROWS)
        self._traces = compiles()
        self._left = self._shapes()
        self._depths = changing(depths_of(decoder.max_depth, decoder.own_depth))
        self._running: Generator[None] | None = None

    @property
    def first_parts(self) -> int:
        """See `Engine`. Reading and each depth are parts, and so is the end of a shape."""
        return sum(
            2 + (len(self._depths) if shape.sampling else 0)
            for shape in self._left
            if shape.is_first
        )

    def next(self, *, first: bool = False) -> bool:
        """Read a window, or run a step.

        Args:
            first: only what the first job needs.

        Returns:
            Whether there is more to do.
        """
        if not self._is_more(first=first):
            return False
        try:
            self._go_on()
        except Exception:
            log.exception("the warm-up ends: steps are traced where rows meet them")
            self._left.clear()
            self.stop()
        return self._is_more(first=first)

    def _is_more(self, *, first: bool) -> bool:
        return bool(self._left) and (self._left[0].is_first or not first)

    def met(self, slots: int) -> None:
        """A step has had so many slots: the list has what as many rows need."""
        if slots > self._met < self._most:
            listed, self._met = self._shapes(), min(slots, self._most)
            self._left += [shape for shape in self._shapes() if shape not in listed]

    def stop(self) -> None:
        """Drop the rows: others come. The shape is begun anew later."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _shapes(self) -> list[Shape]:
        return shapes(self._met) if self._traces else []

    def _go_on(self) -> None:
        if self._running is None:
            self._running = self._run(self._left[0])
        if next(self._running, self) is self:
            self._running = None
            del self._left[0]

    def _run(self, shape: Shape) -> Generator[None]:
        decoder = self._decoder
        rows = self._rows_of(shape)
        sizes = [(row.length, max(row.request.longest, shape.length)) for row in rows]
        if decoder.bytes_for(sizes, alone=True) + decoder.weight_bytes > self.limit:
            return
        try:
            for row in rows:
                decoder.add(row)
            if shape.sampling is None:
                decoder.read(dict.fromkeys(rows, shape.length))
                yield
                return
            for at in range(0, len(rows), AT_ONCE):
                decoder.read(dict.fromkeys(rows[at : at + AT_ONCE], PROMPT))
                yield
            decoder.reserve([(rows[0], shape.length)])
            decoder.fold(rows[:1])
            for depth in self._depths:
                decoder.step(depth)
                yield
        finally:
            for row in rows:
                decoder.leave(row)
            decoder.wait()

    def _rows_of(self, shape: Shape) -> list[Row]:
        tokens = (1 + self._decoder.max_depth) * len(self._depths)
        # A step reads the last token.
        length = PROMPT if shape.sampling else shape.length + 1
        sampling = shape.sampling or SAMPLINGS[0]
        return [
            Row(RowRequest(f"warm-up:{n}", [1] * length, tokens, sampling, cache=False))
            for n in range(shape.rows)
        ]
