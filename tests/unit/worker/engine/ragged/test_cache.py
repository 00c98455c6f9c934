"""Whatever joins, leaves, drafts and is rejected, a row's cache is that of the row alone."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.batch import BatchRow
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix_arrays import Layers
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import GREEDY, Loaded, small_classes

LENGTH = 140
ROWS = 6
PROMPTS = 3
"""Of each length."""

length = st.one_of(st.integers(1, 40), st.sampled_from([70, 250, 300]))
join = st.tuples(st.just("join"), length, st.sampled_from([0, 1, 2, 3, None]))
suspend = st.tuples(st.just("suspend"), st.integers(0, ROWS - 1))
resume = st.tuples(st.just("resume"), st.integers(0, ROWS - 1))
leave = st.tuples(st.just("leave"), st.integers(0, ROWS - 1))
step = st.tuples(
    st.just("step"),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.integers(1, 8),
    st.sampled_from([0, 1, 3]),
)
check = st.tuples(st.just("check"))
moves = st.lists(
    st.one_of(join, leave, suspend, resume, resume, step, step, step, check),
    min_size=40,
    max_size=60,
)


class Driver:
    """Plays moves on a batch, drafts being right as often as the move says."""

    def __init__(self, loaded: Loaded, seed: int, tokens: int = LENGTH) -> None:
        self.loaded = loaded
        self.tokens = tokens
        self.decoder: RaggedDecoder = loaded.decoder(depth=3)
        self.rng = random.Random(seed)
        self.histories: dict[str, list[int]] = {}
        self.futures: dict[str, list[int]] = {}
        self.steps = 0
        self.accepted = 0
        self.checked = 0
        self.groups: set[int] = set()

    def join(self, length: int, depth: int | None) -> None:
        if len(self.histories) == ROWS:
            return
        name = f"{self.steps}-{self.rng.random()}"
        # Few prompts, so that mlx-lm need not generate what follows them for each join.
        ours = random.Random(length * PROMPTS + self.steps % PROMPTS)
        prompt = [ours.randrange(256) for _ in range(length)]
        self.decoder.add(Row(name, prompt, self.tokens, GREEDY, depth=depth))
        while self.decoder.prefill({name: 16})[name]:
            pass
        self.histories[name] = prompt
        self.futures[name] = self.loaded.greedy(prompt, self.tokens + 8)

    def leave(self, place: int) -> None:
        if place < len(self.histories):
            self._drop(list(self.histories)[place])

    def suspend(self, place: int) -> None:
        if place < len(self.histories):
            self.decoder.suspend(list(self.histories)[place])

    def resume(self, place: int) -> None:
        if place < len(self.histories):
            name = list(self.histories)[place]
            if self.decoder.suspended_bytes(name):
                self.decoder.resume(name)

    def _drop(self, name: str) -> None:
        self.decoder.remove(name)
        del self.histories[name], self.futures[name]

    def step(self, worth: float, times: int, depth: int) -> None:
        for _ in range(times):
            self._land()
            if not self.histories:
                return
            self._forge(worth)
            assert self.decoder.step(dict.fromkeys(self.histories, depth)) == []
            self.steps += 1
            self.groups.add(len(self.decoder.layout))

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
        for name, row in self.decoder.rows.items():
            future = self.futures[name]
            for place in range(len(drafts[row.slot])):
                right = self.rng.random() < worth
                drafts[row.slot][place] = (future[place] + (not right)) % 256
        self.decoder.state["drafts"] = mx.array(drafts, mx.int32)

    def check(self) -> None:
        self._land()
        state: Any = {k: v.tolist() for k, v in self.decoder.state.items()}
        for name, row in self.decoder.rows.items():
            history = self.histories[name]
            cursor = state["cursors"][row.slot]
            assert cursor == len(history) - 1
            self._compare(row, history, cursor, state["accepted"][row.slot])
            self.checked += 1

    def _read(self, row: Row, history: list[int]) -> Layers:
        reading = Reading(row, history)
        read(self.decoder._model, [reading], [reading.left])
        return reading.layers

    def _compare(self, row: BatchRow, history: list[int], cursor: int, accepted: int) -> None:
        """Hold each layer against a fresh reading of the same tokens."""
        index, body = row.slot, row.body_length
        # Recurrent layers have yet to replay the drafts accepted last.
        fresh, recurrent = (
            self._read(row.request, history[: length + 1]) for length in (cursor, cursor - accepted)
        )
        for layer, cache in enumerate(self.decoder.caches):
            if isinstance(cache, AttentionCache):
                if not cursor:
                    continue
                arrays, place = cache._body_of(index)
                for held, tails, wanted in zip(arrays, cache.tails, fresh[layer], strict=True):
                    got = mx.concatenate(
                        [held[place, :, :body], tails[index, :, : cursor - body]], axis=1
                    )
                    assert mx.allclose(got, wanted[0], rtol=1e-3, atol=1e-3).item()
            else:
                assert isinstance(cache, RecurrentCache)
                if cursor - accepted:
                    conv, state = recurrent[layer]
                    assert mx.allclose(cache.states[0][index], conv[0], rtol=1e-3, atol=1e-3).item()
                    assert mx.allclose(
                        cache.states[1][index], state[0], rtol=1e-3, atol=1e-3
                    ).item()


@pytest.mark.slow
@settings(
    max_examples=2,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(script=moves, seed=st.integers(0, 1000))
def test_every_rows_cache_equals_a_fresh_run_over_its_tokens(
    qwen: Loaded, script: list[tuple[Any, ...]], seed: int
) -> None:
    driver = Driver(qwen, seed)
    with small_classes():
        driver.join(12, None)
        driver.join(1, 2)
        for move, *values in script:
            getattr(driver, move)(*values)
        while driver.steps < 200:
            for length in (270, 50):
                driver.leave(0)
                driver.join(length, None)
            driver.suspend(driver.steps % ROWS)
            driver.step(0.8, 5, driver.steps // 20 % 3)
            for place in range(ROWS):
                driver.resume(place)
            driver.step(0.8, 5, driver.steps // 20 % 3)
            driver.check()

    assert max(driver.groups) > 1
    assert driver.steps >= 200
    assert driver.accepted > 50
    assert driver.checked > 10


def test_a_batch_of_one_slot_has_a_state_of_its_own_which_steps_may_overwrite() -> None:
    prompt = [mx.ones((1, 3, 8)), mx.ones((1, 2, 4, 4))]
    cache = RecurrentCache([mx.zeros((1, 3, 8)), mx.zeros((1, 2, 4, 4))])
    mx.eval(prompt, cache.arrays)

    cache.write(0, prompt)
    mx.eval(cache.arrays)

    assert mx.array_equal(cache.states[1], prompt[1]).item()
    assert _address(cache.states[1]) != _address(prompt[1])


def _address(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).ctypes.data)
