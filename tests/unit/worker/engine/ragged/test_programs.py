"""What was compiled is kept while it is of use, and there is an end to it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from omlx_worker.engine.ragged import programs
from omlx_worker.engine.ragged.programs import Programs
from tests.helpers.decoding import Loaded, row, run, small_classes


class Function:
    def __init__(self, on_trace: Callable[[], None]) -> None:
        self.trace = on_trace


def test_the_functions_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST_TRACES", 3)
    kept: Programs[str, Function] = Programs()
    for key in "abc":
        kept.get(key, Function).trace()
    first, second = (weakref.ref(kept.get(key, Function)) for key in "ab")

    kept.get("a", Function)
    kept.get("d", Function).trace()
    kept.get("a", Function)
    gc.collect()

    assert len(kept) == 3
    assert first() is not None
    assert second() is not None
    kept.get("e", Function).trace()
    kept.get("a", Function)
    gc.collect()
    assert second() is None
    assert first() is not None
    assert kept.traces == 5


def test_a_function_in_use_is_kept_whatever_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST_TRACES", 3)
    kept: Programs[str, Function] = Programs()
    function = kept.get("a", Function)
    for _ in range(9):
        function.trace()

    assert kept.get("a", Function) is function


@pytest.mark.slow
def test_a_batch_of_many_layouts_keeps_few_compiled_steps_and_every_token(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MOST_TRACES", 3)
    rng = random.Random(8)
    prompts = {str(n): [rng.randrange(256) for _ in range(n)] for n in (5, 20, 60, 100, 300)}
    wanted = {name: qwen.greedy(prompt, 40) for name, prompt in prompts.items()}
    decoder = qwen.decoder(2)
    step, live, steps = decoder.step, set[int](), 0

    def watched(_: Mapping[str, int] | None = None) -> Any:
        nonlocal steps
        steps += 1
        batch = decoder.batch
        landed = step(dict.fromkeys(prompts, 2 * (steps // 3 % 2)))
        live.add(len(batch._steps))
        return landed

    decoder.step = watched  # type: ignore[method-assign]
    rows = [row(name, prompt, 40) for name, prompt in prompts.items()]
    with small_classes():
        got = run(decoder, rows, arrivals={str(n): n // 8 for n in (20, 60, 100, 300)}, chunk=512)

    assert got == wanted
    assert decoder.batch.traces > 12, "the batch never changed its shape"
    assert max(live) <= 4
