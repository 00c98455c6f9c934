"""How a job's emissions become events and, at the end, a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
from openai.types.chat import ChatCompletion

from omlx_producer.wire import (
    EndEvent,
    FunctionCall,
    GenerationRequest,
    TokenLogprob,
    TokensEvent,
)
from omlx_worker.delivery.response import finished
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.job import CHECKPOINT_SECONDS, ActiveJob, OtherModel
from omlx_worker.queue.claim import Claim
from tests.helpers.markups import between

FORM = ReplyForm(
    between(("<think>", "</think>"), ("<call>", "</call>")),
    lambda text: [FunctionCall(name=text, arguments="{}")],
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def active(
    n: int = 1,
    streams: bool = True,
    reply: ReplyForm | None = None,
    fingerprint: str | None = None,
    **fields: Any,
) -> ActiveJob:
    fields = fields or {"prompt": "abc"}
    request = GenerationRequest(model="m", n=n, **fields)
    claim = Claim("j", "omlx-1", "omlx:m:default", 0.0, 0, b"", None, False)
    rows = [
        RowRequest(f"j:{choice}", [1, 2, 3], 100, Sampling(), reply=reply) for choice in range(n)
    ]
    return ActiveJob(claim, request, rows, streams=streams, fingerprint=fingerprint)


def emit(job: ActiveJob, text: str, *tokens: int, choice: int = 0, reason: Any = None) -> None:
    feed(job, Emission(f"j:{choice}", list(tokens), text, None, reason))


def feed(job: ActiveJob, emission: Emission) -> None:
    """One step of a row, as the decode thread and the traffic thread take it in."""
    row = next(row for row in job.rows if row.row_id == emission.row_id)
    row.tokens += emission.tokens
    job.feed(emission)


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


def test_a_job_that_does_not_stream_publishes_at_checkpoints_and_then_to_its_end() -> None:
    clock = Mock(time=lambda: 0.0, monotonic=Mock(return_value=0.0))
    with patch("omlx_worker.job.time", clock):
        job = active(streams=False)
        emit(job, "a", 1)
        assert job.take_due_event() is None
        clock.monotonic.return_value += CHECKPOINT_SECONDS
        assert (event := job.take_due_event())
        assert event.n == 1
        emit(job, "b", 2)
        assert job.take_due_event() is None
        emit(job, "c", 3, reason="length")
        assert (event := job.take_due_event())
        assert (event.since, event.n) == (1, 3)


def test_a_job_that_does_not_stream_and_ends_before_a_checkpoint_publishes_nothing() -> None:
    job = active(streams=False)
    emit(job, "a", 1, reason="length")
    assert job.take_due_event() is None


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
    ending = finished(job)
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


def final_text(texts: dict[int, str]) -> Callable[[Row], Said]:
    """An engine's word on what tokens have made final, by the first of them."""
    return lambda row: Said(texts[row.text_tokens()[0]] if row.produced else "")


def test_a_second_run_goes_on_from_the_tokens_of_the_first() -> None:
    first = active(n=2)
    sent = []
    for step in range(3):
        emit(first, "xy"[step % 2], 10 + step)
        emit(first, "", 20 + step, choice=1)
        sent.append(taken(first))
    second = active(n=2)
    second.resume(sent, final_text({10: "xyx", 20: ""}))
    assert second.sent == 6
    assert [row.text_tokens() for row in second.rows] == [[10, 11, 12], [20, 21, 22]]
    assert second.take_event() is None
    emit(second, "zz", 13)
    emit(second, "late", 23, reason="stop", choice=1)
    event = taken(second)
    assert event.n == 8
    assert [(d.index, d.tokens, d.text) for d in event.choices] == [
        (0, [13], "zz"),
        (1, [23], "late"),
    ]
    assert second.choices[0].text == "xyxzz"
    assert second.rows[0].text_tokens() == [10, 11, 12, 13]


def test_events_can_be_made_again_as_they_were() -> None:
    fields = {"prompt": "abc", "logprobs": True}
    entries = [TokenLogprob(token=t, token_id=i, logprob=-1.0, top=[]) for i, t in enumerate("abc")]
    first, second = active(n=2, **fields), active(n=2, **fields)
    feed(first, Emission("j:0", [0], "", entries[:1]))
    feed(first, Emission("j:1", [0], "A", entries[:1]))
    made = [taken(first)]
    feed(first, Emission("j:1", [1, 2], "BC", entries[1:]))
    made.append(taken(first))
    assert first.events_after(0) == made
    second.resume(made, lambda row: Said("ABC"[: row.produced * (row.row_id == "j:1")]))
    feed(second, Emission("j:0", [1], "ab", entries[1:2]))
    made.append(taken(second))
    feed(second, Emission("j:0", [], "c", [], "stop"))
    made.append(taken(second))
    assert second.events_after(0) == made
    assert second.events_after(made[1].n) == made[2:]
    assert second.events_after(made[3].n) == []


