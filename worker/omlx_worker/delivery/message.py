"""The message of a chat's answer: its thinking, its content and its calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from omlx_producer.wire import ToolCall
from omlx_producer.wire.markup import read
from omlx_worker.engine.reply import ReplyForm


def message_of(
    text: str,
    form: ReplyForm | None,
    row_id: str,
    *,
    marks: Collection[int] = (),
    cut: bool = False,
) -> dict[str, Any]:
    """The assistant's message for a whole text.

    Calls stay in the content if none can be read. An unreadable one beside others is dropped: it
    was cut, as a rule. Dropped are also those that the form has no room for. Content is None if
    there is no text beside calls.

    Args:
        marks: where in the text tokens that may write markers begin.
        cut: whether the text had to end. Of a call without its end marker only what has an end of
            its own is read then, as what is left of it may look whole.
        row_id: names the calls, so a retry gives them the same ids.
    """
    if form is None:
        return {"role": "assistant", "content": text}
    reply = read(text, form.markup, marks)
    written, last = reply.calls, list[str]()
    if cut and reply.in_call and form.markup.call_end:
        written, last = written[:-1], written[-1:]
    calls = [call for each in written if form.read_call for call in form.read_call(each)]
    calls += [call for each in last if form.read_cut for call in form.read_cut(each)]
    calls = calls if form.parallel else calls[:1]
    if reply.calls and not calls:
        reply = read(text, form.markup, marks, calls=False)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["content"] = (reply.content.strip() and reply.content) or None
        message["tool_calls"] = [
            ToolCall(id=_call_id(row_id, index), function=call).model_dump()
            for index, call in enumerate(calls)
        ]
    return message


def _call_id(row_id: str, index: int) -> str:
    return f"call_{hashlib.blake2b(f'{row_id}:{index}'.encode(), digest_size=12).hexdigest()}"
