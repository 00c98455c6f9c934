"""What `python -m scripts.demo_model.train --evaluate` counts as an accepted draft."""

from __future__ import annotations

import mlx.core as mx
import pytest

from scripts.demo_model.evaluation import agreement, drafts_of, repeats_itself

LIKELY, UNLIKELY = mx.log(mx.array([0.7, 0.2, 0.1])), mx.log(mx.array([0.3, 0.6, 0.1]))


def test_a_greedy_draft_is_accepted_where_both_prefer_the_same_token() -> None:
    head, backbone = mx.stack([LIKELY, LIKELY]), mx.stack([LIKELY, UNLIKELY])

    assert agreement(head, backbone, 0).tolist() == [True, False]


def test_a_sampled_draft_is_accepted_with_the_probability_that_both_share() -> None:
    assert agreement(LIKELY, UNLIKELY, 1).item() == pytest.approx(0.3 + 0.2 + 0.1)


def test_a_temperature_sharpens_both_distributions_before_they_are_compared() -> None:
    head, backbone = ([p**2 for p in ps] for ps in ((0.7, 0.2, 0.1), (0.3, 0.6, 0.1)))
    shared = sum(min(p / sum(head), q / sum(backbone)) for p, q in zip(head, backbone, strict=True))

    assert agreement(LIKELY, UNLIKELY, 0.5).item() == pytest.approx(shared)


def test_the_second_draft_is_counted_as_often_as_the_first_was_accepted() -> None:
    # Tokens 3, 4 and 5 of a text; slots 0 and 1 are of the prompt alone.
    first, second = [0.0, 0.5, 1.0, 0.25], [0.0, 0.8, 0.2]

    drafts = drafts_of(first, second, start=3, end=6)

    assert drafts.first == 3
    assert drafts.first_accepted == pytest.approx(0.5 + 1.0 + 0.25)
    assert drafts.second == pytest.approx(0.5 + 1.0)
    assert drafts.second_accepted == pytest.approx(0.5 * 0.8 + 1.0 * 0.2)


def test_a_text_loops_whose_last_sixteen_tokens_came_before() -> None:
    assert repeats_itself([1, *range(16), 2, *range(16)])
    assert not repeats_itself([1, *range(15), 2, *range(15)])
