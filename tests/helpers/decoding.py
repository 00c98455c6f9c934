"""Drive decoders the way the service does, and the reference that they must equal."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_worker.engine.caches import layout
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.loader import load
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    network: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, path: Path) -> Loaded:
        return cls(*load(path))

    @classmethod
    @functools.cache
    def demo(cls) -> Loaded:
        """The demo model, loaded once a process."""
        return cls.at(resolve(DEMO))

    def decoder(self, depth: int = 0, lookup: int = 0) -> RaggedDecoder:
        model = as_ragged(self.network, drafts=depth > 0, checks=False)
        return RaggedDecoder(model, depth, lookup)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """What mlx-lm generates for one prompt alone; kept, since tests share prompts."""
        known = self._greedy.get(tuple(prompt), [])
        if len(known) < tokens:
            steps = generate_step(mx.array(list(prompt)), self.network, max_tokens=tokens)
            known = self._greedy[tuple(prompt)] = [token for token, _ in steps]
        return known[:tokens]


def small_classes() -> AbstractContextManager[Any]:
    """Classes of 64, 256 and 1,024 positions, so that short rows go through all of them."""
    return patch.multiple(layout, FIRST_LIMIT=64, MIN_CAPACITY=32)


def row(name: str, prompt: Sequence[int], tokens: int, sampling: Sampling = GREEDY) -> RowRequest:
    return RowRequest(row_id=name, prompt=list(prompt), max_tokens=tokens, sampling=sampling)


def enter(
    decoder: RaggedDecoder | DecodingEngine,
    row: RowRequest | Row,
    generated: Sequence[int] = (),
    *,
    chunk: int = LONGEST_CHUNK,
) -> Row:
    """Add a row and read its prompt."""
    entered = Row(row, generated=generated) if isinstance(row, RowRequest) else row
    decoder.add(entered)
    decoder.read({entered: entered.uncut(chunk)})
    while entered.left:
        decoder.read({entered: entered.uncut(chunk)})
    return entered


def record(row: RowRequest | Row) -> Row:
    """A row's record; a new one of a request."""
    return row if isinstance(row, Row) else Row(row)


def named(decoder: RaggedDecoder, name: str) -> Row:
    """The row of this name that a decoder holds."""
    return next(row for row in decoder.rows if row.row_id == name)


def drafted(
    loaded: Loaded, decoder: RaggedDecoder, prompts: Mapping[str, list[int]], *, steps: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The text so far and the drafts that go on from it, of each row after each of some steps."""
    rows = [enter(decoder, row(name, prompt, 50)) for name, prompt in prompts.items()]
    for _ in range(steps):
        decoder.step()
        cursors, drafts = decoder.state["cursors"].tolist(), decoder.state["drafts"].tolist()
        for each in rows:
            prompt = each.request.prompt
            whole = prompt + loaded.greedy(prompt, 50)
            yield whole[: cursors[each.slot] + 1], drafts[each.slot]


def run(
    decoder: RaggedDecoder,
    rows: Sequence[RowRequest | Row],
    *,
    arrivals: Mapping[str, int] | None = None,
    departures: Mapping[str, int] | None = None,
    chunk: int = 16,
    limit: int = 5_000,
) -> dict[str, list[int]]:
    """Decode rows to their ends, prompts read a chunk a step.

    Args:
        arrivals: the step before which a row comes in; 0 for rows not named.
        departures: how many tokens a row yields before it is removed.

    Returns:
        The tokens of every row.
    """
    tokens: dict[str, list[int]] = {r.row_id: [] for r in rows}
    records = [record(row) for row in rows]
    ends = {r.row_id: r.request.max_tokens for r in records} | dict(departures or {})
    coming = sorted(records, key=lambda r: (arrivals or {}).get(r.row_id, 0))
    reading: list[Row] = []
    running: set[str] = set()
    for step in range(limit):
        while coming and (arrivals or {}).get(coming[0].row_id, 0) <= step:
            arrival = coming.pop(0)
            decoder.add(arrival)
            reading.append(arrival)
        if reading:
            decoder.read({reading[0]: reading[0].uncut(chunk)})
            if not reading[0].left:
                running.add(reading.pop(0).row_id)
        for outcome in decoder.step():
            name = outcome.row_id
            if name not in running:
                continue
            tokens[name] += [sampled.token for sampled in outcome.tokens]
            if len(tokens[name]) >= ends[name]:
                del tokens[name][ends[name] :]
                running.discard(name)
                decoder.leave(outcome.row)
        if not (coming or reading or running):
            return tokens
    raise AssertionError(f"rows did not finish within {limit} steps")
