"""Look at all of an input without running any of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click

from omlx_producer.bulk.index import RowIndex
from omlx_producer.bulk.making import RowMaker
from omlx_producer.bulk.planning import Plan, plan_rows
from omlx_producer.bulk.readers import read_records
from omlx_producer.bulk.row import BadRow
from omlx_producer.bulk.running import Job, open_input
from omlx_producer.bulk.tokens import TokenCounter
from omlx_producer.client import Producer
from omlx_producer.protocol import DEFAULT_MAX_TOKENS


@dataclass
class Findings:
    """What an input holds.

    Attributes:
        exact: whether ``prompt_tokens`` was counted, not guessed.
        most_completion_tokens: what all rows may generate at most.
    """

    rows: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    exact: bool = True
    most_completion_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bad": dict(self.bad),
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_exact": self.exact,
            "most_completion_tokens": self.most_completion_tokens,
        }


def look_through(producer: Producer, job: Job) -> Findings:
    """Validate every row as a run would; bad ones are told on stderr.

    Raises:
        InvalidRequest: if the input is none.
        redis.exceptions.RedisError: if Redis, which knows the models, does not answer.
    """
    models = producer.models()
    maker = RowMaker(job.kind, job.shape, models, require_known_model=job.require_known_model)
    findings, counter = Findings(), TokenCounter(models)
    with contextlib.closing(RowIndex()) as index, open_input(job.input) as stream:
        for row in plan_rows(read_records(stream, job.kind), maker.make, index, Plan()):
            findings.rows += 1
            if isinstance(row, BadRow):
                findings.bad[row.code] += 1
                click.echo(row.reason, err=True)
                continue
            findings.prompt_tokens += counter.count(row)
            limit = row.request.max_completion_tokens or DEFAULT_MAX_TOKENS
            findings.most_completion_tokens += limit * row.request.n
    findings.exact = counter.exact
    return findings
