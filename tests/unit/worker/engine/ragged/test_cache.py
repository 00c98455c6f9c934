"""Whatever joins, leaves, drafts and is rejected, a row's cache is that of the row alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omlx_worker.engine.caches.layout import Seat
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from tests.helpers.cache_driver import ROWS, Driver
from tests.helpers.decoding import Loaded, small_classes

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
                driver.leave(driver.steps // 10 % 3)
                driver.join(length, None)
            driver.suspend(driver.steps % ROWS)
            driver.step(0.8, 5, driver.steps // 20 % 3)
            for place in range(ROWS):
                driver.resume(place)
            driver.step(0.8, 5, driver.steps // 20 % 3)
            driver.check()

    assert driver.scattered, "the pages of every row were side by side"
    assert driver.steps >= 200
    assert driver.accepted > 50
    assert driver.checked > 10


def test_a_batch_of_one_slot_has_a_state_of_its_own_which_steps_may_overwrite() -> None:
    prompt = [mx.ones((1, 3, 8)), mx.ones((1, 2, 4, 4))]
    cache = RecurrentCache([mx.zeros((1, 3, 8)), mx.zeros((1, 2, 4, 4))])
    mx.eval(prompt, cache.arrays)

    cache.write(Seat(0), prompt)
    mx.eval(cache.arrays)

    assert mx.array_equal(cache.states[1], prompt[1]).item()
    assert _address(cache.states[1]) != _address(prompt[1])


def _address(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).ctypes.data)