def test_log_probabilities_of_the_first_run_are_part_of_the_result() -> None:
    entries = [TokenLogprob(token=t, token_id=i, logprob=-1.0, top=[]) for i, t in enumerate("ab")]
    fields = {"prompt": "abc", "logprobs": True}
    first, second = active(**fields), active(**fields)
    feed(first, Emission("j:0", [0], "a", entries[:1]))
    second.resume([taken(first)], final_text({0: "a"}))
    feed(second, Emission("j:0", [1], "b", entries[1:], "length"))
    assert taken(second).choices[0].logprobs == entries[1:]
    assert second.choices[0].logprobs == entries


def test_text_that_the_last_step_of_the_first_run_released_is_not_said_again() -> None:
    """A stop token releases what was held back; the run died between that event and its commit."""
    first, second = active(), active()
    emit(first, "a", 1)
    emit(first, "bc", reason="stop")
    second.resume([taken(first)], final_text({1: "a"}))
    assert second.events_after(0) == first.events_after(0)
    emit(second, "bc", reason="stop")
    assert second.take_event() is None
    assert second.choices[0].text == "abc"


def test_text_that_was_final_but_not_yet_said_is_said_first() -> None:
    first, second = active(), active()
    emit(first, "a", 1)
    second.resume([taken(first)], final_text({1: "ab"}))
    emit(second, "c", 2)
    assert taken(second).choices[0].text == "bc"
    assert second.choices[0].text == "abc"


def test_a_stream_whose_text_is_not_that_of_its_tokens_is_refused() -> None:
    first = active()
    emit(first, "a", 1)
    with pytest.raises(ValueError, match="is not that of its tokens"):
        active().resume([taken(first)], final_text({1: "z"}))


def test_a_stream_is_gone_on_with_by_the_model_that_began_it_alone() -> None:
    first = active(fingerprint="fp_1")
    emit(first, "a", 1)
    begun = taken(first)
    with pytest.raises(OtherModel):
        active(fingerprint="fp_2").resume([begun], final_text({1: "a"}))
    second = active(fingerprint="fp_1")
    second.resume([begun], final_text({1: "a"}))
    emit(second, "b", 2, reason="stop")
    assert begun.head["system_fingerprint"] == "fp_1"
    assert taken(second).head is None


def test_a_finished_chat_job_answers_as_openai_does() -> None:
    job = active(messages=[{"role": "user", "content": "hi"}])
    emit(job, "hello", 1, 2, reason="length")
    body = finished(job).result
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
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "speculation": {"steps": 1, "drafted": 0, "accepted": []},
    }


def test_usage_says_how_drafts_fared_by_position() -> None:
    job = active(prompt="hi")
    for drafted, accepted in ((0, 0), (3, 3), (3, 1), (1, 0)):
        tokens = list(range(accepted + 1))
        feed(job, Emission("j:0", tokens, "x", None, None, drafted=drafted, accepted=accepted))

    speculation = job.usage().speculation
    assert (speculation.steps, speculation.drafted) == (4, 7)
    assert speculation.accepted == [2, 1, 1]


def step(job: ActiveJob, text: str, drafted_text: int) -> None:
    feed(job, Emission("j:0", list(map(ord, text)), text, drafted_text=drafted_text))


def test_an_event_names_the_parts_of_its_text_that_drafts_wrote() -> None:
    job = active(prompt="hi")
    step(job, "abc", 2)
    assert taken(job).choices[0].drafted == [(0, 2)]
    step(job, "d", 0)
    assert taken(job).choices[0].drafted is None
    for text, drafted in (("ef", 1), ("g", 0), ("hij", 2)):
        step(job, text, drafted)
    event = taken(job).choices[0]
    assert event.drafted is not None
    assert [event.text[start:end] for start, end in event.drafted] == ["e", "hi"]


def test_a_job_that_does_not_stream_names_no_drafted_parts() -> None:
    job = active(streams=False, prompt="hi")
    step(job, "abc", 2)
    assert taken(job).choices[0].drafted is None


def test_text_that_an_interrupted_run_has_said_is_in_no_drafted_part() -> None:
    first = active(prompt="hi")
    emit(first, "abcd", 1, 2)
    job = active(prompt="hi")
    job.resume([taken(first)], lambda _: Said("ab"))
    step(job, "cdef", 3)
    event = taken(job).choices[0]
    assert (event.text, event.drafted) == ("ef", [(0, 1)])


