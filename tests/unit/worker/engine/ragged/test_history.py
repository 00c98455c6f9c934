"""Penalties see the prompt and every earlier token exactly once, at every place of a window.

Two faults of an earlier implementation elsewhere are planted here, and must be noticed: the
draft step counted the last token twice, and the history lacked the prompt's last token.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.ragged import speculation, step
from omlx_worker.engine.ragged import state as states
from omlx_worker.engine.ragged.sampling import Distribution, Plan, distribution, params
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.decoding import Loaded, row, run
from tests.helpers.table_law import whole_step
from tests.helpers.table_model import VOCABULARY, TableModel

PENALISED = Sampling(
    temperature=0.8, repetition_penalty=1.4, presence_penalty=0.2, frequency_penalty=0.3
)
GREEDY = Sampling(
    temperature=0.0, repetition_penalty=1.4, presence_penalty=0.2, frequency_penalty=0.3
)


class Listener:
    """Hears the counts that the target's and the head's distributions are made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target: list[Any] = []
        self.drafts: list[Any] = []
        for module, heard in ((step, self.target), (speculation, self.drafts)):
            monkeypatch.setattr(module, "distribution", self._listening(heard))

    @staticmethod
    def _listening(heard: list[Any]) -> Any:
        def listening(logits: mx.array, counts: mx.array, *rest: Any) -> Distribution:
            heard.append(counts.tolist())
            return distribution(logits, counts, *rest)

        return listening

    def clear(self) -> None:
        self.target.clear()
        self.drafts.clear()


def counted(tokens: list[int]) -> list[int]:
    seen = Counter(tokens)
    return [seen[token] for token in range(VOCABULARY)]


def wrong_counts(listener: Listener, sampling: Sampling, depth: int = 3) -> tuple[int, int]:
    """Decode rows of a table model; how many window and draft histories were wrong."""
    rows = [sampling] * 12
    plan = Plan.of(rows)
    settings = params([replace(row, seed=seed) for seed, row in enumerate(rows)], plan)
    settings["active"] = mx.ones((12,), mx.int32)
    settings["depth"] = mx.full((12,), depth, mx.int32)
    rng = random.Random(3)
    histories = [[rng.randrange(VOCABULARY) for _ in range(4)] for _ in rows]
    zeros = mx.zeros((12,), mx.int32)
    state: State = {
        "pending": mx.array([history[-1] for history in histories], mx.int32),
        "cursors": zeros + 3,
        "body_lengths": zeros,
        "accepted": zeros,
        "offered": zeros,
        "source": zeros,
        "shifts": zeros,
        "table": zeros[:, None],
        "entries": zeros,
        "counts": mx.array([counted(history) for history in histories], mx.int32),
    }
    in_windows = in_drafts = 0
    kinds: Counter[str] = Counter()
    for _ in range(10):
        before: Any = state["drafts"].tolist() if "drafts" in state else [[]] * 12
        listener.clear()
        outcome, after = whole_step(TableModel(0.7), state, settings, plan, depth, depth)
        state = after | {"table": state["table"]}
        emitted: Any = outcome.tokens.tolist()
        drafts: Any = state["drafts"].tolist()
        for index, history in enumerate(histories):
            for place in range(1 + len(before[index])):
                wanted = counted(history + before[index][:place])
                in_windows += listener.target[0][index][place] != wanted
            accepted: Any = outcome.verdicts[index, 1].item()
            kinds["accept" if accepted else "reject"] += 1
            history += emitted[index][: accepted + 1]
            for place in range(depth):
                wanted = counted(history + drafts[index][:place])
                in_drafts += listener.drafts[place][index][0] != wanted
    assert min(kinds["accept"], kinds["reject"]) > 10
    return in_windows, in_drafts


@pytest.mark.parametrize("sampling", [PENALISED, GREEDY], ids=["sampled", "greedy"])
def test_every_place_of_a_window_sees_each_earlier_token_once(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    assert wrong_counts(Listener(monkeypatch), sampling) == (0, 0)


def test_counting_the_last_token_twice_while_drafting_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose = speculation.propose

    def faulty(*args: Any) -> Any:
        model, caches, hidden, state, depth, tokens, *rest = args
        last = mx.take_along_axis(tokens, state["accepted"][:, None], axis=1)[:, 0]
        twice = state["counts"].at[mx.arange(last.size), last].add(1)
        return propose(model, caches, hidden, state | {"counts": twice}, depth, tokens, *rest)

    monkeypatch.setattr(step, "propose", faulty)

    in_windows, in_drafts = wrong_counts(Listener(monkeypatch), PENALISED)

    assert in_windows == 0
    assert in_drafts > 0


# Its last token is made likely, so that a history without it would choose it sooner.
PROMPT = [7, 7, 9, 7, 30]
BIASED = replace(GREEDY, presence_penalty=2.0, logit_bias={30: 4.0})


def penalised_run(loaded: Loaded) -> list[int]:
    return run(loaded.decoder(2), [row("x", PROMPT, 30, BIASED)])["x"]


def plainly(loaded: Loaded) -> list[int]:
    """The same decoding, by a loop over whole forwards that counts by hand."""
    history = list(PROMPT)
    for _ in range(30):
        logits: Any = loaded.network(mx.array([history]))[0, -1].tolist()
        logits[30] += 4.0
        for token in set(history):
            value = logits[token]
            value = value * 1.4 if value < 0 else value / 1.4
            logits[token] = value - 2.0 - 0.3 * history.count(token)
        history.append(max(range(len(logits)), key=logits.__getitem__))
    return history[len(PROMPT) :]


@pytest.mark.slow
def test_the_history_of_a_joining_row_holds_its_whole_prompt(qwen: Loaded) -> None:
    assert penalised_run(qwen) == plainly(qwen)


def test_a_history_without_the_prompts_last_token_would_be_noticed(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = states.counts_of
    monkeypatch.setattr(states, "counts_of", lambda tokens, size: counts(tokens[:-1], size))

    assert penalised_run(qwen) != plainly(qwen)
