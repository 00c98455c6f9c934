"""Drafts change how fast tokens come, never which: every depth, rule, batch and mixture."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run

DEPTHS = [
    1,
    pytest.param(2, marks=pytest.mark.slow),
    3,
    pytest.param(4, marks=pytest.mark.slow),
]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


class Oracle:
    """Puts drafts of known worth before the batch, in place of the head's.

    A tiny random model's head is almost never right, so without this nothing would be accepted.
    Every draft is the token that really follows with probability ``worth``, else a wrong one.
    """

    def __init__(
        self, decoder: RaggedDecoder, truth: dict[str, list[int]], worth: float, seed: int = 0
    ) -> None:
        self._batch = decoder
        self._truth = truth
        self._worth = worth
        self._rng = random.Random(seed)
        self._step = decoder.step
        self._emitted = dict.fromkeys(truth, 0)
        self.accepted = 0
        self.drafted = 0
        decoder.step = self.step  # type: ignore[method-assign]

    def step(self) -> list:
        # Land the step in flight first, so that it is known where every row stands.
        batch = self._batch
        landed = []
        if batch._in_flight is not None:
            flight, batch._in_flight = batch._in_flight, None
            landed = batch._land(flight)
        for outcome in landed:
            self._emitted[outcome.row_id] += len(outcome.tokens)
            self.accepted += outcome.accepted
            self.drafted += outcome.drafted
        if "drafts" in batch.state:
            drafts = batch.state["drafts"].tolist()
            for row in batch.seated:
                after = self._truth[row.row_id][self._emitted[row.row_id] :]
                for place, token in enumerate(after[: len(drafts[row.slot])]):
                    right = self._rng.random() < self._worth
                    drafts[row.slot][place] = token if right else (token + 1) % 256
            batch.state["drafts"] = mx.array(drafts, mx.int32)
        for outcome in self._step():
            raise AssertionError(f"nothing was in flight, yet {outcome} landed")
        return landed


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("worth", [pytest.param(0.0, marks=pytest.mark.slow), 0.6, 1.0])
def test_greedy_rows_equal_mlx_lm_at_every_depth_however_good_the_drafts(
    qwen: Loaded, depth: int, worth: float
) -> None:
    given = prompts([1, 9, 30, 17])
    wanted = {str(i): qwen.greedy(prompt, 60) for i, prompt in enumerate(given)}
    decoder = qwen.decoder(depth)
    oracle = Oracle(decoder, {name: [*t, *[0] * 9] for name, t in wanted.items()}, worth)

    got = run(
        decoder,
        [row(str(i), prompt, 60) for i, prompt in enumerate(given)],
        arrivals={"1": 5, "3": 12},
        departures={"2": 33},
    )

    assert got == {**wanted, "2": wanted["2"][:33]}
    if worth == 1.0:
        assert oracle.accepted > 0.9 * oracle.drafted
    if worth == 0.0:
        assert oracle.accepted == 0


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_seeded_row_gives_the_same_tokens_at_every_depth_and_in_any_company(
    qwen: Loaded, depth: int
) -> None:
    given = prompts([12, 5, 21, 8], seed=4)
    hot = Sampling(
        temperature=0.8,
        filters={"top_p": 0.9, "top_k": 60, "min_p": 0.01},
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias={5: 1.5},
        seed=77,
    )
    wanted = run(qwen.decoder(0), [row("x", given[0], 50, hot)])["x"]
    mates = [
        row("1", given[1], 40),
        row("2", given[2], 40, Sampling(temperature=1.2, seed=5)),
        row("3", given[3], 40, Sampling(temperature=0.7, seed=6)),
    ]
    alone = run(qwen.decoder(depth), [row("x", given[0], 50, hot)])
    decoder = qwen.decoder(depth)
    Oracle(decoder, {"x": [*wanted, *[0] * 9], "1": [3] * 99, "2": [4] * 99, "3": [5] * 99}, 0.7)
    together = run(decoder, [*mates, row("x", given[0], 50, hot)], arrivals={"x": 6, "3": 15})

    assert alone["x"] == wanted
    assert together["x"] == wanted


def test_drafts_are_drawn_with_the_noise_that_judges_them(qwen: Loaded) -> None:
    decoder = qwen.decoder(3)
    # So hot that the noise alone decides, whatever the head or the model makes likely.
    enter(decoder, row("x", [1, 2, 3], 40, Sampling(temperature=1e4, seed=5)))

    steps = [step for _ in range(8) for step in decoder.step()]

    assert sum(step.accepted for step in steps) > 0.9 * sum(step.drafted for step in steps) > 0


def test_a_row_that_must_not_draft_sits_beside_rows_that_do(qwen: Loaded) -> None:
    given = prompts([10, 14, 6, 11], seed=6)
    wanted = {str(i): qwen.greedy(prompt, 48) for i, prompt in enumerate(given)}
    truth = {name: [*tokens, *[0] * 9] for name, tokens in wanted.items()}
    depths = {"0": 0, "1": None, "2": 0, "3": 1}
    rows = [
        RowRequest(str(i), prompt, 48, GREEDY, depth=depths[str(i)])
        for i, prompt in enumerate(given)
    ]
    decoder = qwen.decoder(3)
    Oracle(decoder, truth, worth=1.0)
    steps: dict[str, list[int]] = {name: [] for name in truth}
    inner = decoder.step

    def watched() -> list:
        landed = inner()
        for outcome in landed:
            steps[outcome.row_id].append(len(outcome.tokens))
        return landed

    decoder.step = watched  # type: ignore[method-assign]
    got = run(decoder, rows)

    assert got == wanted
    assert set(steps["0"]) == set(steps["2"]) == {1}
    assert max(steps["3"]) == 2
    # All drafts are right, so every step but the first commits the whole window.
    assert steps["1"][1:] == [4] * (len(steps["1"]) - 1)


def test_a_row_removed_in_the_middle_of_its_drafts_leaves_no_trace(qwen: Loaded) -> None:
    given = prompts([9, 13, 7], seed=8)
    wanted = {str(i): qwen.greedy(prompt, 50) for i, prompt in enumerate(given)}
    decoder = qwen.decoder(2)
    Oracle(decoder, {name: [*t, *[0] * 9] for name, t in wanted.items()}, worth=0.8)

    got = run(
        decoder,
        [row(str(i), prompt, 50) for i, prompt in enumerate(given)],
        departures={"0": 10},
        arrivals={"2": 12},
    )

    assert got == {**wanted, "0": wanted["0"][:10]}


@pytest.mark.slow
def test_half_a_batch_without_drafts_costs_the_drafting_half_nothing(
    demo: Loaded, heldout_prompts: list[str]
) -> None:
    given = [demo.tokenizer.encode(text)[:60] for text in heldout_prompts[:8]]

    def decode(
        depths: list[int | None], chosen: Sequence[int]
    ) -> tuple[dict[str, list[int]], float]:
        decoder = demo.decoder(depth=3)
        steps = tokens = 0
        inner = decoder.step

        def watched() -> list:
            nonlocal steps, tokens
            landed = inner()
            for outcome in landed:
                if depths[int(outcome.row_id)] is None:
                    steps += 1
                    tokens += len(outcome.tokens)
            return landed

        decoder.step = watched  # type: ignore[method-assign]
        rows = [RowRequest(str(i), given[i], 32, GREEDY, depth=depths[i]) for i in chosen]
        return run(decoder, rows, chunk=64), tokens / max(steps, 1)

    alone, tokens_per_step_alone = decode([None] * 8, range(4))
    mixed, tokens_per_step_mixed = decode([None] * 4 + [0] * 4, range(8))

    plain = run(
        demo.decoder(0), [RowRequest(str(i), given[i], 32, GREEDY) for i in range(8)], chunk=64
    )
    assert mixed == plain
    assert alone == {name: plain[name] for name in alone}
    assert tokens_per_step_mixed >= 0.95 * tokens_per_step_alone
    assert tokens_per_step_alone > 1.5
