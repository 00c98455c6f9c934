"""Counts of a run: rows, failures, tokens, accepted drafts, and their rates."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omlx_producer.bulk.batch import BatchState
from omlx_producer.bulk.row import CANCELLED, RowResult

RATE_SECONDS = 30.0
ESTIMATE_ROWS = 20
"""The fewest rows that say how long others take."""


@dataclass(frozen=True)
class Speed:
    """What workers do for a run at one moment.

    Attributes:
        running: rows of the run that they hold.
        tokens_in: prompt tokens a second for the run; ``tokens_out`` likewise.
    """

    running: int
    tokens_in: float
    tokens_out: float


@dataclass
class Meter:
    """The counts of a run so far.

    Attributes:
        total: rows of the input, None if not known.
        before: rows that were done before this run; ``failed_before`` of them had failed.
        left: rows without a result of a run that ended early, as far as its input is known.
        cached_tokens: those of ``prompt_tokens`` that were not read.
        reasons: failed rows by code.
        ignored: rows by field of OpenAI that has no effect; see `omlx_producer.wire.openai_fields`.
        cut_by_length: rows of which a choice ended at its limit of tokens.
        cut_by_repetition: rows of which one ended because it repeated itself.
        now: what the workers do, None if not known.
        held_up: why none of the rows runs; empty if one does, or that is not known.
        files: what was written: rows by file.
        age: seconds from a batch's start to its end, or to now; None for a run.
    """

    total: int | None = None
    before: int = 0
    failed_before: int = 0
    left: int = 0
    ok: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cut_by_length: int = 0
    cut_by_repetition: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    now: Speed | None = None
    held_up: str = ""
    age: float | None = None
    files: dict[Path, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._started_at = self.clock()
        # (when, rows, tokens in, tokens out), oldest first.
        self._marks: deque[tuple[float, int, int, int]] = deque([(self._started_at, 0, 0, 0)])

    @property
    def failed(self) -> int:
        return self.reasons.total()

    @property
    def done(self) -> int:
        """Rows that ended in this run."""
        return self.ok + self.failed

    @property
    def seconds(self) -> float:
        return self.clock() - self._started_at if self.age is None else self.age

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts over drafts; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    def count(self, results: Iterable[RowResult]) -> None:
        """Count rows that are done."""
        for result in results:
            if result.body is None:
                self.reasons[result.code] += 1
            else:
                self.ok += 1
                for name, number in asdict(result.usage).items():
                    setattr(self, name, getattr(self, name) + number)
        self._mark()

    def adopt(self, state: BatchState) -> None:
        """Take over the counts of a batch."""
        self.total, self.ok = state.rows, state.ok
        stopped = {CANCELLED: state.errors - state.failed}
        self.reasons = Counter(state.failures) - Counter(stopped)
        for name, number in asdict(state.usage).items():
            setattr(self, name, number)
        self.age = max(0.0, (state.ended_at or time.time()) - state.created_at)
        self._mark()

    def restart(self) -> None:
        """Measure rates from now."""
        self._marks.clear()
        self._marks.append((self.clock(), self.done, self.prompt_tokens, self.completion_tokens))

    def rates(self) -> tuple[float, float, float]:
        """Rows, tokens in and tokens out a second, over the last `RATE_SECONDS`, or the last
        `ESTIMATE_ROWS` rows if those took longer."""
        now = self.clock()
        while (
            len(self._marks) > 1
            and now - self._marks[1][0] > RATE_SECONDS
            and self.done - self._marks[1][1] >= ESTIMATE_ROWS
        ):
            self._marks.popleft()
        then, rows, tokens_in, tokens_out = self._marks[0]
        seconds = max(now - then, 1e-9)
        return (
            (self.done - rows) / seconds,
            (self.prompt_tokens - tokens_in) / seconds,
            (self.completion_tokens - tokens_out) / seconds,
        )

    def token_rates(self) -> tuple[float, float]:
        """Tokens in and out a second: those of the workers, if known, else of rows that ended."""
        if self.now is not None:
            return self.now.tokens_in, self.now.tokens_out
        _, tokens_in, tokens_out = self.rates()
        return tokens_in, tokens_out

    def eta(self) -> float | None:
        """Seconds until the last row at the present rate, once `ESTIMATE_ROWS` have ended."""
        rate = self.rates()[0]
        if self.total is None or self.done - self._marks[0][1] < ESTIMATE_ROWS:
            return None
        return max(0, self.total - self.before - self.done) / rate

    def snapshot(self) -> dict[str, Any]:
        """The figures of a status line."""
        rows, tokens_in, tokens_out = self.rates()[0], *self.token_rates()
        eta = self.eta()
        return {
            "rows": self.total,
            "done": self.before + self.done,
            "failed": self.failed,
            "cut_by_length": self.cut_by_length,
            "cut_by_repetition": self.cut_by_repetition,
            "running": self.now.running if self.now else None,
            "seconds": round(self.seconds, 1),
            "rows_per_second": round(rows, 2),
            "prompt_tokens_per_second": round(tokens_in, 1),
            "completion_tokens_per_second": round(tokens_out, 1),
            "acceptance": _rounded(self.acceptance),
            "eta_seconds": None if eta is None else round(eta),
        }

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run."""
        seconds = max(self.seconds, 1e-9)
        return {
            "rows": self.done,
            "ok": self.ok,
            "failed": self.failed,
            "failures": dict(self.reasons.most_common()),
            "done_before": self.before,
            "failed_before": self.failed_before,
            "without_result": self.left,
            "cut_by_length": self.cut_by_length,
            "cut_by_repetition": self.cut_by_repetition,
            "ignored_fields": dict(self.ignored),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_per_second": round(self.prompt_tokens / seconds, 1),
            "completion_tokens_per_second": round(self.completion_tokens / seconds, 1),
            "acceptance": _rounded(self.acceptance),
            "seconds": round(self.seconds, 2),
            "files": {str(path): rows for path, rows in self.files.items()},
        }

    def _mark(self) -> None:
        """Remember the current counts; rates are measured from them."""
        now = self.clock()
        if now - self._marks[-1][0] >= 1.0:
            self._marks.append((now, self.done, self.prompt_tokens, self.completion_tokens))


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
