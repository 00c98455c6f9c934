"""Moves on a batch whose caches are compared with those of rows alone."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.batch import seat_of
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import GREEDY, Loaded, enter
from tests.helpers.readers import Held, read_apart

LENGTH = 140
ROWS = 6
PROMPTS = 3
"""Of each length."""


class Driver:
    """Plays moves on a batch, drafts being right as often as the move says."""

    def __init__(self, loaded: Loaded, seed: int, tokens: int = LENGTH) -> None:
        self.loaded = loaded
        self.tokens = tokens
        self.decoder: RaggedDecoder = loaded.decoder(depth=3)
        self.rng = random.Random(seed)
        self.rows: dict[str, Row] = {}
        self.histories: dict[str, list[int]] = {}
        self.futures: dict[str, list[int]] = {}
        self.steps = 0
        self.accepted = 0
        self.checked = 0
        self.scattered = False

    def join(self, length: int, depth: int | None) -> None:
        if len(self.histories) == ROWS:
            return
        name = f"{self.steps}-{self.rng.random()}"
        # Few prompts, so that mlx-lm need not generate what follows them for each join.
        ours = random.Random(length * PROMPTS + self.steps % PROMPTS)
        prompt = [ours.randrange(256) for _ in range(length)]
        request = RowRequest(name, prompt, self.tokens, GREEDY, depth=depth)
        self.rows[name] = enter(self.decoder, request, chunk=16)
        self.histories[name] = prompt
        self.futures[name] = self.loaded.greedy(prompt, self.tokens + 8)

    def leave(self, place: int) -> None:
        if place < len(self.histories):
            self._drop(list(self.histories)[place])

    def suspend(self, place: int) -> None:
        if place < len(self.histories):
            row = self.rows[list(self.histories)[place]]
            if row.slot is not None:
                self.decoder.suspend(row)

    def resume(self, place: int) -> None:
        if place < len(self.histories):
            row = self.rows[list(self.histories)[place]]
            if row.slot is None:
                self.decoder.resume(row)

    def _drop(self, name: str) -> None:
        self.decoder.leave(self.rows.pop(name))
        del self.histories[name], self.futures[name]

    def step(self, worth: float, times: int, depth: int) -> None:
        for _ in range(times):
            self._land()
            if not self.histories:
                return
            self._forge(worth)
            assert self.decoder.step(depth) == []
            self.steps += 1
            self.scattered |= any(
                sorted(seat.pages) != [*range(min(seat.pages), max(seat.pages) + 1)]
                for row in self.decoder.seated
                if (seat := seat_of(row)).pages
            )

    def _land(self) -> None:
        """Read the step in flight, so that the host knows where every row stands."""
        flight, self.decoder._in_flight = self.decoder._in_flight, None
        for outcome in self.decoder._land(flight) if flight else []:
            emitted = [sampled.token for sampled in outcome.tokens]
            assert emitted == self.futures[outcome.row_id][: len(emitted)]
            del self.futures[outcome.row_id][: len(emitted)]
            self.histories[outcome.row_id] += emitted
            self.accepted += outcome.accepted
            if len(self.futures[outcome.row_id]) <= 8:
                self._drop(outcome.row_id)

    def _forge(self, worth: float) -> None:
        if "drafts" not in self.decoder.state:
            return
        drafts: Any = self.decoder.state["drafts"].tolist()
        for row in self.decoder.seated:
            future = self.futures[row.row_id]
            for place in range(len(drafts[row.slot])):
                right = self.rng.random() < worth
                drafts[row.slot][place] = (future[place] + (not right)) % 256
        self.decoder.state["drafts"] = mx.array(drafts, mx.int32)

    def check(self) -> None:
        self._land()
        state: Any = {k: v.tolist() for k, v in self.decoder.state.items()}
        for row in self.decoder.seated:
            history = self.histories[row.row_id]
            cursor = state["cursors"][row.slot]
            assert cursor == len(history) - 1
            self._compare(row, history, cursor, state["accepted"][row.slot])
            self.checked += 1

    def _read(self, history: list[int]) -> Held:
        return read_apart(self.decoder._model, history, len(history) - 1)

    def _compare(self, row: Row, history: list[int], cursor: int, accepted: int) -> None:
        """Hold each layer against a fresh reading of the same tokens."""
        # Recurrent layers have yet to replay the drafts accepted last.
        fresh, recurrent = (
            self._read(history[: length + 1]) for length in (cursor, cursor - accepted)
        )
        for layer, cache in enumerate(self.decoder.caches):
            if isinstance(cache, AttentionCache):
                if not cursor:
                    continue
                body_length = self.decoder.rows[row].body_length
                arrays, behind = cache.held(seat_of(row), body_length), cursor - body_length
                for held, tail, wanted in zip(arrays, cache.tails, fresh[layer], strict=True):
                    got = mx.concatenate([held, tail[row.slot, None, :, :behind]], axis=2)
                    assert mx.allclose(got, wanted, rtol=1e-3, atol=1e-3).item()
            else:
                assert isinstance(cache, RecurrentCache)
                if cursor - accepted:
                    conv, state = recurrent[layer]
                    assert mx.allclose(
                        cache.states[0][row.slot], conv[0], rtol=1e-3, atol=1e-3
                    ).item()
                    assert mx.allclose(
                        cache.states[1][row.slot], state[0], rtol=1e-3, atol=1e-3
                    ).item()
