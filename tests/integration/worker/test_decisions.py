"""A decision through the queue: a job without tokens, whose result has the probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
from redis import Redis

from omlx_producer import Producer
from tests.helpers.bulk_runs import wait_for_model
from tests.helpers.workers import ALIAS, events, running_worker

TEXTS: dict[str, Any] = {"model": ALIAS, "prompt": "x", "probabilities": True}
CHAT: dict[str, Any] = {
    **{"model": ALIAS, "messages": [{"role": "user", "content": "x"}], "probabilities": True}
}


@pytest.mark.parametrize("fields", [TEXTS, CHAT])
def test_the_answer_is_the_likeliest_choice_and_all_have_their_probabilities(
    redis_url: str, connection: Redis, fields: dict[str, Any]
) -> None:
    with running_worker(redis_url), Producer(redis_url) as producer:
        wait_for_model(connection)
        job = producer.submit(**fields, structured_outputs={"choice": ["b", "a", "b"]})
        result = job.result(20)
    [choice] = result.choices
    assert choice.text == "a"
    assert choice.finish_reason == "stop"
    # A letter's log-probability is minus its number.
    assert choice.probabilities == pytest.approx(
        {"b": 1 / (1 + math.e), "a": math.e / (1 + math.e)}
    )
    assert list(choice.probabilities or ()) == ["b", "a"]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (1, 0)
    [done] = events(connection, job.id)
    assert (done.type, done.n) == ("done", 0)


def test_choices_of_several_rows_are_added_up(redis_url: str, connection: Redis) -> None:
    with running_worker(redis_url), Producer(redis_url) as producer:
        wait_for_model(connection)
        texts = {"choice": ["ac", "ab", "bb", "b"]}
        result = producer.submit(**TEXTS, structured_outputs=texts).result(20)
    # Minus the numbers of its letters, and 96 for an end, since "b" begins "bb".
    weights = {"ac": -292.0, "ab": -291.0, "bb": -292.0, "b": -194.0}
    total = sum(math.exp(each + 194) for each in weights.values())
    expected = {text: math.exp(each + 194) / total for text, each in weights.items()}
    assert result.choices[0].probabilities == pytest.approx(expected)
    assert result.usage.prompt_tokens == 1
