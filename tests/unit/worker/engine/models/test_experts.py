"""A mixture of experts runs in the form that is faster on the device, and says the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from omlx_worker.engine.models import experts
from omlx_worker.engine.models.experts import SIZES, Forms, choose_forms, measured
from tests.helpers.families import tiny


def layer_of(model: object) -> object:
    return model.layers[0].mlp.switch_mlp  # type: ignore[attr-defined]


@pytest.mark.parametrize("sort", [True, False])
def test_both_forms_compute_what_mlx_lm_computes(sort: bool) -> None:
    model = tiny("qwen3_moe")
    tokens = mx.random.randint(0, 256, (3, 50), key=mx.random.key(1))
    wanted = model(tokens)

    with patch.object(experts, "measured", lambda *_: dict.fromkeys(SIZES, sort)):
        choose_forms(model, mx.float32)

    assert mx.allclose(model(tokens), wanted, atol=1e-5)


def test_the_form_that_was_faster_at_a_size_is_used_for_steps_of_that_size() -> None:
    seen: list[bool] = []
    plain = experts._run

    def run(layer: object, x: mx.array, indices: mx.array, sort: bool) -> mx.array:
        seen.append(sort)
        return plain(layer, x, indices, sort)

    model = tiny("qwen3_moe")
    forms: Forms = {32: False, 64: True}
    with patch.object(experts, "measured", lambda *_: forms):
        choose_forms(model, mx.float32)
    with patch.object(experts, "_run", run):
        model(mx.zeros((1, 16), mx.int32))
        few = set(seen)
        seen.clear()
        model(mx.zeros((1, 17), mx.int32))
        more = set(seen)
        seen.clear()
        model(mx.zeros((1, 33), mx.int32))

    assert (few, more) == ({False}, {True})
    assert not seen, "beyond the largest size mlx-lm's own form runs"


def clock_of(steps: Iterator[float]) -> Callable[[], float]:
    now = itertools.accumulate(steps)
    return lambda: next(now)


def test_measuring_ends_after_its_time() -> None:
    layer = layer_of(tiny("qwen3_moe"))

    forms = measured(layer, mx.float32, clock_of(itertools.repeat(0.09)))

    assert 0 < len(forms) < len(SIZES)


def test_the_chosen_forms_are_no_parameters_of_the_model() -> None:
    model = tiny("qwen3_moe")
    before = [name for name, _ in tree_flatten(model.parameters())]

    choose_forms(model, mx.float32)

    assert [name for name, _ in tree_flatten(model.parameters())] == before
