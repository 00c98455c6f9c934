"""The calibration grid: what a step costs by slots and depth, measured while the worker is idle.

Rows of its own decode on the engine. They belong to no job, and nobody is told what they produce.
What is known is kept in a file for the next start with the same model, own depth, device and
software.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omlx_producer.terminal import counted
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.engine.interface import Engine
from omlx_worker.engine.row import Row, Sampling

log = logging.getLogger("omlx_worker.decode.depth.calibration")

MOST_SECONDS = 30.0
"""Of steps that compile nothing: what is compiled here need not be for jobs."""

SAVE_SECONDS = 60.0
FILE_VERSION = 5

PROMPT_TOKENS, MAX_TOKENS = 16, 1024
"""Of a calibration row; it is replaced when it ends."""

DROPPED, TIMED, MOST_STEPS = 3, 4, 16
"""Steps after a change of slots or depth that do not count, timings of a cell, and steps of one."""


class Calibration:
    """Measures the cells of the grid that a policy does not know, one step a call.

    Args:
        folder: where the file is kept; made when there is something to keep.
        measures: False only keeps the file.
    """

    def __init__(
        self,
        policy: AutoPolicy,
        engine: Engine,
        budget: MemoryBudget,
        folder: Path,
        *,
        measures: bool = True,
    ) -> None:
        # The same depth costs more if the model drafts than if drafts are looked up.
        self._key = f"{engine.identity}, own depth {policy.own_depth}"
        name = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self.path = folder / f"auto-{name}.json"
        self._policy = policy
        self._engine = engine
        self._budget = budget
        self._saved_at = time.monotonic()
        self._load()
        sizes = [1 << power for power in range(engine.max_rows.bit_length())]
        known = {
            (slots, depth)
            for (slots, bucket), cell in policy.cells.items()
            for depth in cell.depths
            if not bucket
        }
        cells = [(slots, depth) for slots in sizes for depth in policy.depths]
        self._cells = [cell for cell in cells if measures and cell not in known]
        self._left = MOST_SECONDS
        self._told = False
        self._rows: list[str] = []
        self._made = 0
        self._steps: Iterator[None] | None = None

    def step(self) -> bool:
        """Run a step; returns whether more are due. Saves what is known when none is."""
        if not self._cells:
            self.save()
            return False
        if not self._told:
            self._told = True
            log.info(
                "measuring steps of up to %s and %s while there are no jobs, "
                "%.0f s at most beside compiling",
                counted(self._cells[-1][0], "row"),
                counted(self._engine.max_depth, "draft"),
                MOST_SECONDS,
            )
        began, changes = time.monotonic(), self._engine.changes
        try:
            self._steps = self._steps or self._measure(*self._cells[0])
            if next(self._steps, self) is self:
                self._steps = None
                del self._cells[0]
        except Exception:
            log.exception("calibration ends: the engine failed")
            self._cells.clear()
        if self._engine.changes == changes:
            self._left -= time.monotonic() - began
        if self._left <= 0:
            self._cells.clear()
        if not self._cells:
            self.give_way()
            self.save(at_once=True)
        return bool(self._cells)

    def give_way(self) -> None:
        """Leave the engine to jobs; the cell under way is measured again later."""
        self._steps = None
        for row_id in self._rows:
            self._engine.remove(row_id)
        self._rows.clear()

    def save(self, *, at_once: bool = False) -> None:
        """Keep what is known, if it was not kept a moment ago."""
        if not at_once and time.monotonic() - self._saved_at < SAVE_SECONDS:
            return
        self._saved_at = time.monotonic()
        costs = [
            (*key, depth, cell.seconds(depth))
            for key, cell in self._policy.cells.items()
            for depth in cell.depths
        ]
        known = {
            "version": FILE_VERSION,
            "key": self._key,
            "costs": costs,
            "acceptance": [[r.tries, r.hits] for r in self._policy.acceptance.records],
        }
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(known))
            part.replace(self.path)
        except OSError as error:
            log.warning("cannot keep what was measured (%s); the next start measures anew", error)

    def _load(self) -> None:
        try:
            known = json.loads(self.path.read_text())
            if (known["version"], known["key"]) != (FILE_VERSION, self._key):
                log.info("%s is about another model, device or version: measuring anew", self.path)
                return
            self._restore(known)
            log.info("step times and acceptance are those of %s", self.path)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            log.warning("cannot use %s (%s): measuring anew", self.path, error)

    def _restore(self, known: dict[str, Any]) -> None:
        counts = [
            [[float(n) for n in places] for places in (tries, hits)]
            for tries, hits in known["acceptance"]
        ]
        costs = [(int(s), int(b), int(d), float(t)) for s, b, d, t in known["costs"]]
        for slots, bucket, depth, seconds in costs:
            if not (slots >= 1 and bucket >= 0 and depth >= 0 and 0 < seconds < math.inf):
                raise ValueError(f"no step costs {seconds!r} seconds")
        for tries, hits in counts:
            if not all(0 <= hit <= judged for hit, judged in zip(hits, tries, strict=True)):
                raise ValueError("more drafts accepted than judged")
        for slots, bucket, depth, seconds in costs:
            self._policy.cells[slots, bucket].put(depth, seconds, in_doubt=True)
        for record, (tries, hits) in zip(self._policy.acceptance.records, counts, strict=True):
            places = min(len(tries), len(record.tries))
            record.tries[:places], record.hits[:places] = tries[:places], hits[:places]

    def _measure(self, slots: int, depth: int) -> Iterator[None]:
        """Time steps of one cell, yielding after each call of the engine that takes time."""
        longest = min(PROMPT_TOKENS + MAX_TOKENS, self._engine.info.context_length)
        prompt = [1] * min(PROMPT_TOKENS, longest - 1)
        if not self._budget.fits([(len(prompt), longest)] * slots):
            self._cells[1:] = [cell for cell in self._cells[1:] if cell[0] < slots]
            return
        while len(self._rows) < slots:
            self._made += 1
            name, tokens = f"calibration:{self._made}", longest - len(prompt)
            # No user wants this text, so no drafts are looked up in it.
            row = Row(name, prompt, tokens, Sampling(), cache=False)
            self._engine.add(row)
            self._rows.append(row.row_id)
            while self._engine.prefill({row.row_id: PROMPT_TOKENS})[row.row_id]:
                pass
            yield
        depths = dict.fromkeys(self._rows, depth)
        timings: list[float] = []
        ended, skip = time.monotonic(), DROPPED
        for _ in range(MOST_STEPS):
            changes = self._engine.changes
            emissions = self._engine.step(depths)
            before, ended = ended, time.monotonic()
            if self._engine.changes != changes:
                skip = DROPPED
            elif skip:
                skip -= 1
            else:
                timings.append(ended - before)
            over = {e.row_id for e in emissions if e.finish_reason is not None}
            self._rows = [row_id for row_id in self._rows if row_id not in over]
            if over or len(timings) == TIMED:
                break
            yield
        if timings:
            seconds = statistics.median(timings)
            self._policy.cells[slots, 0].put(depth, seconds, in_doubt=True)
