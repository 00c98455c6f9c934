"""A batch keeps a bounded number of compiled steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from omlx_worker.engine.ragged import step as halves
from tests.helpers.decoding import Loaded, row, run, small_classes


@pytest.mark.slow
def test_a_batch_of_many_layouts_keeps_few_compiled_steps_and_every_token(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "MOST_FORWARDS", 3)
    monkeypatch.setattr(halves, "MOST_COMMITS", 3)
    rng = random.Random(8)
    prompts = {str(n): [rng.randrange(256) for _ in range(n)] for n in (5, 20, 60, 100, 300)}
    wanted = {name: qwen.greedy(prompt, 40) for name, prompt in prompts.items()}
    decoder = qwen.decoder(2)
    step, live, steps = decoder.step, set[int](), 0

    def watched(_: int | None = None) -> Any:
        nonlocal steps
        steps += 1
        landed = step(2 * (steps // 3 % 2))
        live.add(decoder._halves.commits.cache_info().currsize)
        return landed

    decoder.step = watched  # type: ignore[method-assign]
    rows = [row(name, prompt, 40) for name, prompt in prompts.items()]
    with small_classes():
        got = run(decoder, rows, arrivals={str(n): n // 8 for n in (20, 60, 100, 300)}, chunk=512)

    assert got == wanted
    assert decoder.traces > 24, "the batch never changed its shape"
    assert max(live) == 3
