"""A chat's stream and its result say the same, and markers count where tokens put them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.client.chunks import ChatChunks
from omlx_producer.client.stream import Delivered
from omlx_producer.wire import GenerationRequest, TokensEvent
from omlx_worker.delivery.response import finished
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.text import RowText, decode_faithfully
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from tests.helpers.chats import spelled, tokenizer_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "'
END = '"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
Piece = tuple[str, bool]
"""A text, and whether its added tokens are spelled by other tokens."""


@functools.cache
def tokenizer() -> TokenizerWrapper:
    made = tokenizer_of("json_tools", thinking=True)
    decode_faithfully(made)
    return made


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), len(tokenizer()))


class Written:
    """A job of two choices, whose tokens are known."""

    def __init__(
        self, texts: Sequence[Sequence[Piece]], *, thinks: bool, tools: bool, **fields: Any
    ) -> None:
        self.tokens = [self._encoded(pieces) for pieces in texts]
        fields |= {"tools": TOOLS} if tools else {}
        messages = [{"role": "user", "content": "x"}]
        kwargs = {"thinks": thinks}
        self.request = GenerationRequest.parse(
            {"model": "m", "messages": messages, "chat_template_kwargs": kwargs, "n": 2, **fields}
        )
        chat = Chat(tokenizer(), "m")
        self.form = chat.reply(self.request, chat.text(self.request))
        self.constraint = chat.constraint(self.request, self.form)

    @staticmethod
    def _encoded(pieces: Sequence[Piece]) -> list[int]:
        tokens: list[int] = []
        for text, is_spelled in pieces:
            tokens += (
                spelled(tokenizer(), text)
                if is_spelled
                else tokenizer().encode(text, add_special_tokens=False)
            )
        return tokens

    def job(self) -> ActiveJob:
        rows = [
            RowRequest(f"j:{choice}", [1], len(tokens) + 1, Sampling(), reply=self.form)
            for choice, tokens in enumerate(self.tokens)
        ]
        claim = Claim("j", "omlx-1", "omlx:m:default", 0.0, 0, b"", None, False)
        return ActiveJob(claim, self.request, rows, streams=True)

    def run(self, job: ActiveJob, steps: Sequence[int], until: int | None) -> list[TokensEvent]:
        """What a job that has begun or not publishes, with some tokens a step.

        Args:
            until: tokens of each row after which the worker dies; None for never.
        """
        rows = [row.request for row in job.rows]
        texts = [RowText(row, tokenizer()) for row in rows]
        for text, row in zip(texts, job.rows, strict=True):
            for token in row.text_tokens():
                text.feed(token)
        events = []
        for count in itertools.cycle(steps):
            for index, row in enumerate(job.rows):
                begun = row.produced
                fresh = self.tokens[index][:until][begun : begun + count]
                if not job.choices[index].finish_reason:
                    marked = len(texts[index].marks)
                    said = "".join(texts[index].feed(token).text for token in fresh)
                    over = until is None and begun + len(fresh) == len(self.tokens[index])
                    said += texts[index].cut() if over else ""
                    row.tokens += fresh
                    marks = texts[index].marks[marked:]
                    reason = "stop" if over else None
                    job.feed(Emission(row.row_id, fresh, said, None, reason, marks=marks))  # type: ignore[arg-type]
            if event := job.take_event():
                events.append(TokensEvent.model_validate_json(event.model_dump_json()))
            if job.finished or not any(
                row.produced < len(self.tokens[index][:until]) for index, row in enumerate(job.rows)
            ):
                return events
        raise AssertionError

    def text_of(self, row: Row) -> Said:
        text = RowText(row.request, tokenizer())
        said = "".join(text.feed(token).text for token in row.text_tokens())
        return Said(said, text.marks)


Told = dict[str, Any]


def streamed(events: Sequence[Any]) -> list[Told]:
    """The choices as a client puts them together from the chunks."""
    chunks = ChatChunks("j", "m")
    told: list[Told] = [{"content": "", "reasoning_content": "", "calls": []} for _ in range(2)]
    for event in events:
        for chunk in chunks.take(event):
            [choice] = chunk["choices"]
            found, delta = told[choice["index"]], choice["delta"]
            for name in ("content", "reasoning_content"):
                found[name] += delta.get(name) or ""
            found["calls"] += [call["function"] for call in delta.get("tool_calls", ())]
    return told


def whole(job: ActiveJob) -> list[Told]:
    """The choices of the result."""
    result = finished(job).result
    assert result is not None
    messages = [choice["message"] for choice in result["choices"]]
    return [
        {
            "content": message["content"] or "",
            "reasoning_content": message.get("reasoning_content", ""),
            "calls": [call["function"] for call in message.get("tool_calls", ())],
        }
        for message in messages
    ]


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    END,
    "a",
    "é",
    "\n",
    "<",
    "th",
]
TEXT = st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), max_size=8)
STEPS = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@settings(max_examples=150)
@given(
    texts=st.tuples(TEXT, TEXT),
    thinks=st.booleans(),
    tools=st.booleans(),
    steps=st.tuples(STEPS, STEPS),
    dies=st.none() | st.integers(0, 60),
)
@example(
    texts=([("a", True), ("</think>", True), ("</think>", False)], [("<think>", True)]),
    thinks=True,
    tools=False,
    steps=([3], [1]),
    dies=9,
)
def test_a_stream_says_what_the_result_says_after_a_take_over_too(
    texts: tuple[list[Piece], list[Piece]],
    thinks: bool,
    tools: bool,
    steps: tuple[list[int], list[int]],
    dies: int | None,
) -> None:
    written = Written(texts, thinks=thinks, tools=tools)
    alone = written.job()
    events = written.run(alone, steps[0], None)
    assert streamed([*events, finished(alone).event]) == whole(alone)

    job, begun = written.job(), list[TokensEvent]()
    if dies is not None:
        begun = written.run(written.job(), steps[0], dies)
        job.resume(begun, written.text_of)
    events = [*begun, *written.run(job, steps[1], None)]

    assert whole(job) == whole(alone)
    assert streamed([*events, finished(job).event]) == whole(alone)
    assert job.events_after(0) == events
    again, said = Delivered(job.id, 0), list[TokensEvent]()
    for event in [*events[: len(events) // 2], *job.events_after(0)]:
        if (fresh := again.take(event.model_dump_json().encode())) is not None:
            assert isinstance(fresh, TokensEvent)
            said.append(fresh)
    end = finished(job).event
    assert again.take(end.model_dump_json().encode()) == end
    assert streamed([*said, end]) == whole(alone)


def test_chunks_and_the_result_begin_alike_though_another_run_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = Written([[("a b c", False)]] * 2, thinks=False, tools=False)
    chunks = ChatChunks("j", "")
    monkeypatch.setattr(time, "time", lambda: 5.0)
    begun = written.run(written.job(), [1], 1)
    monkeypatch.undo()
    job = written.job()
    job.resume(begun, written.text_of)

    events = [*begun, *written.run(job, [1], None), finished(job).event]

    result = finished(job).result
    assert result is not None
    assert (result["created"], result["model"]) == (5, "m")
    for chunk in [chunk for event in events for chunk in chunks.take(event)]:
        told = {**chunk, "object": "chat.completion", "usage": result["usage"]}
        assert told == {**result, "choices": chunk["choices"]}


def test_a_stream_without_tokens_begins_as_its_result_does() -> None:
    job = Written([[], []], thinks=False, tools=False).job()
    for row in job.rows:
        job.feed(Emission(row.row_id, [], "", finish_reason="stop"))
    ending = finished(job)
    assert ending.result is not None
    for chunk in ChatChunks("j", "").take(ending.event):
        assert chunk["model"] == ending.result["model"]


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_constrained_answer_may_spell_the_markers(thinks: bool, tools: bool) -> None:
    answer = '{"a": "b<think>c</think>d", "e": "<tool_call>f</tool_call>"}'
    thought = "hm </think> hm" if thinks else ""
    texts = [[(thought, True), ("</think>" if thinks else "", False), (answer, True)]] * 2
    written = Written(texts, thinks=thinks, tools=tools, response_format={"type": "json_object"})
    matcher = grammars().compile(written.constraint).start.deep_copy()
    assert matcher.try_consume_tokens(written.tokens[0]) == len(written.tokens[0])
    assert matcher.is_accepting()
    job = written.job()

    events = written.run(job, [4], None)

    for told in (whole(job), streamed([*events, finished(job).event])):
        assert told == [{"content": answer, "reasoning_content": thought, "calls": []}] * 2
