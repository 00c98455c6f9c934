"""Constrained rows have the model's law given what is allowed.

The model is a table, and so is the grammar here: which tokens may follow depends on the last one.
Two tokens force the one after them, so forced drafts take part.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.ragged.masks import Run, force, packed
from omlx_worker.engine.ragged.sampling import Params, Plan
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.ragged.step import Outcome, commit, forward
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.chi_square import disagreement
from tests.helpers.table_law import ROUNDS, ROWS, Step, draw_pairs, exact_pairs
from tests.helpers.table_model import TableModel

# After 0 comes 4, and after that 1; the other tokens leave a choice.
FOLLOW = [[4], [0, 2, 3], [0, 1, 3, 5], [0, 1], [1], [2, 3, 4, 5]]


def runs_of(last: int, drafts: list[int]) -> list[Run]:
    """What a `Matcher` would return of the table."""
    found = []
    for place, draft in enumerate([*drafts, -1]):
        for token in FOLLOW[last]:
            forced, end = list[int](), token
            while len(FOLLOW[end]) == 1 and len(forced) < 4:
                [end] = FOLLOW[end]
                forced.append(end)
            if forced and token != draft:
                found.append(Run(place, token, forced))
        if draft not in FOLLOW[last]:
            break
        last = draft
    return found


def stepped(shift: int = 0, *, forces: bool = True) -> Step:
    """A step under masks, planted ``shift`` places late."""
    words = mx.array([sum(1 << token for token in may) for may in FOLLOW], mx.uint32)

    def step(
        model: Any, state: State, settings: Params, plan: Plan, depth: int, own: int
    ) -> tuple[Outcome, State]:
        tokens = state["pending"][:, None]
        if "drafts" in state:
            tokens = mx.concatenate([tokens, state["drafts"]], axis=1)
        late = mx.maximum(mx.arange(tokens.shape[1]) - shift, 0)
        allowed = words[tokens[:, late]][..., None]
        hidden = forward(model, [], state, depth)
        outcome, after = commit(model, [], state, hidden, settings, plan, depth, own, allowed)
        if depth and forces:
            offered = np.array(state["offered"]).tolist()
            lists = enumerate(zip(np.array(tokens).tolist(), offered, strict=True))
            runs = {row: runs_of(t[0], t[1 : 1 + count]) for row, (t, count) in lists}
            after = force(after, packed(runs, ROWS, depth), settings["depth"], depth)
        return outcome, after

    return step


SETTINGS = [
    pytest.param(Sampling(temperature=1.0), [2], id="plain"),
    pytest.param(Sampling(temperature=1.0), [3, 1], id="plain, two depths"),
    pytest.param(
        Sampling(temperature=0.7, filters={"top_p": 0.8, "min_p": 0.1}), [2, 0, 3], id="filters"
    ),
    pytest.param(Sampling(temperature=0.9, repetition_penalty=1.5), [2], id="penalty"),
]


def test_an_eighth_of_the_samples_follow_the_law_of_what_is_allowed() -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, depths=[2], rounds=1, step=stepped())

    assert disagreement(counted, exact_pairs(model, sampling, FOLLOW.__getitem__)) < 1


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "depths"), SETTINGS)
def test_successive_tokens_follow_the_law_of_what_is_allowed(
    sampling: Sampling, depths: list[int]
) -> None:
    model = TableModel(closeness=0.6)

    counted = draw_pairs(model, sampling, depths, step=stepped())

    assert sum(counted.values()) == ROWS * ROUNDS >= 200_000
    assert disagreement(counted, exact_pairs(model, sampling, FOLLOW.__getitem__)) < 1


@pytest.mark.slow
def test_a_mask_that_is_one_place_late_would_be_noticed() -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, depths=[2], rounds=1, step=stepped(shift=1))

    assert disagreement(counted, exact_pairs(model, sampling, FOLLOW.__getitem__)) > 3


@pytest.mark.slow
def test_more_drafts_are_accepted_where_some_are_forced() -> None:
    accepted = {}
    for forces in (True, False):
        step, judged = stepped(forces=forces), list[Any]()

        def heard(*args: Any, step: Step = step, judged: list[Any] = judged) -> Any:
            result = step(*args)
            judged.append(np.array(result[0].verdicts))
            return result

        draw_pairs(TableModel(closeness=0.2), Sampling(), depths=[2], rounds=1, step=heard)
        # The first step has no drafts to judge.
        accepted[forces] = sum(counts[:, 1].sum() for counts in judged[1:3])

    assert accepted[True] > 1.2 * accepted[False]
