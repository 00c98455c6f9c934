"""Rows emit the target's law exactly: counted over hundreds of thousands of samples.

The model here is a table: what follows a token depends on that token alone, by one table for
the target and by another for the head. So the law of any few successive tokens, under any
filters and penalties, can be written down exactly, and the step under test is the real one.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.models.draft_model import DraftModel
from omlx_worker.engine.ragged import step
from omlx_worker.engine.ragged.sampling import Distribution
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.chi_square import disagreement
from tests.helpers.table_law import ROUNDS, ROWS, START, draw_pairs, exact_pairs
from tests.helpers.table_model import VOCABULARY, TableModel

SETTINGS = [
    pytest.param(Sampling(temperature=1.0), id="plain"),
    pytest.param(Sampling(temperature=0.6, filters={"top_p": 0.9}), id="cool, top-p"),
    pytest.param(
        Sampling(temperature=1.4, filters={"top_k": 3, "min_p": 0.05}), id="hot, top-k, min-p"
    ),
    pytest.param(
        Sampling(
            temperature=0.9,
            repetition_penalty=1.5,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            logit_bias={1: 0.7},
        ),
        id="penalties and bias",
    ),
]


def test_they_do_so_where_a_draft_model_drafts() -> None:
    model, other = TableModel(closeness=0.6), TableModel(closeness=0.6)
    # The draft model's own scores, of all tokens but the last.
    other.target, other.vocabulary = other.head[:, :-1], VOCABULARY - 1
    model.drafter = DraftModel(other, VOCABULARY)  # type: ignore[arg-type]
    sampling = Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, depths=[2], rounds=1)

    assert disagreement(counted, exact_pairs(model, sampling)) < 1


def test_an_eighth_of_the_samples_follow_the_target_law() -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, depths=[2], rounds=1)

    assert disagreement(counted, exact_pairs(model, sampling)) < 1


# Four first tokens complete a match of six. What followed it is not what the target prefers.
BEFORE = [5, 4, 3, 0]
FOLLOWED = [[0, 4, 1], [1, 3, 5], [3, 1, 0], [5, 3, 4]]
TEXT = [token for followed in FOLLOWED for token in (*BEFORE, START, *followed)] + BEFORE


@pytest.mark.slow
@pytest.mark.parametrize("own", [0, 2], ids=["alone", "beside the head"])
def test_they_do_so_where_drafts_are_looked_up(own: int) -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, [3, 2], own=own, text=TEXT)

    assert sum(counted.values()) >= 200_000
    assert disagreement(counted, exact_pairs(model, sampling)) < 1


def test_an_eighth_does_so_where_drafts_are_looked_up() -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, [3], rounds=1, own=2, text=TEXT)

    assert disagreement(counted, exact_pairs(model, sampling)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SETTINGS)
def test_successive_tokens_follow_the_target_law(sampling: Sampling) -> None:
    model = TableModel(closeness=0.6)

    counted = draw_pairs(model, sampling, depths=[2])

    assert sum(counted.values()) == ROWS * ROUNDS >= 200_000
    assert disagreement(counted, exact_pairs(model, sampling)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("depths", [[1, 3], [3, 1], [2, 0, 3]], ids=str)
def test_they_do_so_while_the_depth_changes_from_step_to_step(depths: list[int]) -> None:
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=0.9)

    counted = draw_pairs(model, sampling, depths)

    assert sum(counted.values()) == ROWS * ROUNDS
    assert disagreement(counted, exact_pairs(model, sampling)) < 1


@pytest.mark.slow
def test_at_temperature_zero_they_take_the_likeliest_tokens() -> None:
    model = TableModel(closeness=0.5)
    [(pair, _)] = [item for item in exact_pairs(model, Sampling(0.0)).items() if item[1] == 1]

    assert set(draw_pairs(model, Sampling(0.0), depths=[2], rounds=1)) == {pair}


@pytest.mark.slow
def test_drafts_taken_as_they_are_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(target: Distribution, state: State, *rest: Any) -> tuple[mx.array, mx.array]:
        tokens, accepted = judge(target, state, *rest)
        if "drafts" not in state:
            return tokens, accepted
        depth = state["drafts"].shape[1]
        return mx.concatenate([state["drafts"], tokens[:, depth:]], axis=1), state["offered"]

    judge = step.judge
    monkeypatch.setattr(step, "judge", faulty)
    model, sampling = TableModel(closeness=0.6), Sampling(temperature=1.0)

    assert disagreement(draw_pairs(model, sampling, depths=[2]), exact_pairs(model, sampling)) > 3
