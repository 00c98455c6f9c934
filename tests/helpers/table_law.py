"""The exact law of a `TableModel`'s tokens, and the step's samples of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from omlx_worker.engine.caches.recurrent_cache import widened
from omlx_worker.engine.ragged.lookups import LONGEST, PIECE, history_of
from omlx_worker.engine.ragged.sampling import Params, Plan, params
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.ragged.step import Outcome, commit, fit, forward
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.table_model import VOCABULARY, TableModel

Step = Callable[[Any, State, Params, Plan, int, int], tuple[Outcome, State]]
"""From a model, the state, settings, a plan and both depths of `commit`."""

ROWS = 25_000
ROUNDS = 8
START = 2


def whole_step(
    model: Any, state: State, settings: Params, plan: Plan, depth: int, own: int
) -> tuple[Outcome, State]:
    hidden = forward(model, [], state, depth)
    return commit(model, [], state, hidden, settings, plan, depth, own)


def draw_pairs(
    model: TableModel,
    sampling: Sampling,
    depths: Sequence[int],
    rounds: int = ROUNDS,
    *,
    own: int = 8,
    text: Sequence[int] = (),
    step: Step = whole_step,
) -> Counter[tuple[int, int]]:
    """Count the second and third token after `START`.

    Args:
        depths: of the steps, over and over: with one alone, both tokens are drafted first.
        own: of these, at most, by the model's own head.
        text: a history before `START`, in which drafts are looked up.
        step: decodes one window of every row.
    """
    counted: Counter[tuple[int, int]] = Counter()
    for lap in range(rounds):
        rows = [replace(sampling, seed=lap * ROWS + index) for index in range(ROWS)]
        plan = Plan.of(rows)
        settings = params(rows, plan)
        settings["active"] = mx.ones((ROWS,), mx.int32)
        settings["depth"] = mx.full((ROWS,), max(depths), mx.int32)
        zeros = mx.zeros((ROWS,), mx.int32)
        names = ("cursors", "body_lengths", "accepted", "offered", "source", "shifts")
        state: State = dict.fromkeys(names, zeros) | {"pending": mx.full((ROWS,), START, mx.int32)}
        state["table"], state["entries"] = zeros[:, None], zeros
        if text:
            state["cursors"] = mx.full((ROWS,), len(text), mx.int32)
            history = widened(history_of([*text, START]), LONGEST + PIECE)
            state["history"] = mx.broadcast_to(history, (ROWS, history.shape[1]))
        if plan.penalties:
            state["counts"] = mx.zeros((ROWS, VOCABULARY), mx.int32)
            state["counts"][:, START] = 1
        sequences = np.zeros((ROWS, 3), np.int64)
        lengths = np.zeros(ROWS, np.int64)
        turns = itertools.cycle(depths)
        while lengths.min() < 3:
            depth = next(turns)
            state = fit(state, [], depth, max(depths)) | {"table": zeros[:, None]}
            outcome, state = step(model, state, settings, plan, depth, own)
            accepted = np.array(outcome.verdicts)[:, 1]
            for place, tokens in enumerate(np.array(outcome.tokens).T):
                taken = (place <= accepted) & (lengths < 3)
                sequences[taken, lengths[taken]] = tokens[taken]
                lengths += taken
        counted.update((second, third) for _, second, third in sequences.tolist())
    return counted


def weights(
    scores: list[float],
    sampling: Sampling,
    history: Sequence[int],
    allowed: Callable[[int], Collection[int]] = lambda _: range(VOCABULARY),
) -> list[float]:
    """The law of one token, written down again in plain Python.

    Args:
        allowed: the tokens that may follow a token.
    """
    values = [score + sampling.logit_bias.get(t, 0.0) for t, score in enumerate(scores)]
    for token in set(history):
        value = values[token]
        repeated = sampling.repetition_penalty
        value = value * repeated if value < 0 else value / repeated
        values[token] = (
            value
            - sampling.presence_penalty
            - sampling.frequency_penalty * list(history).count(token)
        )
    may = allowed(history[-1])
    values = [value if token in may else -math.inf for token, value in enumerate(values)]
    total = math.log(sum(math.exp(value) for value in values))
    logprobs = [value - total for value in values]
    order = sorted(range(VOCABULARY), key=logprobs.__getitem__, reverse=True)
    kept, mass, filters = [], 0.0, sampling.filters
    for rank, token in enumerate(order):
        if mass >= filters.get("top_p", 1) or rank >= filters.get("top_k", VOCABULARY):
            break
        if math.exp(logprobs[token] - logprobs[order[0]]) < filters.get("min_p", 0):
            break
        kept.append(token)
        mass += math.exp(logprobs[token])
    if sampling.temperature == 0:
        kept = order[:1]
    tempered = [
        math.exp(logprobs[t] / (sampling.temperature or 1.0)) if t in kept else 0.0
        for t in range(VOCABULARY)
    ]
    return [value / sum(tempered) for value in tempered]


def exact_pairs(
    model: TableModel, sampling: Sampling, *allowed: Callable[[int], Collection[int]]
) -> dict[tuple[int, int], float]:
    table: list[list[float]] = model.target.tolist()  # type: ignore[assignment]
    law: dict[tuple[int, int], float] = {}
    for first, second, third in itertools.product(range(VOCABULARY), repeat=3):
        history = [START]
        p = 1.0
        for token in (first, second, third):
            p *= weights(table[history[-1]], sampling, history, *allowed)[token]
            history.append(token)
        law[second, third] = law.get((second, third), 0.0) + p
    return law