@pytest.mark.parametrize(
    ("cached", "told"),
    [([2], 2), ([2, 3, 1], 1), ([0, 3, 3], 0), ([4], 3)],
    ids=["one row", "the least of the rows", "read for the first row", "a part of its text too"],
)
def test_usage_says_how_much_of_the_prompt_no_row_has_read(cached: list[int], told: int) -> None:
    job = active(n=len(cached))
    for choice, tokens in enumerate(cached):
        job.rows[choice].cached = tokens
        emit(job, "x", 1, choice=choice, reason="length")
    ending = finished(job)
    assert isinstance(ending.event, EndEvent)
    assert ending.event.usage.prompt_tokens_details.cached_tokens == told
    assert ending.result is not None
    assert ending.result["usage"]["prompt_tokens_details"] == {"cached_tokens": told}
    assert ending.result["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_are_in_events_and_in_the_answer(chat: bool) -> None:
    fields: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    )
    job = active(logprobs=True, top_logprobs=1, **fields)
    for number, token in enumerate(("é", "b")):
        entry = TokenLogprob(token=token, token_id=number, logprob=-0.5, top=[("c", 9, -1.0)])
        feed(job, Emission("j:0", [number], token, [entry], "stop" if number else None))
    logprobs = taken(job).choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs] == ["é", "b"]
    body = finished(job).result
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


@pytest.mark.parametrize("chat", [True, False])
def test_parts_of_a_character_have_their_own_bytes_and_no_text_of_theirs(chat: bool) -> None:
    fields: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    )
    job = active(logprobs=True, top_logprobs=1, **fields)
    first, last = ("\\xc3", [0xC3]), ("\\xa9", [0xA9])
    for number, (text, part) in enumerate([("a", None), first, last, ("b", None)]):
        top = [("\\xc3", 9, -1.0, [0xC3])]
        entry = TokenLogprob(token=text, token_id=number, logprob=-0.5, bytes=part, top=top)
        said = ("a", "", "é", "b")[number]
        feed(job, Emission("j:0", [number], said, [entry], "stop" if number == 3 else None))
    body = finished(job).result
    assert body is not None
    written = body["choices"][0]["logprobs"]
    if chat:
        assert [entry["bytes"] for entry in written["content"]] == [[97], [0xC3], [0xA9], [98]]
        assert written["content"][0]["top_logprobs"][0]["bytes"] == [0xC3]
    else:
        assert written["tokens"] == ["a", "\\xc3", "\\xa9", "b"]
        assert written["text_offset"] == [0, 1, 1, 2]


def test_the_first_event_of_a_chat_has_the_markup_of_its_texts() -> None:
    job = active(reply=FORM, **CHAT)
    emit(job, "a", 1)
    first = taken(job)
    emit(job, "b", 2)
    second = taken(job)
    assert (first.markup, second.markup) == (FORM.markup, None)
    assert job.events_after(0) == [first, second]
    again = active(reply=FORM, **CHAT)
    again.resume([first, second], lambda _: Said("ab"))
    emit(again, "c", 3)
    assert taken(again).markup is None
    assert again.events_after(0)[:2] == [first, second]


def test_calls_are_in_the_message_and_in_the_last_event() -> None:
    job = active(n=2, reply=FORM, **CHAT)
    emit(job, "I call.\n<call>f</call>", 1, reason="stop")
    emit(job, "No.", 2, choice=1, reason="stop")
    ending = finished(job)
    assert isinstance(ending.event, EndEvent)
    assert ending.event.finish_reasons == ["tool_calls", "stop"]
    [[call], none] = ending.event.tool_calls
    assert (call.function.name, none) == ("f", [])
    assert ending.result is not None
    first, second = ending.result["choices"]
    assert first["message"]["tool_calls"] == [call.model_dump()]
    assert first["finish_reason"] == "tool_calls"
    assert second["message"] == {"role": "assistant", "content": "No."}
    theirs = ChatCompletion.model_validate(ending.result).choices[0].message
    assert theirs.tool_calls is not None
    assert theirs.tool_calls[0].id == call.id


def test_a_text_that_was_cut_says_so_also_beside_calls() -> None:
    job = active(reply=FORM, **CHAT)
    emit(job, "<call>f</call><call>g", 1, reason="length")
    ending = finished(job)
    assert isinstance(ending.event, EndEvent)
    assert ending.event.finish_reasons == ["length"]
    assert [call.function.name for call in ending.event.tool_calls[0]] == ["f"]
