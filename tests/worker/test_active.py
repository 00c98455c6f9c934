"""How a job's emissions become events and, at the end, a response."""

from __future__ import annotations

from typing import Any

import pytest

from omlx_producer.protocol import GenerationRequest, TokenLogprob, TokensEvent
from omlx_worker.active import ActiveJob
from omlx_worker.claimed import ClaimedJob
from omlx_worker.engine.interface import Emission, Row, Sampling


def active(n: int = 1, streams: bool = True, **fields: Any) -> ActiveJob:
    fields = fields or {"prompt": "abc"}
    request = GenerationRequest(model="m", n=n, **fields)
    claim = ClaimedJob("j", "omlx-1", "omlx:m:default", 0.0, 0, b"", None, False)
    rows = [Row(f"j:{choice}", [1, 2, 3], 100, Sampling()) for choice in range(n)]
    return ActiveJob(claim, request, rows, streams=streams)


def emit(job: ActiveJob, text: str, *tokens: int, choice: int = 0, reason: Any = None) -> None:
    job.feed(Emission(f"j:{choice}", list(tokens), text, None, reason))


def taken(job: ActiveJob) -> TokensEvent:
    event = job.take_event()
    assert event is not None
    return event


def test_an_event_holds_what_came_since_the_last_one() -> None:
    job = active()
    emit(job, "a", 1)
    assert taken(job).n == 1
    emit(job, "", 2)
    emit(job, "bc", 3)
    event = taken(job)
    assert (event.n, event.choices[0].tokens, event.choices[0].text) == (3, [2, 3], "bc")
    assert event.since == 1
    assert job.take_event() is None


def test_the_tokens_of_all_choices_are_counted_together() -> None:
    job = active(n=3)
    emit(job, "a", 1)
    emit(job, "b", 2, choice=2)
    event = taken(job)
    assert event.n == 2
    assert [delta.index for delta in event.choices] == [0, 2]


def test_text_that_comes_with_a_stop_token_still_makes_ids_grow() -> None:
    job = active()
    emit(job, "a", 1)
    first = taken(job)
    emit(job, "b", reason="stop")
    last = taken(job)
    assert (first.n, last.n, last.since, last.choices[0].tokens) == (1, 2, 1, [])
    ending = job.ending()
    assert ending.event.n == 2
    assert ending.result is not None
    assert ending.result["usage"]["completion_tokens"] == 1


def test_an_ending_without_text_makes_no_event() -> None:
    job = active()
    emit(job, "a", 1)
    taken(job)
    emit(job, "", reason="stop")
    assert job.take_event() is None
    assert job.finished


def test_a_second_run_publishes_only_what_the_first_did_not() -> None:
    first = active(n=2)
    sent = []
    for step in range(3):
        emit(first, "xy"[step % 2], 10 + step)
        emit(first, "", 20 + step, choice=1)
        sent.append(taken(first))
    second = active(n=2)
    second.resume(sent)
    assert second.sent == 6
    for step in range(3):
        emit(second, "xy"[step % 2], 10 + step)
    assert second.take_event() is None
    emit(second, "zz", 13)
    for step in range(4):
        emit(second, "", 20 + step, choice=1)
    emit(second, "late", reason="stop", choice=1)
    event = taken(second)
    assert event.n == 8
    assert [(d.index, d.tokens, d.text) for d in event.choices] == [
        (0, [13], "zz"),
        (1, [23], "late"),
    ]
    assert second.choices[0].text == "xyxzz"


def test_text_cut_in_the_middle_of_a_piece_is_continued_there() -> None:
    job = active()
    first = active()
    emit(first, "ab", 1)
    job.resume([taken(first)])
    emit(job, "a", 1)
    emit(job, "bcd", 2)
    assert taken(job).choices[0].text == "cd"


def test_a_finished_chat_job_answers_as_openai_does() -> None:
    job = active(messages=[{"role": "user", "content": "hi"}])
    emit(job, "hello", 1, 2, reason="length")
    body = job.ending().result
    assert body is not None
    assert (body["object"], body["id"], body["model"]) == ("chat.completion", "chatcmpl-j", "m")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "speculation": {"steps": 1, "drafted": 0, "accepted": []},
    }


def test_usage_says_how_drafts_fared_by_position() -> None:
    job = active(prompt="hi")
    for drafted, accepted in ((0, 0), (3, 3), (3, 1), (1, 0)):
        tokens = list(range(accepted + 1))
        job.feed(Emission("j:0", tokens, "x", None, None, drafted=drafted, accepted=accepted))

    speculation = job.usage().speculation
    assert (speculation.steps, speculation.drafted) == (4, 7)
    assert speculation.accepted == [2, 1, 1]


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_are_in_events_and_in_the_answer(chat: bool) -> None:
    fields: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    )
    job = active(logprobs=True, top_logprobs=1, **fields)
    for number, token in enumerate(("é", "b")):
        entry = TokenLogprob(token=token, token_id=number, logprob=-0.5, top=[("c", 9, -1.0)])
        job.feed(Emission("j:0", [number], token, [entry], "stop" if number else None))
    logprobs = taken(job).choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs] == ["é", "b"]
    body = job.ending().result
    assert body is not None
    written = body["choices"][0]["logprobs"]
    if chat:
        top = [{"token": "c", "logprob": -1.0, "bytes": [99]}]
        assert written["content"][0] == {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": top,
        }
    else:
        assert written["tokens"] == ["é", "b"]
        assert written["top_logprobs"] == [{"c": -1.0}] * 2
        assert written["text_offset"] == [0, 1]
