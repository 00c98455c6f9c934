"""Figures of one lap of one side: jobs that begin together, and when their tokens arrive."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_CLOCK_TICKS = 100
_USER, _SYSTEM = 13, 14


@dataclass
class Watched:
    """One job as its consumer sees it; ``arrivals`` in seconds since the lap began.

    Attributes:
        tokens: of all arrivals, of which one may bring several.
    """

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = math.nan

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:])]  # noqa: B905


@dataclass(frozen=True)
class Lap:
    """Figures of one lap.

    Attributes:
        tokens_per_second: of all jobs, from the first submit to the last job's end.
        first: seconds to a job's first token, the median over jobs.
        gap_p50, gap_p99: seconds between two arrivals of tokens of the same job, over all jobs.
        cpu: seconds that each process computed, by name; empty where the system does not tell.
    """

    tokens_per_second: float
    first: float
    gap_p50: float
    gap_p99: float
    cpu: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, watched: Sequence[Watched], cpu: dict[str, float], unwatched: int = 0) -> Lap:
        """The figures of watched jobs.

        Args:
            unwatched: tokens of jobs that nobody watched.
        """
        gaps = [gap for job in watched for gap in job.gaps()]
        if len(gaps) < 2:
            # All tokens came in one or two events.
            gaps = 2 * (gaps or [math.nan])
        cuts = statistics.quantiles(gaps, n=100, method="inclusive")
        return cls(
            (sum(job.tokens for job in watched) + unwatched) / max(job.ended for job in watched),
            statistics.median(job.arrivals[0] for job in watched),
            cuts[49],
            cuts[98],
            cpu,
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class CpuClock:
    """CPU seconds of processes between two moments. Linux only."""

    def __init__(self, **processes: int) -> None:
        self._processes = processes
        self._began = self._read()

    def stop(self) -> dict[str, float]:
        ended = self._read()
        return {name: ended[name] - began for name, began in self._began.items() if name in ended}

    def _read(self) -> dict[str, float]:
        seconds = {}
        for name, process in self._processes.items():
            path = Path(f"/proc/{process}/stat")
            if path.exists():
                parts = path.read_text().rpartition(")")[2].split()
                # The fields before the name's end are not among the parts.
                ticks = int(parts[_USER - 2]) + int(parts[_SYSTEM - 2])
                seconds[name] = ticks / _CLOCK_TICKS
        return seconds
