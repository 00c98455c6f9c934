"""A prompt's tokens get the log-probabilities that mlx-lm's own forward gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from omlx_producer.wire import PromptLogprob
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged import reading
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import GREEDY, Loaded, enter
from tests.helpers.families import tiny
from tests.helpers.markups import thinking
from tests.helpers.scoring import Scoring, mlx_lms

CLOSE = 1e-4


def scored(
    name: str, prompt: Sequence[int], tokens: int = 0, top: int = 0, **more: Any
) -> RowRequest:
    return RowRequest(name, list(prompt), tokens, GREEDY, prompt_logprobs=top, **more)


def check(network: nn.Module, prompt: Sequence[int], scores: Sequence[PromptLogprob]) -> None:
    """Compare scores with mlx-lm's, and their ranks and alternatives too."""
    wanted = mlx_lms(network, prompt)
    assert [entry.token_id for entry in scores] == list(prompt)
    assert scores[0].rank == 0
    for place, entry in enumerate(scores[1:]):
        row = wanted[place]
        own = row[entry.token_id]
        assert entry.logprob == pytest.approx(own, abs=CLOSE)
        likelier = [(row > own + each).sum() for each in (CLOSE, -CLOSE)]
        assert likelier[0] < entry.rank <= likelier[1] + 1
        told = [logprob for _, _, logprob, *_ in entry.top]
        best = np.partition(row, len(row) - 1 - len(told))[len(row) - len(told) :]
        assert told == pytest.approx(sorted(best, reverse=True), abs=CLOSE)
        assert told == pytest.approx([row[token] for _, token, *_ in entry.top], abs=CLOSE)


def prompts(*lengths: int) -> list[list[int]]:
    return [[(7 * place + length) % 251 for place in range(length)] for length in lengths]


@pytest.mark.slow
def test_scores_of_the_demo_model_are_mlx_lms(heldout_prompts: list[str]) -> None:
    demo = Loaded.demo()
    texts = [demo.tokenizer.encode(text)[:90] for text in heldout_prompts[:2]]
    scoring = Scoring(demo.network, depth=1)

    scoring.run(*(scored(str(at), text, top=3) for at, text in enumerate(texts)))

    for at, text in enumerate(texts):
        check(demo.network, text, scoring.scores[str(at)])
    assert set(scoring.reasons.values()) == {"length"}


@pytest.mark.parametrize(
    "family", ["gemma3_text", "lfm2", pytest.param("mamba", marks=pytest.mark.slow)]
)
def test_so_are_those_of_other_families_whose_prompts_are_read_together(family: str) -> None:
    network, given = tiny(family), prompts(1, 2, 40, 41, 70, 300)
    scoring = Scoring(network)

    scoring.run(*(scored(str(at), text, top=at) for at, text in enumerate(given)))

    for at, text in enumerate(given):
        check(network, text, scoring.scores[str(at)])
        assert all(len(entry.top) == at for entry in scoring.scores[str(at)][1:])


def test_windows_are_as_narrow_as_the_bound_of_logits_asks(qwen: Loaded) -> None:
    vocabulary = as_ragged(qwen.network).vocabulary
    given = prompts(30, 33, 100)
    scoring = Scoring(qwen.network)
    seen = []
    score = reading.score

    def watched(logits: mx.array, *rest: Any) -> Any:
        seen.append(logits.shape[0])
        return score(logits, *rest)

    bounds = {"MOST_LOGITS": 24 * vocabulary, "SCORED_AT_ONCE": 5 * vocabulary, "score": watched}
    with patch.multiple(reading, **bounds):
        scoring.run(*(scored(str(at), text) for at, text in enumerate(given)))

    assert max(seen) == 5
    assert sum(seen) == 29 + 32 + 99
    for at, text in enumerate(given):
        check(qwen.network, text, scoring.scores[str(at)])


def test_scores_need_no_step_and_no_slot(qwen: Loaded) -> None:
    scoring = Scoring(qwen.network)

    scoring.run(*(scored(str(at), text) for at, text in enumerate(prompts(50, 60, 70))))

    assert (scoring.counters.steps, scoring.decoder.reads, scoring.decoder.drains) == (0, 0, 0)


def test_a_kept_prefix_is_read_again_for_its_scores_and_kept_for_others(qwen: Loaded) -> None:
    scoring = Scoring(qwen.network)
    [prompt] = prompts(200)
    plain = RowRequest("plain", prompt, 4, GREEDY)
    wanted = scoring.run(plain, RowRequest("other", prompt, 4, GREEDY))["plain"]
    before = scoring.counters.prompt_tokens

    tokens = scoring.run(scored("scored", prompt, 4), RowRequest("late", prompt, 4, GREEDY))

    check(qwen.network, prompt, scoring.scores["scored"])
    assert list(tokens.values()) == [wanted, wanted]
    assert scoring.counters.prompt_tokens == before + 200 + 1, "of the kept one the last token"


def test_what_a_row_has_generated_is_read_again_but_not_scored(qwen: Loaded) -> None:
    scoring = Scoring(qwen.network)
    [prompt] = prompts(40)
    whole = scoring.run(scored("whole", prompt, 9))["whole"]

    resumed = scoring.run(Row(scored("resumed", prompt, 9), generated=whole[:5]))["resumed"]
    ended = scoring.run(Row(scored("ended", prompt, 9), generated=whole))["ended"]

    assert whole == resumed == ended
    for name in ("whole", "resumed", "ended"):
        check(qwen.network, prompt, scoring.scores[name])
        assert scoring.reasons[name] == "length"


def test_a_scored_row_that_had_ended_tells_how_long_it_has_thought(qwen: Loaded) -> None:
    scoring = Scoring(qwen.network)
    thinks = replace(GREEDY, thinking=thinking((7,), (8, 9), begun=True))
    row = replace(scored("x", [1, 2, 3], 4), sampling=thinks)

    scoring.run(Row(row, generated=[5, 5, 8, 9]))

    assert scoring.thought == {"x": 2}


def test_memory_for_the_logits_of_a_window_is_counted_while_a_prompt_is_scored(
    qwen: Loaded,
) -> None:
    decoder = Scoring(qwen.network).decoder
    row = scored("x", prompts(600)[0])
    unscored = replace(row, prompt_logprobs=None)
    read, plain = (decoder.bytes_for([each.size(600)]) for each in (row, unscored))
    assert read - plain == reading.MOST_LOGITS * 4 + reading.SCORED_AT_ONCE * 16
    assert decoder.bytes_for([row.size(0)]) == decoder.bytes_for([unscored.size(0)])
    bounds = {"MOST_LOGITS": 1 << 19, "SCORED_AT_ONCE": 1 << 18}
    with patch.multiple(reading, **bounds):
        peaks = []
        for top in (None, 5):
            decoder = Scoring(qwen.network).decoder
            each = RowRequest("x", row.prompt, 0, GREEDY, prompt_logprobs=top)
            mx.synchronize()
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            enter(decoder, each)
            peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] - peaks[0] <= (1 << 19) * 4 + (1 << 18) * 16


def test_a_row_that_is_dropped_tells_no_scores(qwen: Loaded) -> None:
    decoder = Scoring(qwen.network).decoder
    left, stays = (Row(scored(name, prompts(20)[0])) for name in ("left", "stays"))
    for row in (left, stays):
        decoder.add(row)
    decoder.read({left: 5, stays: 5})
    decoder.leave(left)

    assert [*decoder.read({stays: 100})] == [stays]
    assert decoder.read({}) == {}
