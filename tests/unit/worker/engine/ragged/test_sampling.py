"""Sampling follows mlx-lm's definitions, exactly, for every row by its own settings."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from omlx_worker.engine.ragged.sampling import Draw, Plan, distribution, noise, params, report
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.chi_square import disagreement

VOCABULARY = 50


def logits(rows: int, seed: int = 0, scale: float = 2.0) -> mx.array:
    return scale * mx.random.normal((rows, 1, VOCABULARY), key=mx.random.key(seed))


def sample(
    logits: mx.array, at: mx.array, counts: mx.array | None, rows: list[Sampling]
) -> list[mx.array]:
    plan = Plan.of(rows)
    given = params(rows, plan)
    target = distribution(logits, counts, given, plan)
    drawn = noise(given["keys"], at, logits.shape[-1]) if plan.noise else None
    return report(target.logits, target.pick(drawn), rows)


def draw(
    scores: mx.array,
    rows: list[Sampling],
    positions: list[int] | None = None,
    counts: mx.array | None = None,
) -> list[mx.array]:
    at = mx.array(positions or [5] * len(rows), mx.int32)[:, None]
    return sample(scores, at, counts, rows)


def many(scores: mx.array, row: Sampling, count: int) -> list[int]:
    """Draw again and again from the same logits, at successive positions."""
    at = mx.arange(count, dtype=mx.int32)[None]
    repeated = mx.broadcast_to(scores[:1], (1, count, VOCABULARY))
    tokens: list[int] = sample(repeated, at, None, [row])[0][0].tolist()
    return tokens


def test_temperature_zero_takes_the_likeliest_token_beside_rows_that_sample() -> None:
    scores = logits(3)
    rows = [Sampling(temperature=0.0), Sampling(temperature=1.0), Sampling(temperature=0.0)]

    tokens = draw(scores, rows)[0][:, 0].tolist()

    best = mx.argmax(scores[:, 0], axis=-1).tolist()
    assert (tokens[0], tokens[2]) == (best[0], best[2])


@settings(max_examples=settings().max_examples // 5)
@given(
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 20),
)
def test_the_filters_keep_exactly_the_tokens_that_mlx_lm_keeps(
    top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    scores = logits(1, seed)
    kept = scores[:, 0] - mx.logsumexp(scores[:, 0], axis=-1, keepdims=True)
    if top_p < 1:
        kept = apply_top_p(kept, top_p)
    if min_p > 0:
        kept = apply_min_p(kept, min_p)
    if 0 < top_k < VOCABULARY:
        kept = apply_top_k(kept, top_k)
    wanted = {i for i, value in enumerate(kept[0].tolist()) if value > -math.inf}

    # A temperature this high makes every kept token about equally likely.
    row = Sampling(
        temperature=1e6, filters={"top_p": top_p, "top_k": top_k, "min_p": min_p}, seed=seed
    )
    flat = many(scores, row, 1_500)

    assert set(flat) <= wanted
    if len(wanted) <= 30:
        assert set(flat) == wanted


@pytest.mark.parametrize(
    "row",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.6, seed=2),
        Sampling(temperature=1.3, filters={"top_k": 7}, seed=3),
        Sampling(temperature=0.8, filters={"top_p": 0.8, "min_p": 0.02}, seed=4),
    ],
)
def test_samples_follow_the_filtered_tempered_law(row: Sampling) -> None:
    scores = logits(1, seed=8, scale=1.0)
    logprobs = scores[:, 0] - mx.logsumexp(scores[:, 0], axis=-1, keepdims=True)
    kept = logprobs
    for name, keep in (("top_p", apply_top_p), ("min_p", apply_min_p), ("top_k", apply_top_k)):
        if name in row.filters:
            kept = keep(kept, row.filters[name])
    law = mx.softmax(kept[0] / row.temperature).tolist()
    count = 40_000

    tokens = many(scores, row, count)

    assert disagreement(Counter(tokens), dict(enumerate(law))) < 1


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    scores = mx.broadcast_to(logits(1), (4, 1, VOCABULARY))
    row = Sampling(temperature=1.5, seed=99)
    other = Sampling(temperature=0.3, filters={"top_k": 5}, seed=5)

    alone = draw(scores[:1], [row], [17])[0][0, 0].item()
    together = draw(scores, [other, other, row, other], [3, 4, 17, 17])[0][2, 0].item()

    assert together == alone
    by_position = many(scores[:1], row, 64)
    by_seed = [draw(scores[:1], [Sampling(1.5, seed=s)])[0].item() for s in range(64)]
    assert len(set(by_position)) > 10
    assert len(set(by_seed)) > 10
    assert by_position[17] == alone


def test_neighbouring_seeds_do_not_share_noise_at_shifted_positions() -> None:
    scores = mx.zeros((1, 1, VOCABULARY))
    first = many(scores, Sampling(temperature=1.0, seed=1), 200)
    second = many(scores, Sampling(temperature=1.0, seed=2), 200)

    for shift in range(-3, 4):
        pairs = zip(first[3 + shift : 190 + shift], second[3:190], strict=True)
        assert sum(a == b for a, b in pairs) < 20


def test_penalties_count_every_occurrence_of_the_history_once() -> None:
    scores = logits(2, seed=3)
    rows = [
        Sampling(
            temperature=0.0,
            repetition_penalty=1.7,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            top_logprobs=20,
        ),
        Sampling(temperature=0.0, top_logprobs=20),
    ]
    history = [4, 4, 4, 9, 30]
    counts = mx.zeros((2, 1, VOCABULARY), mx.int32)
    for token in history:
        counts[:, 0, token] += 1

    tokens, _, top_tokens, top_logprobs = draw(scores, rows, counts=counts)

    for index, row in enumerate(rows):
        expected = scores[index, 0].tolist()
        for token in set(history):
            value = expected[token]
            value = value * row.repetition_penalty if value < 0 else value / row.repetition_penalty
            value -= row.presence_penalty + row.frequency_penalty * history.count(token)
            expected[token] = value
        normaliser = math.log(sum(math.exp(value) for value in expected))
        assert tokens[index, 0].item() == max(range(VOCABULARY), key=expected.__getitem__)
        pairs = zip(top_tokens[index, 0].tolist(), top_logprobs[index, 0].tolist(), strict=True)
        for token, logprob in pairs:
            assert logprob == pytest.approx(expected[token] - normaliser, abs=1e-4)


def test_logit_bias_is_added_to_its_own_row_only() -> None:
    scores = logits(2, seed=1)
    rows = [
        Sampling(temperature=0.0, logit_bias={7: 100.0, 0: -5.0, 3: 1.0}),
        Sampling(temperature=0.0),
    ]

    tokens = draw(scores, rows)[0][:, 0].tolist()

    assert tokens == [7, int(mx.argmax(scores[1, 0]).item())]


def test_log_probabilities_are_the_models_own_before_temperature_and_filters() -> None:
    scores = logits(2, seed=6)
    rows = [
        Sampling(temperature=0.7, filters={"top_k": 2}, seed=3, top_logprobs=3),
        Sampling(temperature=1.0, seed=4, top_logprobs=0),
    ]

    read = Draw.of(draw(scores, rows))

    truth = (scores - mx.logsumexp(scores, axis=-1, keepdims=True))[:, 0].tolist()
    asked = read.at(rows[0], 0)
    assert asked.logprob == pytest.approx(truth[0][asked.token], abs=1e-5)
    likeliest = sorted(range(VOCABULARY), key=truth[0].__getitem__, reverse=True)[:3]
    assert [token for token, _ in asked.top] == likeliest
    bare = read.at(rows[1], 1)
    assert bare.top == ()
    assert bare.logprob == pytest.approx(truth[1][bare.token], abs=1e-5)
    assert read.at(Sampling(), 1).logprob is None


def test_a_plan_asks_for_no_more_than_its_rows_need() -> None:
    assert Plan.of([Sampling(temperature=0.0, filters={"top_k": 5})]) == Plan()
    assert Plan.of([Sampling(temperature=1.0)]) == Plan(noise=True)
    assert Plan.of([Sampling(temperature=1.0, filters={"min_p": 0.1})]) == Plan(
        noise=True, filters=True
    )
    assert Plan.of([Sampling(temperature=0, top_logprobs=5)]) == Plan()
    few, more = (dict.fromkeys(range(count), 1.0) for count in (3, 20))
    biased = [Plan.of([Sampling(temperature=0, logit_bias=bias)]) for bias in (few, more)]
    assert biased[0] == biased[1] != Plan()
